"""From logits to the distribution a token is drawn from: temperature, top-k, top-p, min-p. One row at a time, numpy only.

Temperature 0 is the distribution with one token in it, so greedy decoding needs no softmax and no code of its own downstream.
Top-k, top-p and min-p give short lists of token ids; nothing sorts the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.options import knob


@dataclass(frozen=True)
class Warp:
    """How logits become probabilities, applied in this order, which is that of transformers: temperature, top-k, top-p, min-p."""

    temperature: float = knob(0.0, "sampling temperature; 0 is greedy", at_least=0.0, at_most=100.0)
    top_k: int = knob(0, "keep the k most probable tokens; 0 keeps all", at_least=0)
    top_p: float = knob(
        1.0, "keep the smallest set of most probable tokens with this mass", at_least=1e-6, at_most=1.0
    )
    min_p: float = knob(
        0.0,
        "keep the tokens with at least this share of the most probable token's probability; 0 keeps all",
        at_least=0.0,
        at_most=1.0,
    )

    @staticmethod
    def of(options: Warp) -> Warp:
        """The warp of options that say more than how to warp."""
        return Warp(**{field.name: getattr(options, field.name) for field in fields(Warp)})

    def words(self) -> str:
        """The settings for a report."""
        if self.temperature == 0.0:
            return "greedy"
        return f"temperature {self.temperature:g}, top-k {self.top_k}, top-p {self.top_p:g}, min-p {self.min_p:g}"


class RandomSource(Protocol):
    """numpy's Generator is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""


class TokenSource(RandomSource, Protocol):
    """What every random choice of a reply comes from."""

    def sample(self, distribution: Categorical, position: int) -> int:
        """A token drawn from `distribution` for this position of the text (the number of tokens before it)."""

    def shift(self, tokens: int) -> None:
        """The text lost so many of its tokens: what follows them has new positions."""


_DRAWN_AHEAD = 64


