"""Would it pay here to draft the next block while the target still verifies this one?

    python -m benchmarks.speed.overlap FOLDER [--engine llama.cpp] [--precision q4_0] [--gamma 3] [--seconds 60] [--threads 2]

FOLDER has the config.json of a target, or is the name of a known one; its weights and its drafter's are random, which changes no
time. A block is γ single steps of the drafter and one pass of γ + 1 tokens of the target, whose kernels hold no lock of Python's.
One after the other they take D and V seconds; both at once take E. A block drafted ahead is of use only if the target accepts
every token of the one before (α^γ) and the drafter guesses the token that the target adds (α, at most): else it is drafted again.
So overlap is faster by at most

    (D + V) / (E + (1 − α^(γ + 1)) · D)

Both models share the processors while both run, so the drafter has one thread of its own, and the target all threads or one less.
The ways take turns; ratios are paired by round, in brackets 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from edgespec_export.synthetic.pair import build
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine, default_threads
from edgespec_runtime.pair.bundle import ONE_THREAD_BELOW, load_engine

from benchmarks.common import command_line, sizes_of
from edgespec.core.files import write_json
from edgespec.core.metrics import bootstrap, median
from edgespec.core.progress import progress
from edgespec.core.table import interval, table
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME

CONTEXT, CACHED = 256, 64  # tokens
RATES = (0.5, 0.7, 0.9)
AGAIN = 3  # blocks in a row: the threads of a model that has just run still wait for its next pass


def drafting(model: Engine, count: int) -> None:
    for token in range(count):
        model.forward([token + 1])
    model.rewind(CACHED)


def verifying(model: Engine, count: int) -> None:
    model.forward(range(1, count + 1))
    model.rewind(CACHED)


def seconds(block: Callable[[], None]) -> float:
    start = perf_counter()
    for _ in range(AGAIN):
        block()
    return (perf_counter() - start) / AGAIN


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("folder")
    parser.add_argument("--engine", default=LLAMACPP, choices=(LLAMACPP, ONNXRUNTIME))
    parser.add_argument("--precision", default="q4_0")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path, help="write every round's seconds to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    pair = build(given.folder, given.engine, given.precision)

    def load(role: str, threads: int) -> Engine:
        model = load_engine(given.engine, pair.paths[role], CONTEXT, threads)
        CachedEngine(model).read([1] * CACHED)
        return model

    small = pair.shapes["drafter"].parameters < ONE_THREAD_BELOW["drafter"]
    usual = load("drafter", 1 if small else given.threads)
    alone = usual if small else load("drafter", 1)
    target = load("target", given.threads)
    targets = {given.threads: target}
    if given.threads > 1:
        targets[given.threads - 1] = load("target", given.threads - 1)
    with ThreadPoolExecutor(1) as helper:

        def at_once(other: Engine) -> None:
            ahead = helper.submit(drafting, alone, given.gamma)
            verifying(other, given.gamma + 1)
            ahead.result()

        ways: dict[str, Callable[[], None]] = {
            "D": lambda: drafting(usual, given.gamma),
            "V": lambda: verifying(target, given.gamma + 1),
            "in turn": lambda: (drafting(usual, given.gamma), verifying(target, given.gamma + 1))[0],
        }
        for threads, other in targets.items():
            ways[f"at once, target on {threads}"] = lambda other=other: at_once(other)  # type: ignore[misc]
        taken: dict[str, list[float]] = {way: [] for way in ways}
        names, turn, start = list(ways), -1, perf_counter()  # round -1 warms up
        with progress("blocks", int(given.seconds), "s") as bar:
            while turn < 3 or perf_counter() - start < given.seconds:
                for way in shuffled(names, turn):
                    found = seconds(ways[way])
                    if turn >= 0:
                        taken[way].append(found)
                turn += 1
                bar.update(int(min(perf_counter() - start, given.seconds)) - bar.n)
    print(
        f"{sizes_of(pair.shapes)}, {given.engine} {given.precision}, γ = {given.gamma}, {given.threads} threads, {turn} rounds"
    )
    print(f"D {1e3 * median(taken['D']):.2f} ms, V {1e3 * median(taken['V']):.2f} ms\n")
    rows = []
    for way in names[2:]:
        row = [way, f"{1e3 * median(taken[way]):.2f}"]
        rounds = list(zip(taken["in turn"], taken[way], taken["D"], strict=True))
        for rate in (1.0, *RATES) if way != "in turn" else ():
            missed = 1.0 - rate ** (given.gamma + 1)
            ratios = [both / (ahead + missed * again) for both, ahead, again in rounds]
            row.append(interval(*bootstrap(ratios, median)))
        rows.append(tuple(row))
    heads = ("", "ms a block", "faster if no guess failed", *(f"α = {rate:g}" for rate in RATES))
    print(table(heads, [(*row, *[""] * (len(heads) - len(row))) for row in rows]))
    if given.json:
        write_json(given.json, {"pair": given.folder, "gamma": given.gamma, "seconds": taken})
    return 0


if __name__ == "__main__":
    sys.exit(main())
