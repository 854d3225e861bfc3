"""How should an int8 file round? Blocks of 32 or 64 weights, inputs as they are or smoothed: what is kept of the model's answers.

    python -m benchmarks.files.int8_rounding smollm2-135m-instruct [--replies 32]

The model answers questions of `edgespec bench` in torch (float32); every file reads these replies in blocks of four tokens.
top-1: the share of the model's most likely tokens that are the file's too. "weights alone": exact mode, which rounds no inputs.
Brackets are 95 % bootstrap intervals over replies. int8_blocks.py has the speeds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from itertools import product
from pathlib import Path

from edgespec_export.answers.held_out import HeldOut
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.smoothing import smoothed
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine

from benchmarks.common import command_line
from benchmarks.files.bits_quality_speed import CONTEXT, replies_of
from edgespec.building.pair import gguf_target
from edgespec.core.table import interval, table

BLOCKS = (32, 64)


def export(model: Path, out: Path, block: int, *, smooth: bool) -> Path:
    """An int8 folder with blocks of so many weights."""
    to_onnx.INT8_BLOCK_SIZE = block
    to_onnx.smoothed = smoothed if smooth else lambda family, kept: contextlib.nullcontext()
    to_onnx.export_onnx(model, out, "int8")
    return out


def kept(folder: Path, graph: str, held: HeldOut) -> list[str]:
    """Top-1 and KL of one graph."""
    engine = OnnxRuntimeEngine(folder, CONTEXT, default_threads(), folder / graph)
    answers = held.answers(CachedEngine(engine), samples=False)
    engine.close()
    assert answers is not None
    return ["{:.1%} [{:.1%}, {:.1%}]".format(*answers.top1), interval(*answers.kl, digits=4)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--replies", type=int, default=32)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    found = gguf_target(given.model)
    model = Path(given.model) if found is None else found.folder
    held, _ = replies_of(model, given.replies, others=False)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for block, smooth in product(BLOCKS, (False, True)):
            folder = export(model, Path(scratch) / f"{block}-{smooth}", block, smooth=smooth)
            how = "smoothed" if smooth else "as they are"
            rows.append(
                [str(block), how, *kept(folder, to_onnx.FAST_GRAPH, held), *kept(folder, "model.onnx", held)]
            )
    print(f"{len(held.replies)} replies, {sum(map(len, held.logits))} tokens\n")
    print(table(("block", "inputs", "top-1", "KL", "top-1, weights alone", "KL, weights alone"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
