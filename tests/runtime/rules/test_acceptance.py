"""Parts of rejection sampling: acceptance probability, residual, where a block ends. test_rules.py has the law of blocks."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from block_laws import WARPS, Law, V, block_law, continued, difference, model
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Draft, TokenRule, accept_ratio
from edgespec_runtime.rules.sampling import Categorical, Uniforms, warp
from pair_law import fit


class Scripted(Uniforms):
    """A source whose uniforms are given: `low` accepts every chance above 0, `high` rejects every chance below 1."""

    def __init__(self, accepts: list[bool]) -> None:
        self.accepts = accepts

    def random(self) -> float:
        return 0.0 if self.accepts.pop(0) else 1.0 - 1e-16


def test_the_enumeration_sees_a_wrong_rule() -> None:
    """Accepting a little too often, or drawing the wrong residual, shows: the bounds of test_rules.py are no formality."""
    target, draft, how = model(0), model(100), WARPS["T=1"]
    wanted: Law = defaultdict(float)
    continued(wanted, target, (), 1.0, 2, how)
    eager = TokenRule(
        lambda position, x: min(1.0, 1.02 * LOSSLESS_RULE.accept(position, x)), LOSSLESS_RULE.residual
    )
    careless = TokenRule(LOSSLESS_RULE.accept, lambda position: position.p)
    for rule in (eager, careless):
        assert difference(block_law(target, draft, 1, how, rule), wanted) > 1e-3


@pytest.mark.parametrize(("off", "low", "high"), [(0.0, 0, 25), (0.09, 970, 1000)])
def test_the_chi_squared_test_sees_what_it_says(off: float, low: int, high: int) -> None:
    """Samples of the law, and of one that is 0.09 off where that is hardest to see: every probability is 0.18 of itself too high
    or too low. Of 1,000 trials 10 are below 1e-2 for the right law; more than 25 would have a probability of 1e-5."""
    generator = np.random.default_rng(0)
    law = 0.85 ** np.arange(60)
    law /= law.sum()
    signs = np.where(np.arange(60) % 2, 1.0, -1.0)
    signs -= signs @ law
    wrong = law * (1 + 2 * off * signs / (np.abs(signs) @ law))
    assert np.abs(wrong - law).sum() / 2 == pytest.approx(off)
    rate = 1e-4 if off else 1e-2
    samples = generator.multinomial(2500, wrong, size=1000)
    found = [fit(Counter(dict(enumerate(each.tolist()))), dict(enumerate(law.tolist()))) for each in samples]
    assert low <= sum(p < rate for p in found) <= high


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
    accepted, added = LOSSLESS_RULE.verify(rows, Draft(drafted, draft), WARPS["T=1"], Scripted(accepts), 0)
    assert accepted == kept
    assert 0 <= added < V
    if kept < 2:
        assert added != drafted[kept]  # the residual has no mass where q exceeds p
