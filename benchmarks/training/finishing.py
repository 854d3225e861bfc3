"""Does another divergence in the last fifth of the steps help a drafter, and do selected tokens (AdaSPEC)? Several seeds.

    python -m benchmarks.training.finishing TARGET WRITTEN [--finish tvd++,lk] [--select 0.4] [--seeds 3]
                                            [--steps 300] [--batch-size 4]
    python -m benchmarks.training.finishing TARGET WRITTEN --shape 2x192 --learning-rate 1e-3 --out FOLDER
                                            [--finish tvd++,lk] [--seeds 3]

TARGET is the target's folder, WRITTEN the `generate` stage of a build whose drafter is a head. All arms begin with the same first
guess and read the same rows; a seed is another order. α is the mean of Σ min(p, q) at temperature 1, on rows that no arm has
learnt, for the first and the second draft token. The table has every run, then each arm's mean difference to forward KL alone.
An arm of `--select` has forward KL on that share of the tokens, at the same learning rate; AdaSPEC's reference is the head that
forward KL alone gave with the same seed. With `--shape` (layers x width) the drafter is an independent one, and both α are of the
first draft token, at temperature 1 and at 0, on 64 texts that no arm has learnt. A run that is done is not made again;
other options want another `--out`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from edgespec_recipes.training.distill_head import distill_head

from benchmarks.common import begun, command_line, kept, same_options, words
from benchmarks.training.acceptance_curve import Run, part_of
from edgespec.core.files import read_jsonl
from edgespec.core.table import table
from edgespec.recipe.schema import DistillOptions, DrafterOptions

ALONE = "fkl alone"
RESULT = "finishing.json"
HELD_OUT = 64  # texts


def independent(out: Path, given: argparse.Namespace, arm: str, seed: int) -> dict[str, float]:
    """α of an independent drafter's first token at T = 1 and at T = 0, after one training."""
    how = argparse.Namespace(**vars(given), seed=seed, context=512, held_out=HELD_OUT)
    how.learning_rate = {"model": given.learning_rate}
    layers, hidden = map(int, given.shape.split("x"))
    shape = DrafterOptions(init="components", vocabulary=given.vocabulary, layers=layers, hidden=hidden)
    with part_of(given.written, out, sys.maxsize, HELD_OUT, states=False) as (learnt, held_out, _):
        run = Run("model", learnt, held_out, how, shape)
        run.options = replace(run.options, finish="" if arm == ALONE else arm)
        first, second = run.acceptance(run.trained(out / "training", given.steps)[0])
    return {"alpha": first, "alpha_2": second}


def of_a_head(out: Path, given: argparse.Namespace, arm: str, seed: int) -> dict[str, float]:
    """α of a head's first and second draft token after one training."""
    selects = arm in given.select
    options = DistillOptions(
        divergence="fkl",
        finish="" if selects or arm == ALONE else arm,
        select_fraction=float(arm) if selects else 1.0,
        scale_learning_rate=False,
        text_fraction=0.0,
        target_side="stored",
        unrolled_steps=2,
        steps=given.steps,
        warmup_steps=given.steps // 10,
        batch_size=given.batch_size,
        context=512,
        learning_rate=given.learning_rate,
        watch_steps=given.steps,
        watch_rows=given.watched,
    )
    drafter = DrafterOptions(kind="head", vocabulary=given.vocabulary)
    reference = folder(given, ALONE, seed) / "model" if selects else None
    distill_head(out, given.target, given.written, drafter, options, seed, reference)
    last = [row for row in read_jsonl(out / "log.jsonl") if "alpha" in row][-1]
    return {"alpha": last["alpha"], "alpha_2": last["alpha_2"]}


def folder(given: argparse.Namespace, arm: str, seed: int) -> Path:
    where: Path = given.out / f"{arm.replace(' ', '-')}-{seed}"
    return where


def alphas(given: argparse.Namespace, arm: str, seed: int) -> tuple[float, float]:
    """Both α after one training. `arm`: the divergence of the last fifth, or the share of selected tokens; ALONE is neither."""
    out, measure = folder(given, arm, seed), independent if given.shape else of_a_head
    found = kept(out / RESULT, partial(measure, out, given, arm, seed))
    return found["alpha"], found["alpha_2"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("written", type=Path)
    parser.add_argument("--finish", type=words, default="tvd++,lk")
    parser.add_argument("--select", type=words, default="", help="shares of the tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--watched", type=int, default=32, help="rows of 512 tokens held out")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--shape", default="", help="layers x width of an independent drafter, in place of a head"
    )
    parser.add_argument("--out", type=Path, default=Path("build/finishing"))
    given = parser.parse_args(arguments)
    if given.shape and given.select:
        parser.error("--select is of a head; leave --shape or --select out")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    same_options(
        given.out / "options.json", given, begun(given.out, RESULT), "finish", "select", "seeds", "out"
    )
    both = ("α at T = 1", "at T = 0") if given.shape else ("α of the first token", "of the second")
    arms = (ALONE, *given.finish, *given.select)  # the first makes the references of the others
    found = {(arm, seed): alphas(given, arm, seed) for seed in range(given.seeds) for arm in arms}
    rows = [(arm, str(seed), *(f"{a:.4f}" for a in each)) for (arm, seed), each in sorted(found.items())]
    print(table(("last fifth, or share", "seed", *both), rows, left=2), end="\n\n")
    for arm in arms[1:]:
        pairs = np.array([np.subtract(found[arm, seed], found[ALONE, seed]) for seed in range(given.seeds)])
        mean, spread = pairs.mean(0), pairs.std(0, ddof=1) if given.seeds > 1 else [float("nan")] * 2
        told = ", ".join(f"{m:+.4f} (standard deviation {s:.4f})" for m, s in zip(mean, spread, strict=True))
        print(f"{arm} against {ALONE}, {both[0]} and {both[1]}: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
