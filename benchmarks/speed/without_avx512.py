"""ONNX Runtime and llama.cpp as they run on a processor without AVX-512: copies of both, in a folder for PYTHONPATH.

    python -m benchmarks.speed.without_avx512 FOLDER
    PYTHONPATH=FOLDER python -m benchmarks.speed.pair_table BUNDLE --files onnxruntime:int8

ONNX Runtime asks the processor which registers may be used (the instruction xgetbv). It takes its AVX-512 kernels only where the
answer names their registers. In the copy the answer is a constant that names those of SSE and AVX. llama.cpp is compiled anew,
for AVX2; that takes some minutes. Torch is not changed. Cores, clock and memory stay those of this machine: an older processor
may be slower in all of them. x86-64 and Linux only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import command_line

# xgetbv behind "xor ecx, ecx", or before its two halves are joined; other code has the same three bytes in other places
XGETBV = re.compile(rb"(?<=\x31\xc9)\x0f\x01\xd0|\x0f\x01\xd0(?=\x89\xc0\x48\xc1\xe2\x20)")
SSE_AND_AVX = b"\x6a\x07\x58"  # push 7, pop rax: x87, SSE and AVX registers; as many bytes as xgetbv
LIBRARIES = "capi/*.so*"
COMPILED = ("NATIVE=OFF", "AVX=ON", "AVX2=ON", "BMI2=ON", "FMA=ON", "F16C=ON", "AVX512=OFF")


def copy_onnxruntime(folder: Path) -> int:
    """Copy the installed package into `folder`, its libraries without their question; how often they asked it."""
    found = importlib.util.find_spec("onnxruntime")
    if found is None or found.origin is None:
        raise SystemExit("onnxruntime is not installed; python3 make.py test installs it")
    copied, asked = folder / "onnxruntime", 0
    shutil.copytree(Path(found.origin).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for library in copied.glob(LIBRARIES):
        content, count = XGETBV.subn(SSE_AND_AVX, library.read_bytes())
        library.write_bytes(content)
        asked += count
    if not asked:
        raise SystemExit(
            f"the libraries in {copied} do not ask for AVX-512 as expected; this onnxruntime is built differently"
        )
    return asked


def compile_llamacpp(folder: Path) -> None:
    """Compile llama-cpp-python of the installed version into `folder`. Nothing goes through pip's cache: it knows no flags."""
    wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
    settings = {"CMAKE_ARGS": " ".join(f"-DGGML_{flag}" for flag in COMPILED)}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
    pip += ["--no-binary", "llama-cpp-python", "--target", str(folder), wanted]
    if subprocess.run(pip, env={**os.environ, **settings}).returncode:
        raise SystemExit(f"{wanted} could not be compiled; see pip's message above")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    folder = parse(arguments).folder.resolve()
    if folder.exists():
        raise SystemExit(f"{folder} is there already; name a new folder")
    asked = copy_onnxruntime(folder)
    compile_llamacpp(folder)
    print(f"onnxruntime without AVX-512 ({asked} places), llama.cpp for AVX2: PYTHONPATH={folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
