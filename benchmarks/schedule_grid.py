"""Chosen draft lengths on simulated machines: how far behind the best fixed length, and how far behind nobody could stay less.

    python benchmarks/schedule_grid.py [--tokens 64,128] [--worst 12]

Twelve shapes of what passes and drafts cost, measured ones and made-up ones, with four acceptance rates; replies of one length,
all of one rate ("spread 0") or of rates that differ from reply to reply by a standard deviation of 0.1. Seconds are simulated, so
the same numbers come out on every machine. "Possible": the best of a schedule that knows the reply's length, all costs and each
reply's rate, and keeps the 2 % in every reply (schedule_floor.py). "Its end unknown": of one that keeps them wherever a reply
ends after 60 tokens. The schedule itself is told how many may follow, and borrows from them where drafts surely pay. Where rates
differ, knowing each is knowing much: what can be reached there is less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from edgespec_runtime.chooser.adaptive import Adaptive
from edgespec_runtime.decoding.schedule import Fixed, Schedule
from schedule_floor import least_seconds

from edgespec.core.progress import progress
from edgespec.core.table import table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from simulated_machine import DEAR, FLAT, MEASURED, SAW, TINY, Machine, Padded, blocks_of, costs_of

MOST, SHARE = 8, 0.02  # longest draft; what a reply may lose
SURE = 60  # tokens that a reply has where its end is unknown
NEAR = 0.95  # of the best fixed length
TOKENS = 6000  # of a cell's replies together
KNOTS = 17  # rates at which what is possible is computed, where they differ from reply to reply
# llama.cpp with Q4_0: passes of 2, 4 and 8 as bench --synthetic measured them on a Zen 4, the others between and beyond; and with
# kernels that work on rows of four.
LLAMACPP_7B = [1, 1.88, 2.3, 2.67, 3.4, 4.0, 4.6, 5.12, *(5.5 + 0.3 * n for n in range(8))]
LLAMACPP_1B = [1, 1.8, 2.4, 2.79, *LLAMACPP_7B[4:7], 5.14, *LLAMACPP_7B[8:]]
FOURS_7B = [1, 1.51, 2.12, 1.4, 2.12, 2.7, 2.6, 2.58, *(3 + 0.1 * n for n in range(8))]
CHEAP = [1, 1.1, 1.2, 1.3, 1.45, 1.55, 1.7, 1.8, *(2 + 0.1 * n for n in range(8))]
SHAPES = {
    "7B, Q4_0": (LLAMACPP_7B, 0.018),
    "1.1B, Q4_0": (LLAMACPP_1B, 0.023),
    "7B, rows of four": (FOURS_7B, 0.018),
    "14M": (MEASURED, 0.04),
    "14M, slow drafter": (MEASURED, 0.15),
    "14M, no AVX-512": (DEAR, 0.13),
    "14M, no AVX-512, fast drafter": (DEAR, 0.04),
    "3M": (TINY, 0.25),
    "memory-bound": (FLAT, 0.1),
    "memory-bound, slow drafter": (FLAT, 0.4),
    "cheap passes": (CHEAP, 0.02),
    "saw-tooth": (SAW, 0.1),
}
RATES, SPREADS = (0.45, 0.6, 0.75, 0.9), (0.0, 0.1)


@dataclass(frozen=True)
class Cell:
    """`rates`: of the replies; `blocks`: plain steps by draft length; `best` and `chosen` in times plain decoding; `slowest`: of
    a reply, against plain decoding."""

    name: str
    tokens: int
    rates: np.ndarray
    blocks: Sequence[float]
    best: float
    length: int
    chosen: float
    slowest: float

    @property
    def kept(self) -> float:
        return self.chosen / self.best

    def possible(self, sure: int) -> float:
        """Of the best fixed length, at most, for replies that are known to have `sure` tokens; of both what is expected."""
        # Each takes a moment, so rates between are interpolated.
        rates = np.unique(np.linspace(self.rates.min(), self.rates.max(), KNOTS))
        found = [least_seconds([rate] * MOST, self.blocks, self.tokens, SHARE, sure) for rate in rates]
        steps = np.array([[*fixed, least] for fixed, least in found])  # (rates, lengths and the least)
        *fixed, least = (np.interp(self.rates, rates, one).mean() for one in steps.T)
        return float(min(fixed) / least)


def measure(name: str, rate: float, spread: float, tokens: int) -> Cell:
    """Plain, fixed and chosen lengths on the same replies; the schedule is told the costs and the mean rate."""
    shape, draft = SHAPES[name]
    costs = costs_of(shape, draft)
    count = TOKENS // tokens
    rates = np.clip(rate + spread * np.random.default_rng(1).standard_normal(count), 0.02, 0.98)

    def seconds(schedule: Schedule) -> np.ndarray:
        taken = []
        for seed, alpha in enumerate(rates):
            schedule.begin()
            taken.append(Machine(costs, lambda _, alpha=alpha: alpha).reply(schedule, tokens, seed))
        return np.array(taken)

    plain = seconds(Fixed(0))
    fixed = [plain.sum(), *(seconds(Padded(length, costs)).sum() for length in range(1, MOST + 1))]
    chosen = seconds(Adaptive(costs, rate, MOST))
    length = int(np.argmin(fixed))
    return Cell(
        f"{name}, α = {rate:g}, spread {spread:g}",
        tokens,
        rates,
        blocks_of(costs, draft),
        plain.sum() / fixed[length],
        length,
        plain.sum() / chosen.sum(),
        float((chosen / plain).max()) - 1.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", default="64,128", help="of a reply")
    parser.add_argument("--worst", type=int, default=12, help="cells to list, of each length")
    given = parser.parse_args()
    lengths = [int(value) for value in given.tokens.split(",")]
    wanted = list(product(SHAPES, RATES, SPREADS))
    cells: dict[int, list[Cell]] = {tokens: [] for tokens in lengths}
    with progress("cells", len(lengths) * len(wanted), "cell") as bar:
        for tokens, (name, rate, spread) in product(lengths, wanted):
            cells[tokens].append(measure(name, rate, spread, tokens))
            bar.update(1)
    for tokens, found in cells.items():
        kept = np.array([cell.kept for cell in found])
        slow = sum(cell.slowest > SHARE for cell in found)
        behind = [cell for cell in found if cell.kept < NEAR]
        out_of_reach = sum(cell.possible(SURE) < NEAR for cell in behind)
        print(
            f"\n{tokens} tokens, {len(found)} cells: chosen is {kept.mean():.3f} of the best fixed length in the mean, "
            f"{kept.min():.3f} at worst; in {slow} a reply is more than {SHARE:.0%} slower than plain\n"
            f"below {NEAR} in {len(behind)}; in {out_of_reach} of them nobody reaches it who does not know a reply's end"
        )
        rows = [
            (
                cell.name,
                f"{cell.best:.2f}x (γ = {cell.length})",
                f"{cell.chosen:.2f}x",
                f"{cell.kept:.3f}",
                *(f"{cell.possible(sure):.3f}" for sure in (tokens, SURE)),
                f"{cell.slowest:+.1%}",
            )
            for cell in sorted(found, key=lambda cell: cell.kept)[: given.worst]
        ]
        print(
            table(
                (
                    "cell",
                    "best fixed",
                    "chosen",
                    "of the best",
                    "possible",
                    "its end unknown",
                    "slowest reply",
                ),
                rows,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
