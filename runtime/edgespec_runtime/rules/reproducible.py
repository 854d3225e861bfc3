"""Drafter-invariant sampling: a seed gives the text of plain decoding with that seed, whatever drafts and however much.

Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (section 4, Gumbel sampling).
A token is the argmax of log p plus Gumbel noise, which is a draw from p. The noise belongs to the position in the text. So the
target's token at a position is settled by the text before it and the seed; the drafter adds the same noise to its own log q and
thereby often names the same token. A draft stays as far as it names the target's tokens.
In one race both name the same token with probability Σ_v 1 / Σ_u max(p_u/p_v, q_u/q_v): at most 1 − TVD, which rejection sampling
reaches, and at least (1 − TVD)/(1 + TVD) (Theorem 1 there). The two races of `PositionNoise` have that upper bound alone.
"""

from __future__ import annotations

import functools
import secrets

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.acceptance import Draft, Rule, Verdict
from edgespec_runtime.rules.sampling import Categorical, TokenSource, Warp, draw

_GROUP = 256  # tokens: about √V, so that a draw needs noise for 2·√V tokens and not for V
_KEPT = 64  # pieces of noise, 2 KiB each: two for every position of a block


class PositionNoise:
    """Noise for every position and token, the same whenever it is asked for.

    A token is drawn in two steps, which multiply to its probability: its group of 256 neighbouring ids by the groups' total
    probabilities, then the token in its group. Each step takes the argmax with noise of its own.

    Args:
        seed: a whole number, at least 0.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._shift = seed, 0
        self._noise = functools.lru_cache(_KEPT)(self._drawn)

    def random(self) -> float:
        raise NotImplementedError("noise by position draws tokens only")

    def shift(self, tokens: int) -> None:
        """The text lost so many of its tokens: the noise goes on where it was."""
        self._shift += tokens

    def sample(self, distribution: Categorical, position: int) -> int:
        """argmax of log probability + Gumbel noise, computed as that of probability / exponential noise."""
        if distribution.certain:
            return distribution.sample(self)
        place, weights = position + self._shift, distribution.weights
        if distribution.ids is None:  # the sums of groups of neighbours, float64 [⌈V / _GROUP⌉]
            totals = np.add.reduceat(weights, np.arange(0, len(weights), _GROUP), dtype=np.float64)
        else:
            totals = np.bincount(distribution.ids // _GROUP, weights)
        group = int((totals / self._noise(place, 0, len(totals))).argmax())
        noise = self._noise(place, 1 + group, _GROUP)
        first = group * _GROUP
        if distribution.ids is None:
            weights = weights[first : first + _GROUP]
            return first + int((weights / noise[: len(weights)]).argmax())
        start, end = distribution.ids.searchsorted((first, first + _GROUP))
        ids = distribution.ids[start:end]
        return int(ids[(weights[start:end] / noise[ids - first]).argmax()])

    def _drawn(self, place: int, stream: int, count: int) -> NDArray[np.float64]:
        """float64 [count], exponential, above 0; minus its logarithm is Gumbel noise. A prefix of one stream for every count."""
        # A counter-based generator: every stream begins at a place of its own, and no two meet.
        bits = np.random.Philox(key=self._seed, counter=[0, stream, place, 0])
        noise: NDArray[np.float64] = np.random.Generator(bits).standard_exponential(count)
        noise += np.finfo(np.float64).tiny
        return noise


class ReproducibleRule(Rule):
    """A draft token stays where it is the target's own token for its position."""

    def source(self, seed: int | None) -> TokenSource:
        """As `Rule.source`; every choice belongs to a position of the text, not to the order of choices."""
        return PositionNoise(secrets.randbits(63) if seed is None else seed)

    def verify(self, rows: Logits, draft: Draft, how: Warp, source: TokenSource, start: int) -> Verdict:
        """As `Rule.verify`; `source` is a `PositionNoise`."""
        for place, token in enumerate(draft.tokens):
            own = draw(rows[place], how, source, start + place)
            if own != token:
                return place, own
        count = len(draft.tokens)
        return count, draw(rows[count], how, source, start + count)
