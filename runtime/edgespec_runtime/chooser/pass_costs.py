"""Looks up what a pass of each size costs on one device, and computes speed-up, break-even α and best γ from it.

Knows seconds and token counts; no engines and no files (calibrate.py measures, kept_costs.py keeps). One notation: α acceptance
rate, γ draft length, τ tokens per block, v(n) = a target pass of n tokens and c_t = a drafter step, both in plain steps (a target
pass of one token).

    speed-up(α, γ) = τ(α, γ) / (γ · c_t + v(m)),   τ = (1 − α^(γ+1)) / (1 − α),   m: the cheapest pass of γ + 1 tokens or more

(Leviathan et al. 2023, Theorem 3.8, with measured costs in the place of its single ratio c.)
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from edgespec.core.errors import InputError
from edgespec.core.metrics import acceptance_rate_of, predicted_block_efficiency

LONGEST_PASS = 16  # tokens: at an acceptance rate of 0.8, a 16th draft token would stay in 3 % of the blocks
PADDING_GAIN = 0.05  # share that a longer pass must save, or it is not made: less is noise of the measurement


@dataclass(frozen=True)
class Costs:
    """Measured seconds at several context lengths (tokens already in the cache).

    Attributes:
        contexts: ascending.
        verify_seconds: [context][n − 1], a target pass of n tokens; as many n for every context.
        draft_seconds: [context], one drafter step; 0 where nothing but the prompt is looked up.

    Raises InputError where the table has holes, or seconds that cannot be.
    """

    contexts: tuple[int, ...]
    verify_seconds: tuple[tuple[float, ...], ...]
    draft_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        count, lengths = len(self.contexts), {len(row) for row in self.verify_seconds}
        passes = [seconds for row in self.verify_seconds for seconds in row]
        most = sys.float_info.max  # a whole number of JSON may be larger
        if not (
            all(low < high for low, high in pairwise((0, *self.contexts)))
            and 0 < count == len(self.verify_seconds) == len(self.draft_seconds)
            and len(lengths) == 1
            and passes
            and all(0 < seconds <= most for seconds in passes)
            and all(0 <= seconds <= most for seconds in self.draft_seconds)
        ):
            raise InputError(
                f"a table of costs has the contexts {self.contexts}, passes of up to {sorted(lengths)} tokens in "
                f"{len(self.verify_seconds)} rows and {len(self.draft_seconds)} drafter steps; it needs ascending contexts, the "
                "same passes at each, and seconds above 0: measure again"
            )

    @property
    def longest(self) -> int:
        """Most tokens of a pass that was measured."""
        return len(self.verify_seconds[0])

    def at(self, context: int, most: int | None = None) -> CostsAt:
        """All costs at one context: linear between two measured ones, constant outside them.

        Made while a reply is decoded, so it takes microseconds. `most`: None for the longest draft that a pass can verify.
        """
        above = bisect(self.contexts, context)
        below = max(0, above - 1)
        above = min(above, len(self.contexts) - 1)
        low, high = self.contexts[below], self.contexts[above]
        share = (context - low) / (high - low) if low < high else 0.0

        def between(one: float, other: float) -> float:
            return one + share * (other - one)

        seconds = [0.0, *map(between, self.verify_seconds[below], self.verify_seconds[above])]
        size, cheapest = [], self.longest
        for n in range(self.longest, 0, -1):  # of equals the shortest
            cheapest = n if seconds[n] <= seconds[cheapest] else cheapest
            # a plain step stays one: with it all gains are compared
            size.append(cheapest if n > 1 and seconds[cheapest] < (1 - PADDING_GAIN) * seconds[n] else n)
        draft = between(self.draft_seconds[below], self.draft_seconds[above])
        return CostsAt(context, self.longest - 1 if most is None else most, draft, seconds, size[::-1])

    def nearest(self, context: int) -> CostsAt:
        """The same at the measured context nearest to this one."""
        return self.at(min(self.contexts, key=lambda measured: abs(measured - context)))


class CostsAt(NamedTuple):
    """Costs at one context, and what follows from them.

    Attributes:
        most: the longest draft that comes into question.
        draft: seconds of a drafter step.
        passes: [n], seconds of a target pass of n tokens; size: [γ], tokens of the pass to make for a draft of γ.
    """

    context: int
    most: int
    draft: float
    passes: list[float]
    size: list[int]

    def verify(self, n: int) -> float:
        """Seconds of a target pass of n ≥ 1 tokens; past the longest every token costs what it did on average below."""
        size = min(n, len(self.size))
        seconds = self.passes[size]
        return seconds + (n - size) * max(0.0, seconds - self.passes[1]) / max(1, size - 1)

    def pass_length(self, n: int) -> int:
        """Length of the pass to make for n tokens: n, or the cheapest longer one where padding saves time."""
        return self.size[n - 1] if n <= len(self.size) else n

    @property
    def plain_rate(self) -> float:
        """Tokens a second of plain decoding."""
        return 1.0 / self.passes[1]

    @property
    def c_t(self) -> float:
        """A drafter step in plain steps."""
        return self.draft / self.passes[1]

    def v(self, n: int) -> float:
        """A pass of n tokens in plain steps."""
        return self.verify(n) / self.passes[1]

    def block(self, length: int) -> float:
        """Plain steps that a draft of γ tokens and the cheapest pass that verifies it take."""
        return length * self.c_t + self.v(self.pass_length(length + 1))

    def speedup(self, rate: float, length: int) -> float:
        """Predicted token rate over that of plain decoding at α and γ; 1 at γ = 0."""
        return predicted_block_efficiency(rate, length) / self.block(length) if length else 1.0

    def best(self, rate: float) -> tuple[int, float]:
        """(γ, its predicted speed-up) at α; (0, 1.0) where no draft pays."""
        lengths = range(self.most + 1)  # γ = 0 first: it wins a tie
        length = max(lengths, key=lambda length: self.speedup(rate, length))
        return length, self.speedup(rate, length)

    def token_rate(self, rate: float) -> float:
        """Predicted tokens a second at the best γ."""
        return self.best(rate)[1] * self.plain_rate

    def break_even(self, length: int) -> float | None:
        """The α at which drafts of γ ≥ 1 neither gain nor lose; None where no α below 1 reaches that."""
        return acceptance_rate_of(self.block(length), length)

    def least(self, lengths: Iterable[int]) -> tuple[float, int] | None:
        """(the lowest α that pays at one of these γ, that γ); None where no α below 1 does."""
        found = ((self.break_even(length), length) for length in lengths if length <= self.most)
        return min(((alpha, length) for alpha, length in found if alpha is not None), default=None)
