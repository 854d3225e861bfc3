"""What the chosen draft length costs by itself: microseconds of every question to the schedule, between two real passes.

    python benchmarks/schedule_overhead.py BUNDLE [--engine onnxruntime] [--precision fp32] [--temperature 0] [--prompts 32]

A pass of the target takes the processor's caches, so the same few lines of Python take several times as long between two passes
as in a loop of their own. The bundle's prompts are decoded with a chosen draft length, and with fixed ones, which take what
asking itself takes; shares are of the blocks' time. It checks `account.ASKED` and `adaptive.CONSIDERING`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from edgespec_runtime.chooser.adaptive import Adaptive
from edgespec_runtime.chooser.calibrate import QUICK
from edgespec_runtime.chooser.expected_acceptance import expected_rate
from edgespec_runtime.chooser.pair_costs import costs_of
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import LLAMACPP, ONNXRUNTIME, LoadOptions, Pair, open_pair

from edgespec.core.metrics import RawCounts, median
from edgespec.core.progress import progress
from edgespec.core.table import table

NEW_TOKENS = 64


class Counting(Adaptive):
    """Counts how often a length is chosen, and not kept."""

    times = 0

    def _best(self, context: int, room: int, most: int) -> int:
        self.times += 1
        return super()._best(context, room, most)


class Timed:
    """A schedule and how long its answers take. A question and the news of its block count together."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._asked = 0.0
        self._kind = ""

    def begin(self) -> None:
        start = perf_counter()
        self._schedule.begin()
        self.seconds["a reply begun"].append(perf_counter() - start)

    def draft_length(self, context: int, room: int) -> int:
        before = getattr(self._schedule, "times", 0)
        start = perf_counter()
        length = self._schedule.draft_length(context, room)
        self._asked = perf_counter() - start
        considered = getattr(self._schedule, "times", 0) > before
        self._kind = ("a draft" if length else "a plain step") + (", considered" if considered else "")
        return length

    def pass_length(self, count: int, context: int) -> int:
        start = perf_counter()
        size = self._schedule.pass_length(count, context)
        self._asked += perf_counter() - start
        return size

    def observe(self, outcome: Outcome) -> None:
        start = perf_counter()
        self._schedule.observe(outcome)
        self.seconds[self._kind].append(self._asked + perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default=ONNXRUNTIME, choices=(LLAMACPP, ONNXRUNTIME))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--threads", type=int, default=default_threads())
    given = parser.parse_args()
    pair = open_pair(given.bundle, LoadOptions(given.engine, given.precision, threads=given.threads))
    costs, _ = costs_of(pair, QUICK, print)
    guess = expected_rate(pair.manifest.metrics, given.temperature)
    makes: dict[str, Callable[[], Schedule]] = {
        "chosen": lambda: Counting(costs, guess),
        "always none": lambda: Fixed(0),
        "always two": lambda: Fixed(2),
    }
    timed = {name: Timed(make()) for name, make in makes.items()}
    spent: defaultdict[str, float] = defaultdict(float)
    prompts = [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()[: given.prompts]]
    with progress("replies", len(prompts), "prompt") as bar:
        for seed, prompt in enumerate(prompts):
            for name, schedule in timed.items():
                spent[name] += _seconds(pair, prompt, given.temperature, seed, schedule)
            bar.update(1)
    rows = []
    for name, schedule in timed.items():
        for kind, seconds in schedule.seconds.items():
            share = sum(seconds) / spent[name]
            mean = sum(seconds) / len(seconds)
            rows.append(
                (
                    name,
                    kind,
                    str(len(seconds)),
                    f"{1e6 * mean:.1f}",
                    f"{1e6 * median(seconds):.1f}",
                    f"{share:.2%}",
                )
            )
    print(
        f"{pair.manifest.target.name}, {pair.engine} {given.precision}, {given.threads} threads, T = {given.temperature:g}\n"
    )
    print(table(("draft length", "asked for", "times", "mean us", "median us", "share"), rows))
    pair.close()
    return 0


def _seconds(pair: Pair, prompt: list[int], temperature: float, seed: int, schedule: Schedule) -> float:
    """Of the blocks of one reply."""
    for model in (pair.target, pair.draft):
        if model is not None:
            model.rewind(0)
    counts = RawCounts()
    how = DecodingOptions(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=seed, rule="lossless")
    for _ in decode(pair.target, pair.draft, prompt, how, pair.tokenizer.stop_ids, counts, schedule):
        pass
    return counts.total_seconds


if __name__ == "__main__":
    sys.exit(main())
