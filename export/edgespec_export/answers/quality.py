"""How alike two models answer, from their logits on the same replies. Arrays only: no engine, no file.

top1            share of positions whose most likely token is the model's
kl              KL(p ‖ p') in nats, mean over positions; p is the model's distribution at temperature 1
tv              total variation ½ Σ |p − p'|, mean over positions
perplexity      exp of the mean −log p' of the reply's own tokens
gap_error       root mean square error of the gap between the model's two best logits
near_ties       share of positions where that gap is smaller than `gap_error`: the file may say another token there

Intervals are of 95 %. Positions of one reply depend on each other, so the bootstrap draws whole replies. Where all replies
agree it has no width; so the share has at least Wilson's interval for that many independent positions (Wilson 1927).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from edgespec.core.metrics import bootstrap, ratio_of_sums
from edgespec_export.answers.verdict import verdict_of

Array = np.ndarray[Any, Any]
Interval = tuple[float, float, float]  # value, low, high
NORMAL = 1.959964  # standard deviations to either side that hold 95 %


class Counts(NamedTuple):
    """Sums over the positions of one reply; the measures are at the head of this module."""

    positions: int
    same: int
    kl: float
    tv: float
    loss: float
    reference_loss: float


@dataclass(frozen=True)
class Sample:
    """One greedy reply of the model and of the file. `at`: number of the first token that differs; None where none does.

    `common` is the text before it; `reference` and `file` are (that token, what follows).
    """

    question: str
    common: str
    reference: tuple[str, str]
    file: tuple[str, str]
    at: int | None


@dataclass
class Answers:
    """What was measured of one file in one mode, on replies of the target."""

    verdict: str
    top1: Interval
    kl: Interval
    tv: Interval
    perplexity: Interval
    reference_perplexity: float
    gap_error: float
    near_ties: float
    replies: int
    positions: int
    counts: list[Counts]
    samples: list[Sample] = field(default_factory=list)


def gaps_of(seen: Array, wanted: Array) -> Array:
    """[2, n] of logits [n, V], V ≥ 2: the model's gap between its two best logits, and the file's error of it."""
    rows = np.arange(len(wanted))
    two = np.argpartition(wanted, -2, axis=1)[:, -2:]  # the second best, the best
    gap, own = (values[rows, two[:, 1]] - values[rows, two[:, 0]] for values in (wanted, seen))
    return np.stack([gap, own.astype(np.float64) - gap])


def near_ties(gaps: Sequence[Array]) -> tuple[float, float]:
    """(gap_error, near_ties) from the gaps of every reply."""
    gap, errors = np.concatenate(gaps, axis=1)
    error = float(np.sqrt(np.square(errors).mean()))
    return error, float((gap < error).mean())


def count(seen: Array, wanted: Array, tokens: Sequence[int]) -> Counts:
    """One reply. `seen`, `wanted` [n, V]: logits of the file and of the model before each of its at most n `tokens`."""
    ours, theirs = log_softmax(seen), log_softmax(wanted)
    p, places = np.exp(theirs), (np.arange(len(tokens)), np.asarray(tokens, dtype=np.int64))
    return Counts(
        positions=len(wanted),
        same=int((seen.argmax(1) == wanted.argmax(1)).sum()),
        kl=float((p * (theirs - ours)).sum()),
        tv=float(0.5 * np.abs(p - np.exp(ours)).sum()),
        loss=float(-ours[places].sum()),
        reference_loss=float(-theirs[places].sum()),
    )


def answers_of(counts: Sequence[Counts], gaps: Sequence[Array]) -> Answers:
    """The measures with their intervals, from the counts and the gaps of at least one reply."""
    positions = sum(one.positions for one in counts)
    top1, loss = share(counts), _mean(counts, "loss")
    reference = sum(one.reference_loss for one in counts) / positions
    error, near = near_ties(gaps)
    return Answers(
        verdict=verdict_of(top1[0]),
        top1=top1,
        kl=_mean(counts, "kl"),
        tv=_mean(counts, "tv"),
        perplexity=(_exp(loss[0]), _exp(loss[1]), _exp(loss[2])),
        reference_perplexity=_exp(reference),
        gap_error=error,
        near_ties=near,
        replies=len(counts),
        positions=positions,
        counts=list(counts),
    )


def share(counts: Sequence[Counts]) -> Interval:
    """The share of kept argmaxes."""
    value, low, high = _mean(counts, "same")
    least, most = wilson(sum(one.same for one in counts), sum(one.positions for one in counts))
    return value, min(low, least), max(high, most)


def _mean(counts: Sequence[Counts], name: str) -> Interval:
    """A sum over positions / positions."""
    return bootstrap(counts, ratio_of_sums(attrgetter(name), attrgetter("positions")))


def wilson(same: int, positions: int) -> tuple[float, float]:
    """95 % interval of a share, for independent positions."""
    share, square = same / positions, NORMAL**2
    centre = (share + square / (2 * positions)) / (1 + square / positions)
    half = NORMAL * sqrt(share * (1 - share) / positions + square / (4 * positions**2))
    half /= 1 + square / positions
    return max(0.0, centre - half), min(1.0, centre + half)


def _exp(loss: float) -> float:
    """A perplexity; beyond e^700 a float has no room, and a damaged file can be there."""
    return exp(min(loss, 700.0))


def log_softmax(logits: Array) -> Array:
    """float64 [n, V]"""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide
