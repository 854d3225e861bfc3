"""Rules that keep more of the draft than the target's own distribution allows: lenience, and lossy speculative decoding. Pure.

They look at the warped p and q alone, never at the drafter's logits, so they go with any drafter. The output's distribution is
    lenience    min(q, f) + Σ max(0, q − f) · norm(max(0, p − q))          f = p/ε, p/ε², p^ε
    lossy       min(q, p/(1−a)) + Σ max(0, q − p/(1−a)) · norm(max(0, p/β − q))
The second is π = max(min(q, p/(1−a)), p/β) exactly where Σπ = 1, which a tuned β makes true and β = 1 does not; accept and
residual are those of π in both cases (speculative cascades, Lemma 2; Table 3 there prints p and q swapped).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Position, Rule, TokenRule
from edgespec_runtime.rules.sampling import Categorical


def lenience(allowed: Callable[[float], float]) -> Rule:
    """Accept with min(1, f(p)/q), residual norm(max(0, p − q)) (DistillSpec, Algorithm A.1).

    Args:
        allowed: f, from a probability p(x) to what the draft may give x; at least p.
    """

    def accept(position: Position, token: int) -> float:
        return min(1.0, allowed(position.p.prob(token)) / position.q.prob(token))

    return TokenRule(accept, LOSSLESS_RULE.residual, mixes=True)


def lossy(a: float, beta: Callable[[Categorical, Categorical], float]) -> Rule:
    """Accept with min(1, p/((1−a)·q)), residual norm(max(0, p/β − q)) (Tran-Thien 2023; speculative cascades, section 2).

    Args:
        a: in [0, 1).
        beta: β of (p, q), at least 1 − a; above 1 the residual may be empty, and then p is drawn from. With `tuned_beta` the
            output's distribution is π.
    """

    def accept(position: Position, token: int) -> float:
        return min(1.0, position.p.prob(token) / ((1 - a) * position.q.prob(token)))

    def residual(position: Position) -> Categorical:
        p, q = position.p, position.q
        scaled = Categorical(p.ids, p.probs / beta(p, q))
        rest = scaled.excess(q)
        return p if rest is scaled else rest

    return TokenRule(accept, residual, mixes=True)


def tuned_beta(p: Categorical, q: Categorical, a: float) -> float:
    """The β >= 1 with Σ max(0, p/β − q) = Σ max(0, q − p/(1−a)) (Tran-Thien 2023; speculative cascades, appendix F.6).

    Solved exactly: in t = 1/β the left side is a line between two neighbouring ratios q/p. inf where nothing is ever rejected
    and p has tokens that q has not: any β does then.
    """
    rejected = float(np.maximum(q.probs - p.on(q) / (1 - a), 0).sum(dtype=np.float64))
    above, below = p.probs.astype(np.float64), q.on(p).astype(np.float64)
    wanted = above > below  # t is at most 1, so no other token can take part
    above, below = above[wanted], below[wanted]
    if not len(above):
        return 1.0
    ratios = below / above
    order = ratios.argsort()
    target_mass, draft_mass = above[order].cumsum(), below[order].cumsum()
    at_ratio = ratios[order] * target_mass - draft_mass  # the left side where the next token joins; ascending
    last = max(int(at_ratio.searchsorted(rejected, side="right")) - 1, 0)
    share = rejected + draft_mass[last]
    return float(target_mass[last] / share) if share > 0 else math.inf
