"""Acceptance rules: which draft tokens stay, and what replaces the first that does not. Pure; knows no engine.

Notation: p = target, q = draft, both warped alike. A rule accepts a draft token x ~ q with some probability and, at the first
rejection, draws from its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.sampling import Categorical, Warp, warp


@dataclass(frozen=True)
class Rule:
    """accept(p, q, x): probability in [0, 1] with which x ~ q stays; residual(p, q): drawn from after a rejection."""

    name: str
    accept: Callable[[Categorical, Categorical, int], float]
    residual: Callable[[Categorical, Categorical], Categorical]


def _lossless_accept(p: Categorical, q: Categorical, token: int) -> float:
    return min(1.0, p.prob(token) / q.prob(token))


def positive_part(p: Categorical, q: Categorical) -> Categorical:
    """norm(max(0, p − q)); p itself where nothing is left of it (p = q up to rounding)."""
    ids = p.ids
    rest = p.probs - (q.at(ids) if ids is not None else q.dense(len(p.probs)))
    np.maximum(rest, 0, out=rest)
    total = rest.sum(dtype=np.float64)
    return Categorical(ids, rest / total) if total > 0 else p


LOSSLESS = Rule("lossless", _lossless_accept, positive_part)
"""min(1, p/q) and norm(max(0, p − q)): the output is distributed as p (Leviathan et al. 2023, Algorithm 1)."""

RULES = {rule.name: rule for rule in (LOSSLESS,)}


def verify(
    rows: NDArray[np.float32],
    drafted: Sequence[int],
    draft: Sequence[Categorical],
    how: Warp,
    rule: Rule,
    generator: np.random.Generator,
) -> tuple[int, int]:
    """Walk a block until the first rejection.

    Args:
        rows: target logits [γ + 1, V]; row i follows draft token i − 1.
        drafted: γ draft tokens; `draft`: the distribution each was drawn from.

    Returns:
        (number of accepted draft tokens, the token the target adds after them). Rows after a rejection are never warped.
    """
    for position, (token, q) in enumerate(zip(drafted, draft, strict=True)):
        p = warp(rows[position], how)
        chance = rule.accept(p, q, token)
        if chance < 1.0 and (chance == 0.0 or generator.random() >= chance):
            return position, rule.residual(p, q).sample(generator)
    return len(drafted), warp(rows[len(drafted)], how).sample(generator)
