"""The exact law of one block of speculative decoding, by enumeration of every draft and every outcome, on toy models."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Position, TokenRule
from edgespec_runtime.rules.sampling import Warp, warp

V = 5
Model = Callable[[tuple[int, ...]], np.ndarray]
Law = dict[tuple[int, ...], float]
LawOf = Callable[[tuple[int, ...]], np.ndarray]  # the probabilities [V] of what follows a prefix
WARPS = {
    "T=1": Warp(temperature=1.0),
    "T=0.6": Warp(temperature=0.6),
    "top-k": Warp(temperature=1.0, top_k=2),
    "top-p": Warp(temperature=0.8, top_p=0.7),
    "min-p": Warp(temperature=1.0, min_p=0.4),
    "all": Warp(temperature=1.3, top_k=4, top_p=0.8, min_p=0.1),
    "greedy": Warp(),
}


def model(seed: int, spread: float = 2.0) -> Model:
    """Logits [V] that depend on the whole prefix."""
    return lambda prefix: (np.random.default_rng([seed, *prefix]).normal(size=V) * spread).astype(np.float32)


def position_law(rule: TokenRule, position: Position) -> np.ndarray:
    """π [V] of one position: a draft token that stays, or the residual."""
    q = position.q.dense(V).astype(np.float64)
    stays = np.array([rule.accept(position, x) if q[x] > 0 else 0.0 for x in range(V)])
    rejected = float((q * (1 - stays)).sum())
    return q * stays + (rejected * rule.residual(position).dense(V) if rejected else 0.0)


def block_law(
    target: Model,
    draft: Model,
    gamma: int,
    how: Warp,
    rule: TokenRule = LOSSLESS_RULE,
    go_on: LawOf | None = None,
) -> Law:
    """The exact law of the first γ + 1 tokens: one block, continued by `go_on` (the target alone) where it ended early."""
    law: Law = defaultdict(float)
    go_on = go_on or target_law(target, how)
    draft_how = dataclasses.replace(how, temperature=0.0) if rule.draft_greedily else how
    for drafted in itertools.product(range(V), repeat=gamma):
        logits = [draft(drafted[:i]) for i in range(gamma + 1)]
        q = [warp(row, draft_how) for row in logits]
        positions = [Position(target(drafted[:i]), logits[i], q[i], how) for i in range(gamma + 1)]
        reached = float(np.prod([positions[i].q.prob(drafted[i]) for i in range(gamma)]))
        if reached == 0.0:
            continue
        for i, position in enumerate(positions):
            if i == gamma:
                chance = 0.0
                added = position_law(rule, position) if rule.mixes else position.p.dense(V)
            else:
                chance, added = rule.accept(position, drafted[i]), rule.residual(position).dense(V)
            for token, mass in enumerate(added):
                prefix = (*drafted[:i], token)
                spread(law, go_on, prefix, reached * (1 - chance) * float(mass), gamma + 1)
            reached *= chance
    return law


def target_law(target: Model, how: Warp) -> LawOf:
    return lambda prefix: warp(target(prefix), how).dense(V)


def spread(law: Law, law_of: LawOf, prefix: tuple[int, ...], mass: float, length: int) -> None:
    """Spread `mass` over the continuations of `prefix` to `length` tokens, each drawn from `law_of` what is before it."""
    if mass == 0.0:
        return
    if len(prefix) == length:
        law[prefix] += mass
        return
    for token, share in enumerate(law_of(prefix)):
        spread(law, law_of, (*prefix, token), mass * float(share), length)


def continued(law: Law, target: Model, prefix: tuple[int, ...], mass: float, length: int, how: Warp) -> None:
    """Spread `mass` over the target's own continuations of `prefix` to `length` tokens."""
    spread(law, target_law(target, how), prefix, mass, length)


def difference(one: Law, other: Law) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
