"""What the three lossless rules keep of a draft, and what they cost: lossless, block and reproducible on one bundle.

    python -m benchmarks.speed.acceptance_rules BUNDLE [--prompts 32] [--new 64] [--temperature 1] [--draft-lengths 1,3,5,7]

Every prompt is answered by every rule at every draft length, in an order that changes from prompt to prompt. For each draft
length the table has τ, the acceptance rate, the time of a block beside drafting and the target's pass, and τ and token rate
against `lossless`, with 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from edgespec_runtime.bench.bench import measure
from edgespec_runtime.bench.report import Place
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.rules.table import BLOCK, LOSSLESS, REPRODUCIBLE

from benchmarks.common import command_line, whole_numbers
from edgespec.core.metrics import RawCounts, bootstrap, summed
from edgespec.core.progress import progress
from edgespec.core.table import interval, table

RULES = (LOSSLESS, BLOCK, REPRODUCIBLE)


Pair = tuple[RawCounts, RawCounts]  # of one prompt: by a rule, and by `lossless`


def ratio(found: list[Pair], of: str) -> str:
    """Of a property of the summed counts, rule / lossless, with its interval."""

    def statistic(sample: Sequence[Pair]) -> float:
        rule, lossless = (getattr(summed([one[side] for one in sample]), of) for side in (0, 1))
        return float(rule / lossless)

    return interval(*bootstrap(found, statistic, resamples=300), digits=3)


def row(length: int, rule: str, counts: list[RawCounts], usual: list[RawCounts]) -> tuple[str, ...]:
    total = summed(counts)
    beside = total.total_seconds - total.draft_seconds - total.verify_seconds
    found = list(zip(counts, usual, strict=True))
    against = ("", "") if rule == LOSSLESS else (ratio(found, "block_efficiency"), ratio(found, "token_rate"))
    efficiency, rate = f"{total.block_efficiency:.2f}", f"{total.acceptance_rate:.3f}"
    return (str(length), rule, efficiency, rate, f"{1e6 * beside / total.blocks:.0f}", *against)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-lengths", type=whole_numbers, default="1,3,5,7")
    parser.add_argument("--engine", default="")
    parser.add_argument("--precision", default="")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    pair = open_pair(given.bundle, LoadOptions(given.engine, given.precision, threads=given.threads))
    prompts = [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()[: given.prompts]]
    ways = [(length, rule) for length in given.draft_lengths for rule in RULES]

    def measured(index: int, length: int, rule: str) -> RawCounts:
        how = DecodingOptions(
            temperature=given.temperature,
            seed=index,
            rule=rule,
            drafter=MODEL,
            draft_length=length,
            max_new_tokens=given.new,
        )
        return measure(pair, prompts[index], how, length, Place(index, 0)).counts

    for length, rule in ways:
        measured(0, length, rule)  # first calls allocate, and are not counted
    counts: dict[tuple[int, str], list[RawCounts]] = defaultdict(list)
    with progress("rules", len(prompts), "prompt") as bar:
        for index in range(len(prompts)):
            for length, rule in shuffled(ways, index):
                counts[length, rule].append(measured(index, length, rule))
            bar.update(1)
    print(
        f"{pair.manifest.target.name} with {pair.manifest.drafter.name}, {pair.engine} {pair.precision}, vocabulary "
        f"{pair.target.engine.vocab_size:,}; {len(prompts)} prompts, up to {given.new} tokens, T = {given.temperature:g}\n"
    )
    rows = [row(length, rule, counts[length, rule], counts[length, LOSSLESS]) for length, rule in ways]
    head = ("γ", "rule", "τ", "α", "µs to decide", "τ / lossless", "tok/s / lossless")
    print(table(head, rows, left=2))
    pair.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
