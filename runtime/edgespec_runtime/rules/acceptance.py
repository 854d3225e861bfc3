"""What an acceptance rule is, and the rules that walk through a block token by token. Pure; knows no engine.

Notation: p = target, q = draft, both warped alike. A rule decides which beginning of a draft stays, and adds one token. The rules
of other papers: block_verification.py, reproducible.py, lenient.py, cascades.py; all of them by name: table.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.sampling import Categorical, TokenSource, Uniforms, Warp, draw, warp


@dataclass
class Draft:
    """A proposed continuation.

    tokens: the draft tokens, γ of them.
    q: the distribution that each token was drawn from. A rule that `mixes` wants one more, for the token behind the draft; it
        is missing where the drafter has nothing to say there.
    logits: the drafter's own, unwarped, float32 [V], one for each entry of `q`; only where the rule is `raw`.
    copied: how many of the tokens no model computed (prompt lookup).
    behind: 1 where a model computed the q behind the draft, else 0.
    """

    tokens: list[int] = field(default_factory=list)
    q: list[Categorical] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    copied: int = 0
    behind: int = 0


class Position:
    """What a rule sees at one position. p is warped when first asked for.

    q_logits: the drafter's own, float32 [V]; None where the rule is not `raw`, and then nothing asks for it.
    raw_p, raw_q: float32 [V], the softmax of the unwarped logits, computed when first asked for.
    """

    def __init__(self, p_logits: Logits, q_logits: Any, q: Categorical, how: Warp) -> None:
        self.p_logits, self.q_logits, self.how, self.q = p_logits, q_logits, how, q
        self._p: Categorical | None = None

    @property  # not cached_property: p is asked for at every draft token, and Python 3.11's takes a lock
    def p(self) -> Categorical:
        if self._p is None:
            self._p = warp(self.p_logits, self.how)
        return self._p

    @cached_property
    def raw_p(self) -> NDArray[np.float32]:
        return softmax(self.p_logits)

    @cached_property
    def raw_q(self) -> NDArray[np.float32]:
        return softmax(self.q_logits)


def softmax(logits: Logits) -> NDArray[np.float32]:
    """float32 [V]"""
    probs: NDArray[np.float32] = np.exp(logits - logits.max())
    probs /= probs.sum()
    return probs


Verdict = tuple[int, int]
"""(number of draft tokens that stay, the token that follows them)"""


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Which draft tokens stay, and which token follows them.

    Attributes:
        mixes: the output's distribution depends on q, not on p alone. So the drafter is asked at every position, also in a plain
            step and behind a whole draft: otherwise the text would depend on the draft length, which timing chooses.
        raw: it looks at raw_p and raw_q, so the drafter keeps its logits.
        draft_greedily: the draft is the drafter's argmax.
    """

    mixes: bool = False
    raw: bool = False
    draft_greedily: bool = False

    def source(self, seed: int | None) -> TokenSource:
        """What a reply's random choices come from; without a seed, from the operating system's randomness."""
        return Uniforms(seed)

    @abstractmethod
    def verify(self, rows: Logits, draft: Draft, how: Warp, source: TokenSource, start: int) -> Verdict:
        """Decide one block.

        Args:
            rows: target logits, float32 [γ + 1 or more, V]; row i follows draft token i − 1, rows behind γ are padding.
            start: position of the first draft token in the text.
        """


def happens(chance: float, source: TokenSource) -> bool:
    """True with this probability; certain outcomes draw no number."""
    return chance >= 1.0 or (chance > 0.0 and not source.random() >= chance)


@dataclass(frozen=True)
class TokenRule(Rule):
    """A rule that tests one draft token after another, up to the first rejection.

    accept(position, x): probability in [0, 1] with which x ~ q stays; residual(position): drawn from after a rejection. So the
    output's distribution at a position is π(x) = q(x)·accept(x) + Σ_u q(u)·(1 − accept(u)) · residual(x).
    """

    accept: Callable[[Position, int], float]
    residual: Callable[[Position], Categorical]

    def verify(self, rows: Logits, draft: Draft, how: Warp, source: TokenSource, start: int) -> Verdict:
        """As `Rule.verify`. Rows after a rejection are never warped."""
        count = len(draft.tokens)
        for i, q in enumerate(draft.q):
            # The token behind a whole draft follows π too (cascades, Algorithm 4): drawn from q, and tested like the others.
            token = draft.tokens[i] if i < count else source.sample(q, start + count)
            position = Position(rows[i], draft.logits[i] if self.raw else None, q, how)
            if not happens(self.accept(position, token), source):
                return i, source.sample(self.residual(position), start + i)
        return count, token if len(draft.q) > count else draw(rows[count], how, source, start + count)


def accept_ratio(p: Categorical, q: Categorical, token: int) -> float:
    """min(1, p/q) at a token drawn from q."""
    return min(1.0, p.prob(token) / q.prob(token))


LOSSLESS_RULE = TokenRule(
    accept=lambda position, token: accept_ratio(position.p, position.q, token),
    residual=lambda position: position.p.excess(position.q),
)
"""min(1, p/q) and norm(max(0, p − q)): the output is distributed as p (Leviathan et al. 2023, Algorithm 1)."""


def at_temperature(rule: Rule, temperature: float) -> Rule:
    """The rule to decode with: with greedy distributions, one that mixes the warped p and q alone keeps the target's token
    (cascades, Lemma 6)."""
    return LOSSLESS_RULE if rule.mixes and not rule.raw and temperature == 0.0 else rule


def unmatched(p: Categorical, q: Categorical) -> Categorical:
    """norm(p·(1 − q)); p itself where nothing is left of it, or all of p is one token."""
    if p.certain:
        return p
    rest = p.probs * (1 - q.on(p))
    total = float(rest.sum())
    return Categorical(p.ids, rest, total) if total > 0 else p


MATCHING = TokenRule(
    accept=lambda position, token: position.p.prob(token),
    residual=lambda position: unmatched(position.p, position.q),
)
"""What engines do that sample from the target and keep a draft token where the sample equals it: α = Σ p·q, the output is p.

After a rejection the sample is p without the draft token x. That x is gone then, so its mean over x, p·(1 − q), is drawn from.
"""
