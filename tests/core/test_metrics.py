"""Metrics from raw counts, and the bootstrap's stated coverage."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from edgespec.core.metrics import (
    RawCounts,
    acceptance_rate_of,
    bootstrap,
    expected_acceptance,
    mbsu,
    predicted_block_efficiency,
    predicted_speedup,
    quantile,
    ratio_of_sums,
)


def test_tokens_after_the_first_rejection_count_as_neither() -> None:
    counts = RawCounts()
    counts.add_block(drafted=3, accepted=1, emitted=2)
    counts.add_block(drafted=3, accepted=3, emitted=4)
    counts.add_block(drafted=3, accepted=2, emitted=2)  # the second accepted token ended the turn
    assert (counts.tested, counts.accepted) == ([3, 3, 1], [3, 2, 1])
    assert counts.block_efficiency == 8 / 3
    assert counts.acceptance_rate == 6 / 7


def test_sums() -> None:
    one, two = RawCounts(), RawCounts()
    one.add_block(1, 0, 1)
    two.add_block(3, 3, 4)
    one.add(two)
    assert (one.blocks, one.drafted, one.emitted, one.tested, one.accepted) == (2, 4, 5, [2, 1, 1], [1, 1, 1])


def test_independent_acceptances_give_the_predicted_block_efficiency() -> None:
    generator, alpha, gamma = random.Random(0), 0.7, 4
    counts = RawCounts()
    for _ in range(40_000):
        accepted = 0
        while accepted < gamma and generator.random() < alpha:
            accepted += 1
        counts.add_block(gamma, accepted, accepted + 1)
    expected = predicted_block_efficiency(alpha, gamma)
    assert counts.block_efficiency == pytest.approx(expected, abs=0.03)  # 4 standard errors
    assert counts.acceptance_rate == pytest.approx(alpha, abs=0.006)
    assert predicted_block_efficiency(1.0, gamma) == gamma + 1


@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.97])
def test_the_acceptance_of_a_block_efficiency_predicts_it_again(alpha: float, gamma: int) -> None:
    assert acceptance_rate_of(predicted_block_efficiency(alpha, gamma), gamma) == pytest.approx(
        alpha, abs=2e-6
    )
    assert acceptance_rate_of(1.0, gamma) == acceptance_rate_of(0.5, gamma) == 0.0
    assert acceptance_rate_of(gamma + 1.0, gamma) is None


def test_copies_take_no_drafter_step() -> None:
    counts = RawCounts()
    assert counts.computed(4) == 4
    counts.add_block(drafted=4, accepted=1, emitted=2)
    assert counts.computed(4) == 4
    counts.add_block(drafted=4, accepted=4, emitted=5, copied=2)
    assert (counts.copied, counts.computed(4)) == (2, 3)


def test_a_step_behind_a_draft_is_a_step_of_its_block() -> None:
    counts = RawCounts()
    counts.add_block(drafted=3, accepted=3, emitted=4, behind=1)
    assert counts.computed(3) == 4
    counts.add_block(drafted=0, accepted=0, emitted=1)
    assert (counts.behind, counts.computed(3)) == (1, 3.5)


def test_seconds_outside_both_models_are_the_loops() -> None:
    counts = RawCounts(emitted=30, draft_seconds=0.25, verify_seconds=0.5, total_seconds=1.5)
    assert counts.loop_seconds == 0.75
    assert counts.token_rate == 20


def test_memory_bound_speed_up_is_not_the_misprint() -> None:
    assert mbsu(2.3, 3, 1 / 61) == pytest.approx(2.3 / (3 / 61 + 1))
    assert predicted_speedup(2.3, 3, 1 / 61, 1.0) == pytest.approx(mbsu(2.3, 3, 1 / 61))


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Normal data, n = 40: 200 intervals of nominal 95 %; fewer than 176 hits would have probability below 1e-4."""
    generator, hits = random.Random(1), 0
    for trial in range(200):
        items = [(generator.gauss(3.0, 1.0), 1.0) for _ in range(40)]
        _, low, high = bootstrap(
            items, ratio_of_sums(lambda x: x[0], lambda x: x[1]), resamples=200, seed=trial
        )
        hits += low <= 3.0 <= high
    assert 176 <= hits <= 199


def test_resamples_without_a_value_have_no_say_in_the_interval() -> None:
    """As of τ where the drafter wrote two of three replies alone: 8 of 27 resamples have no block, and 1 has three times 5."""
    tokens_a_block = ratio_of_sums(lambda reply: reply[0], lambda reply: reply[1])
    assert bootstrap([(10, 0), (12, 0), (10, 5)], tokens_a_block) == (6.4, 2.0, 6.8)
    assert all(math.isnan(value) for value in bootstrap([(10, 0), (12, 0)], tokens_a_block))


def test_quantile_interpolates() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([5.0], 0.2) == 5.0


def test_expected_acceptance_is_one_minus_tvd_of_arrays_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    p, q = torch.softmax(torch.randn(2, 3, 4, 50, generator=torch.manual_seed(0)), -1)
    found = expected_acceptance(p, q)
    tvd = 0.5 * (p.double() - q.double()).abs().sum(-1)
    assert found.dtype == torch.float64
    assert found.shape == (3, 4)
    torch.testing.assert_close(found, 1.0 - tvd, atol=1e-6, rtol=0.0)
    in_numpy = expected_acceptance(p.numpy(), q.numpy())
    assert in_numpy.dtype == np.float64
    np.testing.assert_allclose(in_numpy, found.numpy(), atol=1e-12)
    assert 1.0 - 1e-6 < expected_acceptance(p.numpy()[0, 0], p.numpy()[0, 0]) <= 1.0
