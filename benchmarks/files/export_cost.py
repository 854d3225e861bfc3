"""What an export of a published shape costs: time, peak memory and size, each format in a process of its own.

    python -m benchmarks.files.export_cost [TARGET] [--formats q4_0,f16,onnx-int4] [--shard-gib 1]
                                           [--folder build/export-cost] [--keep]
    python -m benchmarks.files.export_cost tinyllama-1.1b-chat --formats onnx-mixed,q_mixed

The checkpoint has the target's shape and random bf16 weights, written shard by shard (a matrix in memory at a time), a byte-level
tokenizer and nothing else. A format is a GGUF precision, or onnx- and an ONNX one; mixed files choose their bits first, at 5.5 a
weight, on random tokens: what that takes does not depend on the text. "peak" is the largest resident memory of the
exporting process (Python, libraries and mapped files included), beside the largest shard: GGUF's bar is 1.3 times that, or 6 GiB.
Each file is then opened in its engine and has to give finite logits. What is measured is kept in results.json, so an interrupted
run goes on where it was; the models are removed once measured unless --keep is given. Linux only (the peak is read from /proc).
"""

from __future__ import annotations

import argparse
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec_export.synthetic.checkpoint import write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import command_line, in_own_process, same_options, words
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json, write_text
from edgespec.core.table import table
from edgespec.recipe.precisions import PRECISIONS
from edgespec.recipe.targets import shape_of_target

GIB = 2**30
ONNX = "onnx-"
FORMATS = (*PRECISIONS["gguf"], *(f"{ONNX}{name}" for name in PRECISIONS["onnx"]))
BYTES = 2  # of a bf16 weight
EXPORT = """
import sys, time
from pathlib import Path
model, out, precision, onnx = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "onnx"
start = time.monotonic()
if "mixed" in precision:
    import random
    from edgespec.recipe.schema import ExportOptions
    from edgespec_export.bits.files import Mixed
    from edgespec_export.bits.texts import LONGEST, Text
    texts = [Text([random.randrange(200) for _ in range(LONGEST)], 64) for _ in range(64)]
    mixed = Mixed(model, "target", lambda: texts, ExportOptions(bits=5.5))
    export = lambda model, out, precision: (mixed.onnx if onnx else mixed.gguf)(out)
elif onnx and precision == "int4":
    from edgespec_export.onnx.by_layers import export_int4
    export = lambda model, out, precision: export_int4(model, out)
elif onnx:
    from edgespec_export.onnx.to_onnx import export_onnx as export
else:
    from edgespec_export.gguf.to_gguf import export_gguf as export
result = export(model, out, precision)
seconds = time.monotonic() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024
import json
print(json.dumps({"seconds": seconds, "peak": peak, **result}))
"""
OPEN = """
import sys
from pathlib import Path
import numpy as np
if sys.argv[2] == "onnx":
    from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine as Engine
else:
    from edgespec_runtime.engines.llamacpp import LlamaCppEngine as Engine
engine = Engine(Path(sys.argv[1]), 64)
logits = np.array(engine.forward([1, 2, 3, 4]))
assert np.isfinite(logits).all() and logits.std() > 0.01, logits
print("true")
"""


def write_tokenizer(folder: Path) -> None:
    """Bytes, one merge (llama.cpp wants one) and one special token; the rest of the vocabulary goes unused."""
    entries = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(entries)}, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>", "eos_token": "<|end|>"}
    write_json(folder / "tokenizer_config.json", settings)


def measure(model: Path, out: Path, kind: str) -> dict[str, Any]:
    """Export in one new process, open the file in another."""
    engine = "onnx" if kind.startswith(ONNX) else "gguf"
    found: dict[str, Any] = in_own_process(
        "-c", EXPORT, model, out, kind.removeprefix(ONNX), engine, TQDM_DISABLE="1"
    )
    in_own_process("-c", OPEN, out, engine)
    return found


def report(results: dict[str, Any]) -> str:
    rows = [
        [
            kind,
            f"{one['seconds']:.0f} s",
            f"{one['peak'] / GIB:.2f} GiB",
            f"{one['peak'] / results['largest_shard']:.2f}",
            f"{one['bytes'] / GIB:.2f} GiB",
            "; ".join(one["notes"]),
        ]
        for kind, one in results["formats"].items()
    ]
    return table(("format", "time", "peak memory", "x largest shard", "written", ""), rows, markdown=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", nargs="?", default="tinyllama-1.1b-chat")
    parser.add_argument("--formats", type=words, default="q4_0,f16,onnx-int4")
    parser.add_argument("--shard-gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("build/export-cost"))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and the exported files")
    given = parser.parse_args(arguments)
    if unknown := set(given.formats).difference(FORMATS):
        parser.error(f"--formats names {', '.join(sorted(unknown))}; the formats are {', '.join(FORMATS)}")
    return given


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    shape = shape_of_target(given.target)
    base = given.folder / given.target
    model, results_file = base / "model", base / "results.json"
    base.mkdir(parents=True, exist_ok=True)
    made = [results_file] if results_file.exists() else []
    same_options(base / "options.json", given, made, "target", "formats", "folder", "keep")
    results: dict[str, Any] = read_json(results_file) if made else {"formats": {}}
    missing = [kind for kind in given.formats if kind not in results["formats"]]
    needed, free = 3.0 * BYTES * shape.parameters, shutil.disk_usage(base).free
    if missing and needed > free:  # the checkpoint, and at most an F16 file and scratch of its size beside it
        raise InputError(
            f"{base} has {free / GIB:.1f} GiB free and the run takes up to {needed / GIB:.1f} GiB; give --folder"
        )
    with ExitStack() as leftovers:  # they go whatever ends the run
        if not given.keep:
            leftovers.callback(shutil.rmtree, model, ignore_errors=True)
        if missing:
            start = time.monotonic()
            write_checkpoint(shape, model, shard_bytes=int(given.shard_gib * GIB))
            write_tokenizer(model)
            sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
            results |= {"largest_shard": max(sizes), "shards": len(sizes), "checkpoint": sum(sizes)}
            seconds = time.monotonic() - start
            print(f"checkpoint: {sum(sizes) / GIB:.2f} GiB in {len(sizes)} shards, {seconds:.0f} s")
        for kind in missing:
            out = base / (kind if kind.startswith(ONNX) else f"{kind}.gguf")
            try:
                results["formats"][kind] = measure(model, out, kind)
                write_json(results_file, results)
            finally:
                if not given.keep:
                    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    print(report(results))


if __name__ == "__main__":
    main()
