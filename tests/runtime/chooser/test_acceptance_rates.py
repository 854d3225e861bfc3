"""Estimates of the acceptance rate: the guess, the long run, and a text that is another."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_runtime.chooser.acceptance_rates import DOUBT_TESTS, FADING, LONG_RUN_TESTS, AcceptanceRates

POSITIONS = 4


def fed(rates: AcceptanceRates, alphas: list[float], blocks: int, seed: int = 0) -> AcceptanceRates:
    """After blocks of POSITIONS draft tokens; the token at position i is accepted with alphas[i]."""
    uniform = np.random.default_rng(seed).random((blocks, POSITIONS))
    for row in uniform:
        stays = row < alphas
        accepted = POSITIONS if stays.all() else int(stays.argmin())
        rates.learn([(min(POSITIONS, accepted + 1), accepted)], 0)
    return rates


def test_before_any_test_the_guess_holds_everywhere_and_nearly_all_is_possible() -> None:
    estimates, doubt, _ = AcceptanceRates(0.3, POSITIONS).estimate()
    assert estimates == pytest.approx([0.3] * POSITIONS)
    assert 0.3 + 3 * doubt > 0.95


def test_each_position_is_learnt() -> None:
    """The first token of a draft is often the hard one: 2,000 blocks tell its rate from the others'."""
    alphas = [0.45, 0.7, 0.7, 0.7]
    estimates, doubt, _ = fed(AcceptanceRates(0.9, POSITIONS), alphas, 2000).estimate(idle=1000)
    assert estimates == pytest.approx(alphas, abs=0.05)
    known = FADING**1000 * (DOUBT_TESTS + LONG_RUN_TESTS)  # long ago
    assert doubt == pytest.approx(np.sqrt(0.45 * 0.55 / known), rel=0.1)


def test_luck_moves_it_less_than_another_text_does() -> None:
    """At a rate of 0.6, no block within 400 makes the estimate leave 0.6 by 0.2; 80 of a text at 0.1 bring it below 0.35."""
    rates = fed(AcceptanceRates(0.6, POSITIONS), [0.6] * POSITIONS, 400)
    for seed in range(1, 401):
        fed(rates, [0.6] * POSITIONS, 1, seed)
        assert abs(rates.estimate()[0][0] - 0.6) < 0.2
    assert fed(rates, [0.1] * POSITIONS, 80, 7).estimate()[0][0] < 0.35


def test_what_was_recent_fades_while_nothing_is_tested() -> None:
    """A hard stretch ends drafting; plain steps later the long run speaks again, and doubt has grown."""
    rates = fed(AcceptanceRates(0.8, POSITIONS), [0.8] * POSITIONS, 500)
    fed(rates, [0.05] * POSITIONS, 80, 1)
    (now, *_), doubt, _ = rates.estimate()
    (later, *_), later_doubt, _ = rates.estimate(idle=200)
    assert now < 0.5 < 0.65 < later
    assert later_doubt > doubt


def test_what_was_tested_often_is_explored_but_doubted_in_this_text() -> None:
    """Every text may be another one. What all together are like is known ever better, and less again where nothing is tested."""
    rates = AcceptanceRates(0.5, POSITIONS)
    assert rates.estimate().unexplored == rates.estimate().doubt
    few = fed(rates, [0.5] * POSITIONS, 20).estimate()
    many = fed(rates, [0.5] * POSITIONS, 1000).estimate()
    assert many.unexplored < 0.4 * few.unexplored
    assert many.unexplored < 0.4 * many.doubt
    assert rates.estimate(idle=2000).unexplored > 2.0 * many.unexplored


def test_a_reply_of_which_all_was_accepted_does_not_speak_for_the_next() -> None:
    """It may be of another kind: half of what it moved the estimate by is taken back, and the doubt has grown."""
    rates = fed(AcceptanceRates(0.5, POSITIONS), [0.5] * POSITIONS, 500)
    before = rates.estimate()[0][0]
    fed(rates, [1.0] * POSITIONS, 10, 1)
    (during, *_), doubt, _ = rates.estimate()
    rates.begin()
    (after, *_), later_doubt, _ = rates.estimate()
    assert before + 0.1 < during
    assert before < after < before + 0.75 * (during - before)
    assert later_doubt > doubt


@pytest.mark.parametrize("guess", [0.0, 1.0])
def test_nothing_is_ever_certain(guess: float) -> None:
    rates = AcceptanceRates(guess, POSITIONS)
    for _ in range(500):
        rates.learn([(POSITIONS, POSITIONS if guess else 0)], 0)
    estimates, doubt, _ = rates.estimate()
    assert all(0.0 < estimate < 1.0 for estimate in estimates)
    assert doubt > 0.0
