"""What an acceptance rule is, the walk through a block, and the lossless rule. Pure; knows no engine.

Notation: p = target, q = draft, both warped alike. A rule accepts a draft token x ~ q with some probability and, at the first
rejection, draws from its residual. The other rules: lenient.py, cascades.py; all by name: rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.sampling import Categorical, RandomSource, Warp, draw, warp


@dataclass(frozen=True)
class Draft:
    """A proposed continuation: `tokens` and the distribution `q` that each was drawn from.

    `logits`: the drafter's own, unwarped, [V] each, one more than there are tokens; only where the rule looks at them. `copied`:
    no model computed it.
    """

    tokens: list[int] = field(default_factory=list)
    q: list[Categorical] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    copied: bool = False


class Place:
    """What a rule sees at one position: p, and q where there is a draft token or the rule looks at raw distributions.

    raw_p, raw_q: float32 [V], the softmax of the unwarped logits, computed when first asked for.
    """

    def __init__(
        self,
        p_logits: NDArray[np.float32],
        q_logits: NDArray[np.float32] | None,
        q: Categorical | None,
        how: Warp,
    ) -> None:
        self.p_logits, self._q_logits, self._how = p_logits, q_logits, how
        self._p: Categorical | None = None
        self._q = q

    @property
    def q_logits(self) -> NDArray[np.float32]:
        assert self._q_logits is not None  # the drafter kept them, since the rule is `raw`
        return self._q_logits

    @property
    def greedy(self) -> bool:
        return self._how.temperature == 0.0

    # p and q are asked for at every draft token, and Python 3.11's cached_property takes a lock

    @property
    def p(self) -> Categorical:
        if self._p is None:
            self._p = warp(self.p_logits, self._how)
        return self._p

    @property
    def q(self) -> Categorical:
        if self._q is None:
            self._q = warp(self.q_logits, self._how)
        return self._q

    @cached_property
    def raw_p(self) -> NDArray[np.float32]:
        return softmax(self.p_logits)

    @cached_property
    def raw_q(self) -> NDArray[np.float32]:
        return softmax(self.q_logits)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [V]"""
    probs: NDArray[np.float32] = np.exp(logits - logits.max())
    probs /= probs.sum()
    return probs


@dataclass(frozen=True)
class Rule:
    """accept(place, x): probability in [0, 1] with which x ~ q stays; residual(place): drawn from after a rejection;
    last(place): drawn from after a whole block was accepted.

    raw: looks at raw_p and raw_q, so the drafter reads its own last token too. draft_greedily: the draft is its argmax.
    """

    accept: Callable[[Place, int], float]
    residual: Callable[[Place], Categorical]
    last: Callable[[Place], Categorical] = lambda place: place.p
    raw: bool = False
    draft_greedily: bool = False


def accept_ratio(p: Categorical, q: Categorical, token: int) -> float:
    """min(1, p/q) at a token drawn from q."""
    return min(1.0, p.prob(token) / q.prob(token))


def beside(p: Categorical, q: Categorical) -> NDArray[Any]:
    """q at the tokens that p lists, [len(p.probs)]."""
    return q.at(p.ids) if p.ids is not None else q.dense(len(p.probs))


LOSSLESS = Rule(
    accept=lambda place, token: accept_ratio(place.p, place.q, token),
    residual=lambda place: place.p.excess(place.q),
)
"""min(1, p/q) and norm(max(0, p − q)): the output is distributed as p (Leviathan et al. 2023, Algorithm 1)."""


def unmatched(p: Categorical, q: Categorical) -> Categorical:
    """norm(p·(1 − q)); p itself where nothing is left of it, or all of p is one token."""
    if p.certain:
        return p
    rest = p.probs * (1 - beside(p, q))
    total = float(rest.sum())
    return Categorical(p.ids, rest, total) if total > 0 else p


MATCHING = Rule(
    accept=lambda place, token: place.p.prob(token),
    residual=lambda place: unmatched(place.p, place.q),
)
"""What engines do that sample from the target and keep a draft token where the sample equals it: α = Σ p·q, the output is p.

After a rejection the sample is p without the draft token x. That x is gone then, so its mean over x, p·(1 − q), is drawn from.
"""


def verify(
    rows: NDArray[np.float32], draft: Draft, how: Warp, rule: Rule, generator: RandomSource
) -> tuple[int, int]:
    """Walk a block until the first rejection.

    Args:
        rows: target logits [γ + 1 or more, V]; row i follows draft token i − 1, rows behind γ are padding.

    Returns:
        (number of accepted draft tokens, the token the target adds after them). Rows after a rejection are never warped.
    """
    for position, token in enumerate(draft.tokens):
        place = Place(rows[position], draft.logits[position] if rule.raw else None, draft.q[position], how)
        chance = rule.accept(place, token)
        if chance < 1.0 and (chance == 0.0 or generator.random() >= chance):
            return position, rule.residual(place).sample(generator)
    count = len(draft.tokens)
    # An empty draft of a rule that looks at q is a plain step: nobody drafted, so the target speaks alone.
    if rule.raw and len(draft.logits) > count:
        return count, rule.last(Place(rows[count], draft.logits[count], None, how)).sample(generator)
    return count, draw(rows[count], how, generator)
