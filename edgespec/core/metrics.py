"""Metrics of speculative decoding from raw counts and from distributions. A metric is derived, never stored alone. No engines.

Notation: p = target, q = draft, γ = draft length, c = cost of a draft step / cost of a target step.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class RawCounts:
    """What one decoding run counted. Seconds are wall clock.

    `tested[i]` and `accepted[i]` count draft tokens at position i of a block that were tested and that passed; tokens after
    the first rejection are neither (AdaSPEC Eq. 3).
    """

    blocks: int = 0  # target passes that emitted tokens
    drafted: int = 0
    copied: int = 0  # of the drafted ones, those that no drafter model computed: prompt lookup's
    emitted: int = 0
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0  # decoding without prefill; the rest of it is sampling and the loop
    behind: int = 0  # drafter steps behind drafts: the rule asks for q there, and no token follows

    def add_block(self, drafted: int, accepted: int, emitted: int, copied: int = 0, behind: int = 0) -> None:
        """Count one verified block: `accepted` of `drafted` draft tokens passed, `emitted` tokens left the loop.

        `emitted` is accepted + 1, or less where an end-of-turn among the accepted tokens cut the block short.
        """
        self.blocks += 1
        self.drafted += drafted
        self.copied += copied
        self.behind += behind
        self.emitted += emitted
        while len(self.tested) < drafted:
            self.tested.append(0)
            self.accepted.append(0)
        for position in range(min(emitted, drafted)):
            self.tested[position] += 1
            self.accepted[position] += position < accepted

    def add(self, other: RawCounts) -> None:
        """Sum another run into this one."""
        lists = ("tested", "accepted")
        for name in (one.name for one in fields(self) if one.name not in lists):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in lists:
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [mine + theirs for mine, theirs in pairs])

    @property
    def block_efficiency(self) -> float:
        """τ = emitted tokens / target passes, between 1 and γ + 1."""
        return self.emitted / self.blocks if self.blocks else float("nan")

    @property
    def mean_draft_length(self) -> float:
        """Draft tokens per block: γ, or its mean where it was chosen block by block."""
        return self.drafted / self.blocks if self.blocks else float("nan")

    def computed(self, draft_length: float) -> float:
        """Drafter steps a block of that draft length takes, for MBSU: without the share that was copied, which costs nothing,
        and with those behind a draft."""
        copied = self.copied / self.drafted if self.drafted else 0.0
        behind = self.behind / self.blocks if self.blocks else 0.0
        return draft_length * (1.0 - copied) + behind

    @property
    def acceptance_rate(self) -> float:
        """Empirical α = accepted / (accepted + rejected)."""
        tested = sum(self.tested)
        return sum(self.accepted) / tested if tested else float("nan")

    @property
    def token_rate(self) -> float:
        """Emitted tokens per second of decoding (prefill apart)."""
        return self.emitted / self.total_seconds if self.total_seconds else float("nan")

    @property
    def loop_seconds(self) -> float:
        """Decoding time spent outside both models' forward passes."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds


def summed(counts: Iterable[RawCounts]) -> RawCounts:
    """The counts of several runs as of one."""
    total = RawCounts()
    for one in counts:
        total.add(one)
    return total


def expected_acceptance(p: Any, q: Any) -> Any:
    """α = Σ_v min(p_v, q_v) = 1 − TVD, the chance that a draft token is accepted (Leviathan et al. 2023, Corollary 3.6).

    p and q [.., V] are probabilities, two numpy arrays or two torch tensors; the result [..] is float64 and at most 1.
    """
    # numpy or torch: the functions have the same names
    library = sys.modules[type(p).__module__.partition(".")[0]]
    return library.minimum(p, q).sum(-1, dtype=library.float64).clip(max=1.0)


def mbsu(block_efficiency: float, draft_length: float, cost_ratio: float) -> float:
    """Memory-bound speed-up τ / (cγ + 1) (direct alignment section 3; the printed numerator cτ is a misprint).

    `draft_length`: γ, as the drafter steps that it takes (`RawCounts.computed`).
    """
    return block_efficiency / (cost_ratio * draft_length + 1.0)


def predicted_block_efficiency(acceptance_rate: float, draft_length: float) -> float:
    """τ = (1 − α^(γ+1)) / (1 − α) for independent acceptances (Leviathan et al. 2023, Eq. 1)."""
    if acceptance_rate == 1.0:
        return draft_length + 1.0
    return (1.0 - math.pow(acceptance_rate, draft_length + 1)) / (1.0 - acceptance_rate)


def acceptance_rate_of(block_efficiency: float, draft_length: int) -> float | None:
    """The α at which drafts of γ ≥ 1 give this τ: the inverse of `predicted_block_efficiency`, by bisection.

    0 for a τ of at most 1; None for one that no α below 1 gives.
    """
    if block_efficiency >= draft_length + 1.0:
        return None
    low, high = 0.0, 1.0
    while block_efficiency > 1.0 and high - low > 1e-6:
        middle = (low + high) / 2
        less = predicted_block_efficiency(middle, draft_length) < block_efficiency
        low, high = (middle, high) if less else (low, middle)
    return high if block_efficiency > 1.0 else 0.0


def predicted_speedup(
    block_efficiency: float, draft_length: float, draft_cost: float, verify_cost: float
) -> float:
    """τ / (γ·c_t + v(γ+1)) with costs in units of one plain target step."""
    return block_efficiency / (draft_length * draft_cost + verify_cost)


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear-interpolation quantile of values in ascending order."""
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return quantile(sorted(values), 0.5)


def bootstrap(
    items: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high): 95 % percentile bootstrap interval of `statistic`, resampling whole items (prompts).

    Resamples in which it is NaN (a ratio over nothing) are left out.
    """
    generator = random.Random(seed)
    size = len(items)
    draws = (statistic([items[generator.randrange(size)] for _ in range(size)]) for _ in range(resamples))
    known = sorted(draw for draw in draws if not math.isnan(draw)) or [math.nan]
    return statistic(items), quantile(known, 0.025), quantile(known, 0.975)


def ratio_of_sums(
    numerator: Callable[[Any], float], denominator: Callable[[Any], float]
) -> Callable[[Sequence[Any]], float]:
    """A statistic for `bootstrap`: Σ numerator / Σ denominator over the items."""

    def statistic(items: Sequence[Any]) -> float:
        below = sum(denominator(item) for item in items)
        return sum(numerator(item) for item in items) / below if below else float("nan")

    return statistic
