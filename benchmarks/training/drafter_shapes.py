"""Layers and width of an independent drafter: what a step costs and what it accepts, for several shapes and one training.

    python -m benchmarks.training.drafter_shapes TARGET WRITTEN FILES [--shapes 4x128,2x256] [--steps 300] [--out FOLDER]

TARGET is the target's folder, WRITTEN the `generate` stage of a build whose drafter is a head, FILES the folder of the target's
int8 files for ONNX Runtime. Every shape (layers x hidden size) learns the same rows in the same order, from the target's tables
by principal components; α is that of the first draft token on texts that nobody learnt (acceptance_curve.py). A step is one pass
of one token at int8 on one thread, behind 256 tokens and a pass of the target; all drafters take turns. The last lines are a
least-squares fit of a step's time, and what a layer costs in it, in weights. A training that is done is not made
again; other options want another --out.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_recipes.models.loading import save_model
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine

from benchmarks.common import begun, command_line, kept, same_options, words
from benchmarks.training.acceptance_curve import RESULT, SHAPES, Run, part_of
from edgespec.core.shapes import ModelShape
from edgespec.core.table import table
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import DrafterOptions

CONTEXT, ROUNDS = 256, 200


def trained(out: Path, options: DrafterOptions, given: argparse.Namespace) -> dict[str, float]:
    """α at T = 1 and T = 0 of one shape; its int8 files lie in out/onnx."""
    with part_of(given.written, out, sys.maxsize, given.held_out, states=False) as (learnt, held_out, text):
        run = Run("model", learnt, held_out, given, options)
        model, counts = run.trained(out / "training", given.steps)
        warm, greedy = run.acceptance(model)
    save_model(model.cpu(), given.target, out / "model")
    export_onnx(out / "model", out / "onnx", "int8")
    return {"text": text, "tokens": counts["tokens"], "alpha": warm, "greedy": greedy}


def step_times(folders: list[Path], files: Path) -> np.ndarray:
    """[folders + 2] median seconds: a step of each drafter, of the target, and the target's pass of two tokens."""
    drafters = [OnnxRuntimeEngine(each, 512, threads=1, graph=each / FAST_GRAPH) for each in folders]
    target = OnnxRuntimeEngine(files, 512, graph=files / FAST_GRAPH)
    passes = [*((each, [1]) for each in drafters), (target, [1]), (target, [1, 1])]
    for engine in (*drafters, target):
        CachedEngine(engine).read([1] * CONTEXT)
    times = np.zeros((ROUNDS, len(passes)))
    for row in times:
        for column, (engine, tokens) in enumerate(passes):
            other = drafters[0] if engine is target else target
            other.forward([1])  # as in decoding: a drafter's weights leave the cache
            other.rewind(CONTEXT)
            start = perf_counter()
            engine.forward(tokens)
            row[column] = perf_counter() - start
            engine.rewind(CONTEXT)
    found: np.ndarray = np.median(times, axis=0)
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("written", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument(
        "--shapes", type=words, default="4x128,2x128,2x256,3x256,2x320,4x320", help="layers x hidden size"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, help="draft tokens (default: those that the rule takes)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--held-out", type=int, default=64, help="texts that no run reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/drafter-shapes"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    same_options(given.out / "options.json", given, begun(given.out, RESULT), "shapes", "files", "out")
    given.learning_rate = {"model": given.rate}
    names = given.shapes
    base, found = replace(SHAPES["model"], vocabulary=given.vocabulary), []
    for name in names:
        layers, hidden = map(int, name.split("x"))
        options, out = replace(base, layers=layers, hidden=hidden), given.out / name
        found.append(kept(out / RESULT, partial(trained, out, options, given)))
        print(f"{name}: α {found[-1]['alpha']:.3f} at T = 1, {found[-1]['greedy']:.3f} at T = 0", flush=True)
    shapes = [ModelShape.from_config(read_config(given.out / name / "model")) for name in names]
    *steps, plain, two = step_times([given.out / name / "onnx" for name in names], given.files)
    rows = [
        (
            name,
            f"{shape.streamed_parameters / 1e6:.1f}M",
            f"{1e6 * step:.0f}",
            f"{step / plain:.3f}",
            f"{each['alpha']:.3f}",
            f"{each['greedy']:.3f}",
            f"{(1 + each['greedy']) / (two + step) * plain:.2f}",
        )
        for name, shape, step, each in zip(names, shapes, steps, found, strict=True)
    ]
    heads = (
        "layers x width",
        "streamed",
        "step, µs",
        "of the target's",
        "α at T = 1",
        "at T = 0",
        "γ = 1 at T = 0",
    )
    print(table(heads, rows))
    told = np.array([(1, shape.layers, shape.streamed_parameters) for shape in shapes], float)
    start, layer, weight = np.linalg.lstsq(told, np.array(steps), rcond=None)[0]
    print(
        f"target: a step {1e3 * plain:.2f} ms, two tokens {two / plain:.2f} steps; {found[0]['tokens']:,} tokens of training on "
        f"{found[0]['text']:,}\na drafter's step: {1e6 * start:.0f} µs + {1e6 * layer:.0f} µs a layer + "
        f"{1e12 * weight:.0f} µs for a million weights; a layer costs as much as {layer / weight / 1e6:.2f}M weights"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