class Uniforms:
    """The numbers of `np.random.default_rng(seed).random()`, many at a time: between the passes of a model a single call comes
    cold, and takes longer than summing the vocabulary."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)
        self._ready: list[float] = []

    def random(self) -> float:
        if not self._ready:
            self._ready = self._generator.random(_DRAWN_AHEAD).tolist()[::-1]
        return self._ready.pop()

    def sample(self, distribution: Categorical, position: int) -> int:
        """A token of `distribution`; the position plays no part."""
        return distribution.sample(self)

    def shift(self, tokens: int) -> None:
        pass


class Categorical:
    """A distribution over tokens: weights, which are summed and divided only where a rule asks for it. Drawing does not.

    Args:
        ids: int64 [n] ascending token ids, or None where all V tokens are listed in order.
        weights: float32 [n] or [V], at least 0; `probs` writes over them, unless `total` is 1.
        total: what makes probabilities of them, which sum to 1 within rounding; None: their sum.
    """

    __slots__ = ("_only", "_total", "ids", "weights")

    def __init__(
        self, ids: NDArray[np.int64] | None, weights: NDArray[Any], total: float | None = 1.0
    ) -> None:
        self.ids = ids
        self.weights, self._total = weights, total
        self._only = int(ids[0]) if ids is not None and len(ids) == 1 else None

    def _sum(self) -> float:
        if self._total is None:
            self._total = float(np.add.reduce(self.weights))
        return self._total

    @property
    def probs(self) -> NDArray[Any]:
        """float32 [n] or [V]"""
        if self._total != 1.0:
            self.weights /= self._sum()
            self._total = 1.0
        return self.weights

    @property
    def certain(self) -> bool:
        """Whether there is one token only."""
        return self._only is not None

    def prob(self, token: int) -> float:
        """Probability of one token; 0 outside the list."""
        if self._only is not None:
            return float(token == self._only)
        if self.ids is None:
            return float(self.weights[token]) / self._sum()
        place = int(self.ids.searchsorted(token))
        if place == len(self.ids) or self.ids[place] != token:
            return 0.0
        return float(self.weights[place]) / self._sum()

    def at(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Probabilities of many tokens, [len(ids)]."""
        if self.ids is None:
            return self.probs[ids]
        places = np.minimum(self.ids.searchsorted(ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probs[places], np.float32(0))

    def on(self, other: Categorical) -> NDArray[Any]:
        """Probabilities of the tokens that `other` lists, [len(other.probs)]."""
        return self.at(other.ids) if other.ids is not None else self.dense(len(other.probs))

    def excess(self, other: Categorical) -> Categorical:
        """norm(max(0, self − other)); self where nothing is left of it (they are equal up to rounding, or it is one token)."""
        if self._only is not None:
            return self
        scale = self._sum()
        if self.ids is None and other.ids is None:
            rest = other.weights * (-scale / other._sum())
            rest += self.weights
        else:
            q_on_p = other.dense(len(self.weights)) if self.ids is None else other.at(self.ids)
            rest = self.weights - q_on_p * scale
        np.maximum(rest, 0, out=rest)
        return Categorical(self.ids, rest, None) if rest.item(rest.argmax()) > 0 else self

    def sample(self, generator: RandomSource) -> int:
        """Draw one token by inversion; one uniform number per draw, none where there is one token."""
        if self._only is not None:
            return self._only
        place, total = _invert(self.weights, generator.random())
        if self._total is None:
            self._total = total
        return place if self.ids is None else int(self.ids[place])

    def dense(self, vocab_size: int) -> NDArray[Any]:
        """The full vector [V]."""
        if self.ids is None:
            return self.probs
        full = np.zeros(vocab_size, dtype=self.probs.dtype)
        full[self.ids] = self.probs
        return full


_COARSE, _FINE = 256, 16
_ONES, _FEW_ONES = np.ones(_COARSE, dtype=np.float32), np.ones(_FINE, dtype=np.float32)
CERTAIN = np.ones(1, dtype=np.float32)
CERTAIN.setflags(write=False)  # every greedy distribution shares it
_COLDEST = 1e-6  # a colder quotient overflows float32, and nothing but the largest logits is left at this one


def _invert(weights: NDArray[Any], uniform: float) -> tuple[int, float]:
    """(index at which the cumulative sum of weights passes `uniform` times their total, that total).

    Sums of 256, of 16 inside one of these, then one by one. Few numpy calls, on few numbers: after a pass of a model each of them
    is cold, and costs more than what it adds.
    """
    size, place = len(weights), 0
    if size < 2 * _COARSE:
        amounts = weights.tolist()
        total = sum(amounts)
        goal = uniform * total
    else:
        whole = size - size % _COARSE
        sums = (weights[:whole].reshape(-1, _COARSE) @ _ONES).tolist()
        if whole < size:
            sums.append(float(np.add.reduce(weights[whole:])))
        total = sum(sums)
        goal = uniform * total
        for amount in sums:
            if goal < amount:
                break
            goal -= amount
            place += _COARSE
        if place < whole:
            for amount in (weights[place : place + _COARSE].reshape(-1, _FINE) @ _FEW_ONES).tolist():
                if goal < amount:
                    break
                goal -= amount
                place += _FINE
        amounts = weights[place : place + (_FINE if place < whole else _COARSE)].tolist()
    for amount in amounts:
        if goal < amount:
            break
        goal -= amount
        place += 1
    if place >= size or weights.item(place) == 0:  # rounding: the next token with any mass, or the last one
        places = np.flatnonzero(weights)
        place = int(places[min(int(places.searchsorted(place)), len(places) - 1)])
    return place, total


def warp(logits: NDArray[np.float32], how: Warp) -> Categorical:
    """The distribution of one row of logits [V].

    Top-k keeps exactly k tokens; top-p is the smallest set of most probable tokens whose mass reaches `top_p` (the lower id
    wins a tie), as in the nucleus sampling of Holtzman et al. 2020. Min-p keeps the tokens whose probability is at least `min_p`
    times the highest one (Nguyen et al. 2024, "Turning Up the Heat", section 3). The kept tokens are renormalised.

    A row of which the largest entry is infinite or NaN is read as at temperature 0: whatever a drafter says, q is a distribution.
    """
    best = logits.argmax()
    top = logits[best]  # max() takes three times as long
    if how.temperature == 0.0 or not math.isfinite(top):
        return Categorical(np.array([best], dtype=np.int64), CERTAIN)
    ids: NDArray[np.int64] | None = None
    if 0 < how.top_k < len(logits):
        ids = _largest(logits, how.top_k)
        logits = logits[ids]
    weights = _weights(logits, top, how.temperature)
    if how.top_p < 1.0:
        kept = _nucleus(weights / weights.sum(), how.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if how.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(how.min_p))  # the highest weight is 1
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return Categorical(ids, weights, None)


def draw(logits: NDArray[np.float32], how: Warp, source: TokenSource, position: int) -> int:
    """One token of `warp(logits, how)` for this position of the text."""
    return int(logits.argmax()) if how.temperature == 0.0 else source.sample(warp(logits, how), position)


def _weights(logits: NDArray[np.float32], top: np.float32, temperature: float) -> NDArray[np.float32]:
    """Proportional to the probabilities, the largest 1; `top`: the largest logit."""
    weights: NDArray[np.float32] = logits - top
    if temperature != 1.0:
        weights /= np.float32(max(temperature, _COLDEST))
    return np.exp(weights, out=weights)


_GROUP = 32


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ascending indices of the `count` largest entries.

    The largest entries of `count` disjoint groups are `count` entries, so nothing below the least of them is wanted: only the
    few above that cut are partitioned.
    """
    groups = len(values) // _GROUP
    if groups < 2 * count:
        return np.sort(values.argpartition(len(values) - count)[-count:])
    maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    maxima.partition(groups - count)
    candidates = np.flatnonzero(values >= maxima[groups - count])
    order = values[candidates].argpartition(len(candidates) - count)
    return np.sort(candidates[order[-count:]])


def _nucleus(probs: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Ascending indices of the smallest set of largest entries with mass >= top_p.

    The set lies among the entries above any cut whose mass reaches top_p, so only those few are sorted; the cut falls until
    it does.
    """
    cut = np.float32(probs.max() / 64)
    while True:
        candidates = np.flatnonzero(probs >= cut)
        mass = probs[candidates]
        if mass.sum(dtype=np.float64) >= top_p or cut == 0:
            break
        cut = np.float32(cut / 64) if cut > 1e-12 else np.float32(0)
    order = np.argsort(-mass, kind="stable")
    size = int(mass[order].cumsum(dtype=np.float64).searchsorted(top_p)) + 1
    return np.sort(candidates[order[:size]])
