"""Losslessness by enumeration: the law of a block's first tokens is the target's own, computed exactly and not by sampling."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from edgespec_runtime.rules.acceptance import LOSSLESS, Draft, Place, TokenRule, accept_ratio
from edgespec_runtime.rules.sampling import Categorical, Uniforms, Warp, warp

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


class Scripted(Uniforms):
    """A source whose uniforms are given: `low` accepts every chance above 0, `high` rejects every chance below 1."""

    def __init__(self, accepts: list[bool]) -> None:
        self.accepts = accepts

    def random(self) -> float:
        return 0.0 if self.accepts.pop(0) else 1.0 - 1e-16


def position_law(rule: TokenRule, place: Place) -> np.ndarray:
    """π [V] of one position: a draft token that stays, or the residual."""
    q = place.q.dense(V).astype(np.float64)
    stays = np.array([rule.accept(place, x) if q[x] > 0 else 0.0 for x in range(V)])
    rejected = float((q * (1 - stays)).sum())
    return q * stays + (rejected * rule.residual(place).dense(V) if rejected else 0.0)


def block_law(
    target: Model, draft: Model, gamma: int, how: Warp, rule: TokenRule = LOSSLESS, go_on: LawOf | None = None
) -> Law:
    """The exact law of the first γ + 1 tokens: one block, continued by `go_on` (the target alone) where it ended early."""
    law: Law = defaultdict(float)
    go_on = go_on or target_law(target, how)
    draft_how = dataclasses.replace(how, temperature=0.0) if rule.draft_greedily else how
    for drafted in itertools.product(range(V), repeat=gamma):
        logits = [draft(drafted[:i]) for i in range(gamma + 1)]
        q = [warp(row, draft_how) for row in logits]
        places = [Place(target(drafted[:i]), logits[i], q[i], how) for i in range(gamma + 1)]
        reached = float(np.prod([places[i].q.prob(drafted[i]) for i in range(gamma)]))
        if reached == 0.0:
            continue
        for position, place in enumerate(places):
            if position == gamma:
                chance = 0.0
                added = position_law(rule, place) if rule.mixes else place.p.dense(V)
            else:
                chance, added = rule.accept(place, drafted[position]), rule.residual(place).dense(V)
            for token, mass in enumerate(added):
                prefix = (*drafted[:position], token)
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


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_is_distributed_as_the_target(name: str, gamma: int, seed: int) -> None:
    target, draft = model(seed), model(seed + 100)
    wanted: Law = defaultdict(float)
    continued(wanted, target, (), 1.0, gamma + 1, WARPS[name])
    assert sum(wanted.values()) == pytest.approx(1.0, abs=1e-5)
    assert difference(block_law(target, draft, gamma, WARPS[name]), wanted) < 1e-6


def test_the_enumeration_sees_a_wrong_rule() -> None:
    """Accepting a little too often, or drawing the wrong residual, shows: the bound above is no formality."""
    target, draft, how = model(0), model(100), WARPS["T=1"]
    wanted: Law = defaultdict(float)
    continued(wanted, target, (), 1.0, 2, how)
    eager = TokenRule(lambda place, x: min(1.0, 1.02 * LOSSLESS.accept(place, x)), LOSSLESS.residual)
    careless = TokenRule(LOSSLESS.accept, lambda place: place.p)
    for rule in (eager, careless):
        assert difference(block_law(target, draft, 1, how, rule), wanted) > 1e-3


@pytest.mark.parametrize("p_sparse", [False, True])
@pytest.mark.parametrize("q_sparse", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_residual_of_dense_and_sparse_lists(p_sparse: bool, q_sparse: bool, seed: int) -> None:
    """Different supports: tokens only p keeps, only q keeps, both keep."""
    p = warp(model(seed)(()), WARPS["top-k"] if p_sparse else WARPS["T=1"])
    q = warp(model(seed + 50)(()), WARPS["top-p"] if q_sparse else WARPS["T=1"])
    rest = np.maximum(p.dense(V) - q.dense(V), 0)
    np.testing.assert_allclose(p.excess(q).dense(V), rest / rest.sum(), atol=1e-6)
    for token in range(V):
        if q.prob(token) > 0:
            assert accept_ratio(p, q, token) == pytest.approx(min(1.0, p.prob(token) / q.prob(token)))


def test_disjoint_supports_reject_always_and_draw_from_the_target() -> None:
    p = Categorical(np.array([0, 1]), np.array([0.25, 0.75], dtype=np.float32))
    q = Categorical(np.array([3, 4]), np.array([0.5, 0.5], dtype=np.float32))
    assert accept_ratio(p, q, 3) == 0.0
    np.testing.assert_allclose(p.excess(q).dense(V), p.dense(V))


def test_equal_distributions_leave_no_residual_and_never_reject() -> None:
    p = warp(model(3)(()), WARPS["T=1"])
    assert all(accept_ratio(p, p, token) == 1.0 for token in range(V))
    assert p.excess(p) is p


def test_acceptance_probability_is_one_minus_total_variation() -> None:
    """Σ q · min(1, p/q) = Σ min(p, q)."""
    p, q = (warp(model(seed)(()), WARPS["T=1"]) for seed in (1, 2))
    accepted = sum(q.prob(token) * accept_ratio(p, q, token) for token in range(V))
    assert accepted == pytest.approx(float(np.minimum(p.dense(V), q.dense(V)).sum()), abs=1e-6)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_verify_stops_at_the_first_rejection_and_warps_no_row_after_it(kept: int) -> None:
    """Rows after the rejection hold NaN: touching one would show."""
    rows = np.stack([model(9)(tuple(range(i))) for i in range(3)])
    draft = [warp(model(8)(tuple(range(i))), WARPS["T=1"]) for i in range(2)]
    drafted = [int(np.argmax(q.dense(V) - warp(rows[i], WARPS["T=1"]).dense(V))) for i, q in enumerate(draft)]
    rows[kept + 1 :] = np.nan
    accepts = [True] * kept + [False] * (kept < 2) + [True]
    accepted, added = LOSSLESS.verify(rows, Draft(drafted, draft), WARPS["T=1"], Scripted(accepts), 0)
    assert accepted == kept
    assert 0 <= added < V
    if kept < 2:
        assert added != drafted[kept]  # the residual has no mass where q exceeds p
