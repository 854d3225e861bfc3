"""Acceptance rates by position: decayed counts with a prior."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_runtime.chooser.expected_acceptance import DECAY, PRIOR, AcceptanceRates

LENGTH = 4


def fed(rates: AcceptanceRates, alphas: list[float], drafts: int, seed: int = 0) -> AcceptanceRates:
    """After drafts whose token at position i is accepted with probability alphas[i]."""
    for row in np.random.default_rng(seed).random((drafts, LENGTH)):
        stays = row < alphas
        rates.learn(LENGTH, LENGTH if stays.all() else int(stays.argmin()))
    return rates


def test_before_any_draft_the_first_guess_holds_everywhere() -> None:
    assert AcceptanceRates(0.3, LENGTH).estimate() == pytest.approx([0.3] * LENGTH)


def test_counts_decay_and_positions_behind_a_rejection_are_not_tested() -> None:
    rates = AcceptanceRates(0.5, LENGTH)
    rates.learn(LENGTH, 2)  # accepted, accepted, rejected
    rates.learn(LENGTH, 0)
    first = (DECAY + PRIOR * 0.5) / (DECAY + 1 + PRIOR)
    second = (DECAY + PRIOR * first) / (DECAY + PRIOR)
    third = PRIOR * second / (DECAY + PRIOR)
    assert rates.estimate() == pytest.approx([first, second, third, third])


def test_blocks_that_go_by_without_a_draft_make_old_counts_weigh_less() -> None:
    rates = AcceptanceRates(0.5, LENGTH)
    rates.learn(1, 1)
    rates.fade(10)
    kept = DECAY**10
    assert rates.estimate()[0] == pytest.approx((kept + PRIOR * 0.5) / (kept + PRIOR))


def test_a_draft_that_was_cut_short_tests_only_its_own_tokens() -> None:
    rates = AcceptanceRates(0.5, LENGTH)
    rates.learn(1, 1)
    first = (1 + PRIOR * 0.5) / (1 + PRIOR)
    assert rates.estimate() == pytest.approx([first] * LENGTH)


def test_each_position_is_learnt() -> None:
    """The mean of many moments: one moment knows some fifty drafts."""
    alphas = [0.45, 0.7, 0.8, 0.9]
    rates, seen = fed(AcceptanceRates(0.9, LENGTH), alphas, 200), []
    for seed in range(200):
        seen.append(fed(rates, alphas, 20, seed).estimate())
    assert np.mean(seen, axis=0) == pytest.approx(alphas, abs=0.1)


def test_another_text_is_seen_within_a_hundred_drafts() -> None:
    rates = fed(AcceptanceRates(0.9, LENGTH), [0.9] * LENGTH, 1000)
    assert fed(rates, [0.1] * LENGTH, 100, 1).estimate()[0] < 0.35


@pytest.mark.parametrize("guess", [0.0, 1.0])
def test_a_wrong_first_guess_is_no_certainty(guess: float) -> None:
    rates = fed(AcceptanceRates(guess, LENGTH), [1.0 - guess] * LENGTH, 20)
    assert abs(rates.estimate()[0] - guess) > 0.5
