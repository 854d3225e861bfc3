"""Every ONNX form of one model: size of the files, time of a pass, distance of a block from single steps and from fp32.

    python -m benchmarks.files.npu_precisions MODEL TEXT [--threads 1] [--past 64] [--rounds 60]

MODEL is a model folder, TEXT a build's folder generate/, whose rows are read and, for integer activations, calibrated on. Two
lines are no export of ours; they are why fp16 and int8 are widened when they are loaded (to_onnx_stored.py):

    int8, level 1    MatMulNBits with 8 bits and float activations
    fp16, all of it  the GroupQueryAttention graph converted to float16, cache included; its logits are widened

A time is the smallest of `--rounds` passes of 1, 4 and 64 tokens behind a past of `--past`, in turns over all forms. Differences
are the largest of a logit over two rows; "block" feeds four tokens at once against one, "flips" are changed argmaxes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from edgespec_export.bits.texts import written_rows
from edgespec_export.npu.qdq import BITS, calibrate, export_qdq
from edgespec_export.npu.to_npu import FLOAT_PRECISION, export_npu
from edgespec_export.onnx.to_onnx import FAST_GRAPH, PRECISIONS, export_onnx
from edgespec_runtime.doctor.block_difference import block_difference
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.engines.static import StaticEngine

from benchmarks.common import command_line
from edgespec.core.table import table
from edgespec.recipe.devices import ONNXRUNTIME, OPENVINO
from edgespec.recipe.schema import ExportOptions

COUNTS = (1, 4, 64)
LENGTH = 512
Array = np.ndarray[Any, Any]


def level_one(folder: Path) -> Path:
    """The 8-bit graph of the fast mode with float activations."""
    model = onnx.load(folder / FAST_GRAPH, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(model, folder / "level-1.onnx")
    return folder / "level-1.onnx"


def halved(folder: Path) -> Path:
    """The fp32 graph with every float16 there is, but for the logits."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(folder / "model.onnx")
    small = convert_float_to_float16(
        model,
        keep_io_types=["logits"],
        disable_shape_infer=True,
        op_block_list=[],
        force_fp16_initializers=True,
    )
    onnx.save(small, folder / "halved.onnx")
    return folder / "halved.onnx"


def forms(model: Path, rows: list[list[int]], out: Path, threads: int) -> dict[str, tuple[Engine, int]]:
    """(engine, bytes of its files) by name."""
    found: dict[str, tuple[Engine, int]] = {}

    def add(name: str, folder: Path, graph: Path | None = None) -> None:
        files = [file for file in folder.iterdir() if file.suffix in (".onnx", ".data")]
        kept = [
            file
            for file in files
            if file.suffix == ".data" or file.name == (graph.name if graph else "model.onnx")
        ]
        size = sum(file.stat().st_size for file in kept)
        found[name] = (OnnxRuntimeEngine(folder, context_length=LENGTH, threads=threads, graph=graph), size)

    for precision in PRECISIONS:
        export_onnx(model, out / precision, precision)
        add(precision, out / precision)
        if (out / precision / FAST_GRAPH).exists():
            add(f"{precision}, fast", out / precision, out / precision / FAST_GRAPH)
    add("int8, level 1", out / "int8", level_one(out / "int8"))
    graph = halved(out / "fp32")
    found["fp16, all of it"] = (
        OnnxRuntimeEngine(out / "fp32", context_length=LENGTH, threads=threads, graph=graph),
        graph.stat().st_size,
    )
    floats = out / f"static {FLOAT_PRECISION}"
    export_npu(model, floats, ExportOptions(npu_length=LENGTH))
    seen = calibrate(floats, rows)
    for precision in BITS:
        export_qdq(floats, out / f"static {precision}", precision, seen)
    for backend in (ONNXRUNTIME, OPENVINO) if find_spec("openvino") else (ONNXRUNTIME,):
        for precision in (FLOAT_PRECISION, *BITS):
            folder = out / f"static {precision}"
            size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".onnx", ".data"))
            name = f"static {precision}, {backend}"
            found[name] = (StaticEngine(folder, threads=threads, backend=backend), size)
    return found


def fed(engine: Engine, row: list[int]) -> Array:
    """Logits [n, V] in single steps."""
    return CachedEngine(engine).read_rows(row, 1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--past", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    rows = written_rows(given.text)
    long = sorted((row for row in rows if len(row) >= 64), key=len)[-2:]
    text = (long[0] * (given.past // len(long[0]) + 1))[: given.past]
    with tempfile.TemporaryDirectory() as scratch:
        engines = forms(given.model, rows, Path(scratch), given.threads)
        best = {name: dict.fromkeys(COUNTS, float("inf")) for name in engines}
        for _ in range(given.rounds):
            for name, (engine, _) in engines.items():
                for count in COUNTS:
                    CachedEngine(engine).read(text)
                    start = time.perf_counter()
                    engine.forward(long[0][:count])
                    best[name][count] = min(best[name][count], time.perf_counter() - start)
        reference = [fed(engines["fp32"][0], row) for row in long]
        lines = []
        for name, (engine, size) in engines.items():
            singles = [fed(engine, row) for row in long]
            moved = block_difference(CachedEngine(engine), long, sys.maxsize, sizes=(4,))
            away = max(float(np.abs(a - b).max()) for a, b in zip(singles, reference, strict=True))
            same = np.concatenate(
                [a.argmax(1) == b.argmax(1) for a, b in zip(singles, reference, strict=True)]
            )
            times = [f"{best[name][count] * 1e3:.2f}" for count in COUNTS]
            blocks = (f"{moved.largest:.1e}", f"{moved.flips}/{moved.positions}")
            away_from = (f"{away:.1e}", f"{same.mean():.1%}")
            lines.append((name, f"{size / 2**20:.1f}", *times, *blocks, *away_from))
    print(f"{given.threads} threads, {given.past} tokens of past, smallest of {given.rounds}\n")
    print(table(("form", "MiB", *(f"ms, {n}" for n in COUNTS), "block", "flips", "to fp32", "top-1"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
