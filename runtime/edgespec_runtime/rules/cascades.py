"""Speculative cascades: rules that mix the target with the drafter where the drafter seems good enough. Pure.

Narasimhan et al., Faster Cascades via Speculative Decoding: the block is decoded as if from π = T(q, p) (Algorithm 4),
    cascades            π = (1 − δ)·q + δ·p, δ in {0, 1}                    (Algorithm 5, Table 3)
    token-specific      π(v) = q(v)·[v ∈ T] + p(v)·Σ_{u ∉ T} q(u)           (Algorithm 6, Eq. 13 to 16)
δ and T are decided on the raw distributions, what they mix is warped (appendix C.1). Natural logarithms: entropies are in nats.
Which δ and T the rules have: table.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Position, Rule, TokenRule, accept_ratio
from edgespec_runtime.rules.sampling import Categorical


def log_total(logits: Logits) -> float:
    """log Σ exp(logits), summed in float64."""
    top = logits.max()
    return float(top) + math.log(np.exp(logits - top).sum(dtype=np.float64))


def entropy(logits: Logits) -> float:
    """H of softmax(logits) in nats. Every term is positive, so nothing cancels where the distribution is nearly certain."""
    depth = logits.max() - logits
    weights = np.exp(-depth)
    total = weights.sum(dtype=np.float64)
    depth[weights == 0] = 0  # infinite where a drafter does not know the token
    return float(math.log(total) + (weights * depth).sum(dtype=np.float64) / total)


def total_variation(p: Categorical, q: Categorical) -> float:
    """Σ max(0, p − q)"""
    return float(np.maximum(p.probs - q.on(p), 0).sum(dtype=np.float64))


def discrepancy(position: Position) -> float:
    """D(q, p) of BiLD on raw distributions: −log p(argmax q) when greedy, else −Σ q log p (appendix F.1; F.5 prints no minus)."""
    log_p = log_total(position.p_logits)
    if position.how.temperature == 0.0:
        return log_p - float(position.p_logits[position.q_logits.argmax()])
    return float((position.raw_q * (log_p - position.p_logits)).sum(dtype=np.float64))


def peak_gap(position: Position) -> float:
    """max p − max q: how much surer the target is."""
    return float(position.raw_p.max()) - float(position.raw_q.max())


def entropy_gap(position: Position) -> float:
    """H(q) − H(p): how much surer the target is, in nats."""
    return entropy(position.q_logits) - entropy(position.p_logits)


def cascade(defers: Callable[[Position], bool]) -> Rule:
    """π = p where the rule defers to the target and else q; a draft token is rejected with probability δ·TV(p, q) (Lemma 3)."""

    def accept(position: Position, token: int) -> float:
        return accept_ratio(position.p, position.q, token) if defers(position) else 1.0

    # It rejects only where it defers, and π is p there.
    return TokenRule(accept, LOSSLESS_RULE.residual, mixes=True, raw=True)


def opt(a: float, gap: Callable[[Position], float]) -> Rule:
    """δ = [gap > a·TV(p̃, q̃)], TV of the warped ones (Eq. 10, appendix C.1); with entropies Eq. 28."""

    def defers(position: Position) -> bool:
        surer = gap(position)
        if surer <= 0 <= a:  # TV cannot be negative: the target need not be warped
            return False
        return surer > a * total_variation(position.p, position.q)

    return cascade(defers)


def token_specific(trusted: Callable[[Position], NDArray[np.bool_]]) -> Rule:
    """π(v) = q(v)·[v ∈ T] + p(v)·η, η = Σ_{u ∉ T} q(u).

    Args:
        trusted: T as bool [V], the tokens at which the drafter may speak.
    """

    def accept(position: Position, token: int) -> float:
        known = trusted(position)
        if known[token]:
            return 1.0  # π(x) >= q(x)
        return min(1.0, position.p.prob(token) * _deferred(position.q, known) / position.q.prob(token))

    def target(position: Position) -> Categorical:
        p, q, known = position.p, position.q, trusted(position)
        share = _deferred(q, known)
        if share == 0.0:
            return q
        if p.ids is None or q.ids is None:
            return Categorical(None, q.dense(len(known)) * known + p.dense(len(known)) * share)
        ids = np.union1d(p.ids, q.ids)
        return Categorical(ids, q.at(ids) * known[ids] + p.at(ids) * share)

    return TokenRule(accept, lambda position: target(position).excess(position.q), mixes=True, raw=True)


def _deferred(q: Categorical, trusted: NDArray[np.bool_]) -> float:
    """η: what q gives to tokens outside T."""
    return float(q.probs[~(trusted if q.ids is None else trusted[q.ids])].sum(dtype=np.float64))
