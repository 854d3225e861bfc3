"""What copies from the text add to a drafter model: acceptance by origin and by kind of question. Counts tokens, times nothing.

    python -m benchmarks.speed.copies PAIR [--questions 21] [--new 128] [--temperature 0] [--engine E] [--precision P]

Every question of the built-in suite is answered twice with drafts of one token: by the model alone, and by the hybrid drafter,
which copies where something can be copied. The table has the share of blocks with each kind of copy, how many of these copies the
target accepts, and the acceptance rate of all drafts without and with copies.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

from edgespec_runtime.bench.suite import read_suite, round_robin
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, MODEL, DecodingOptions
from edgespec_runtime.decoding.schedule import FROM_MODEL, LONG_COPY, SHORT_COPY, Fixed, Outcome
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair

from benchmarks.common import chat_of, command_line
from edgespec.core.metrics import RawCounts
from edgespec.core.progress import progress
from edgespec.core.table import table


class Tally(Fixed):
    """Drafts of one token; counts them, and the accepted ones, by origin."""

    def __init__(self) -> None:
        super().__init__(1)
        self.drafted: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()

    def observe(self, outcome: Outcome) -> None:
        self.drafted[outcome.origin] += outcome.drafted
        self.accepted[outcome.origin] += outcome.accepted

    def add(self, other: Tally) -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted

    def rate(self, *origins: int) -> str:
        drafted = sum(self.drafted[origin] for origin in origins)
        return f"{sum(self.accepted[origin] for origin in origins) / drafted:.2f}" if drafted else "-"

    def share(self, origin: int) -> str:
        return f"{self.drafted[origin] / max(1, self.drafted.total()):.0%}"


def tallied(pair: Pair, prompt: list[int], drafter: str, new: int, temperature: float, seed: int) -> Tally:
    how = DecodingOptions(
        drafter=drafter, draft_length=1, max_new_tokens=new, temperature=temperature, seed=seed
    )
    tally = Tally()
    for _ in decode(pair.target, pair.draft, prompt, how, pair.tokenizer.stop_ids, RawCounts(), tally):
        pass
    return tally


def row(kind: str, alone: Tally, hybrid: Tally) -> tuple[str, ...]:
    copies = [
        cell for origin in (SHORT_COPY, LONG_COPY) for cell in (hybrid.share(origin), hybrid.rate(origin))
    ]
    return (kind, *copies, alone.rate(FROM_MODEL), hybrid.rate(FROM_MODEL, SHORT_COPY, LONG_COPY))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("pair", type=Path, help="a bundle's folder")
    parser.add_argument("--questions", type=int, default=21)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--engine", default="")
    parser.add_argument("--precision", default="")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    pair = open_pair(given.pair, LoadOptions(given.engine, given.precision, threads=given.threads))
    found: dict[str, dict[str, Tally]] = defaultdict(lambda: {MODEL: Tally(), HYBRID: Tally()})
    questions = round_robin(read_suite("built-in"))[: given.questions]
    with progress("copies", len(questions), "question") as bar:
        for number, question in enumerate(questions):
            prompt = pair.tokenizer.encode_chat(chat_of(question))
            for drafter in (MODEL, HYBRID):
                tally = tallied(pair, prompt, drafter, given.new, given.temperature, number)
                found[question.category][drafter].add(tally)
                found["all"][drafter].add(tally)
            bar.update(1)
    pair.close()
    whole = found.pop("all")
    head = ("questions", "short copies", "α", "long copies", "α", "α of the model alone", "α with copies")
    rows = [row(kind, each[MODEL], each[HYBRID]) for kind, each in sorted(found.items())]
    print(
        f"{pair.engine} {pair.precision}, {len(questions)} questions, up to {given.new} tokens, T = {given.temperature:g}\n"
    )
    print(table(head, [*rows, row("all", whole[MODEL], whole[HYBRID])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
