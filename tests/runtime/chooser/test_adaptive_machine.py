"""The schedule on a machine that is not what was measured: faster, slower, slow for a while, with other costs of one size."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_runtime.chooser.adaptive import CHECKING_STEPS, HELD, Adaptive
from edgespec_runtime.decoding.schedule import Fixed, Outcome
from simulated_machine import (
    DEAR,
    FLAT,
    MEASURED,
    SAW,
    SLOW,
    STEEP,
    STEP,
    TINY,
    Machine,
    Padded,
    after_plain_steps,
    costs_of,
    seconds_of,
)


@pytest.mark.parametrize("slowness", [0.2, 2.0, 5.0])
def test_a_machine_faster_or_slower_than_calibrated_changes_nothing(slowness: float) -> None:
    costs = costs_of(STEEP, 0.1)
    machine = Machine(costs, lambda _: 0.3, slowness)
    plain = seconds_of(machine, Fixed(0))
    for mine, slow in zip(seconds_of(machine, Adaptive(costs, 0.8)), plain, strict=True):
        assert mine <= 1.02 * slow


@pytest.mark.parametrize("turns", [20, 40, 80])
@pytest.mark.parametrize("alpha", [0.45, 0.6])
def test_a_slow_moment_is_no_loss_of_drafting(turns: float, alpha: float) -> None:
    """The machine is slow for every draft and plain step of a while. What drafts take then must not end drafting."""
    costs = costs_of(FLAT, 0.15)
    machine = Machine(costs, lambda _: alpha, turns=turns)
    best = min(sum(seconds_of(machine, Fixed(length), 256, 64)) for length in range(1, 5))
    assert sum(seconds_of(machine, Adaptive(costs, alpha), 256, 64)) <= 1.045 * best


def test_well_known_drafts_that_turn_slow_are_held_against_plain_steps() -> None:
    """Two of them, soon: they tell whether all is slow or drafting alone. While nothing turns slow there are none."""
    costs = costs_of(FLAT, 0.1)
    schedule = after_plain_steps(costs, 0.8)
    lengths, turn = [], 60
    for block in range(turn + 2 * HELD):
        slowness = SLOW if block >= turn else 1.0
        length = schedule.draft_length(100, 100)
        drafting = slowness * length * costs.draft(100)
        verifying = slowness * costs.verify(length + 1, 100)
        kept = max(0, length - 1)
        outcome = (100, length, kept, kept + 1, length + 1, drafting, verifying, drafting + verifying)
        schedule.observe(Outcome(*outcome))
        lengths.append(length)
    assert min(lengths[turn - 2 * HELD : turn]) > 0
    assert lengths[turn:].count(0) == CHECKING_STEPS


def test_what_a_drafter_missed_is_no_surprise_twice() -> None:
    """It reads the plain steps before its draft first: a try late in a reply costs several steps, and is left alone then."""
    costs = costs_of(FLAT, 0.1)
    machine = Machine(costs, lambda _: 0.02, catch_up=STEP / 20)
    plain = seconds_of(machine, Fixed(0))
    for mine, slow in zip(seconds_of(machine, Adaptive(costs, 0.3))[1:], plain[1:], strict=True):
        assert mine <= 1.02 * slow


def test_wrong_costs_of_one_size_are_found_out() -> None:
    """Calibrated while passes of two looked cheap, or plain steps dear: what they really take is learnt, and plain steps win."""
    machine = Machine(costs_of(STEEP, 0.1), lambda _: 0.6)
    plain = seconds_of(machine, Fixed(0))
    for wrong in ([1.0, 1.05, *STEEP[2:]], [1.6, *STEEP[1:]]):
        schedule = Adaptive(costs_of(wrong, 0.1), 0.6)
        taken = seconds_of(machine, schedule)
        assert schedule.draft_length(100, 100) == 0
        assert sum(taken) <= 1.02 * sum(plain)


def test_a_drafter_that_never_pays_is_not_tried_for_ever() -> None:
    """It was measured faster than it is, so its drafts seem worth another try: for 1 % of the time at most, over 1,000 replies
    of ten tokens. The schedule of 88afc34 lost 1.8 % for ever."""
    machine = Machine(costs_of(TINY, 0.5), lambda _: 0.5)
    plain = sum(seconds_of(machine, Fixed(0), 1000, 10))
    assert sum(seconds_of(machine, Adaptive(costs_of(TINY, 0.28), 0.6), 1000, 10)) <= 1.01 * plain


def test_a_drafter_that_is_slower_than_measured_but_pays_is_found_out() -> None:
    """Trying lengths that do not pay must leave enough to learn that the shortest one does."""
    real = costs_of(TINY, 0.4)
    machine = Machine(real, lambda _: 0.7)
    plain, best = (sum(seconds_of(machine, Padded(length, real), 1000, 10)) for length in (0, 1))
    assert plain > 1.03 * best
    assert sum(seconds_of(machine, Adaptive(costs_of(TINY, 0.28), 0.6), 1000, 10)) <= 1.015 * best


@pytest.mark.parametrize("alpha", [0.4, 0.55, 0.75, 0.9])
@pytest.mark.parametrize("verify", [FLAT, MEASURED])
def test_costs_that_are_a_tenth_off_are_found_out(verify: list[float], alpha: float) -> None:
    """Two quick measurements differ by that much; a length whose pass seems too dear is tried all the same."""
    costs = costs_of(verify, 0.04)
    machine = Machine(costs, lambda _: alpha)
    best = min(sum(seconds_of(machine, Fixed(length))) for length in range(9))
    behind = []
    for seed in range(8):
        errors = np.exp(0.1 * np.random.default_rng(seed).standard_normal(len(verify) - 1))
        wrong = [1.0, *(each * error for each, error in zip(verify[1:], errors, strict=True))]
        behind.append(sum(seconds_of(machine, Adaptive(costs_of(wrong, 0.04), 0.6))) / best)
    assert np.mean(behind) <= 1.058
    assert max(behind) <= 1.075


@pytest.mark.parametrize("alpha", [0.4, 0.45, 0.5])
def test_costs_that_are_a_tenth_off_make_no_reply_slow(alpha: float) -> None:
    """Drafts that hardly pay, a failed one losing a third of a step and more: plain steps must not seem slower than they are."""
    costs = costs_of(DEAR, 0.13)
    machine = Machine(costs, lambda _: alpha)
    plain = seconds_of(machine, Fixed(0), 32, 64)
    for seed in range(8):
        errors = np.exp(0.1 * np.random.default_rng(seed).standard_normal(len(DEAR) - 1))
        wrong = [1.0, *(each * error for each, error in zip(DEAR[1:], errors, strict=True))]
        for mine, slow in zip(
            seconds_of(machine, Adaptive(costs_of(wrong, 0.13), 0.6), 32, 64), plain, strict=True
        ):
            assert mine <= 1.02 * slow


@pytest.mark.parametrize(("replies", "tokens"), [(200, 20), (20, 200)])
@pytest.mark.parametrize("alpha", [0.4, 0.55, 0.75, 0.9])
def test_replies_fall_on_fast_and_slow_moments(alpha: float, replies: int, tokens: int) -> None:
    """By a fifth, more than lengths differ, and measured costs are off by a twentieth: no length seems good or bad for that."""
    machine = Machine(costs_of(MEASURED, 0.04), lambda _: alpha, moments=0.2)
    best = min(sum(seconds_of(machine, Fixed(length), replies, tokens)) for length in range(9))
    behind = []
    for seed in range(4):
        errors = np.exp(0.05 * np.random.default_rng(seed).standard_normal(len(MEASURED) - 1))
        told = [1.0, *(each * error for each, error in zip(MEASURED[1:], errors, strict=True))]
        taken = seconds_of(machine, Adaptive(costs_of(told, 0.04), 0.6), replies, tokens)
        behind.append(sum(taken) / best)
    assert max(behind) <= 1.07


def test_a_saw_tooth_is_used() -> None:
    """Four tokens cost less than two or three: drafts of three, and a single token is never padded to four."""
    schedule = after_plain_steps(costs_of(SAW, 0.02), 0.7)
    assert schedule.draft_length(100, 100) == 3
    assert [schedule.pass_length(count, 100) for count in (1, 2, 3, 4, 20)] == [1, 4, 4, 4, 20]


def test_a_plain_step_may_be_a_longer_pass() -> None:
    """Where two tokens cost less than one, plain steps take a pass of two, and gains are measured by those."""
    schedule = after_plain_steps(costs_of([1.5, *FLAT[:15]], 0.02), 0.7)
    assert schedule.pass_length(1, 100) == 2
    assert schedule.draft_length(100, 100) >= 3


def test_the_cold_step_after_a_prompt_does_not_speak_for_all() -> None:
    """It takes 1.4 times as long as the others, by which drafts of one would seem to pay; they lose a tenth."""
    costs = costs_of(STEEP, 0.05)
    schedule = Adaptive(costs, 0.55)
    drafted = 0
    for block in range(60):
        length = schedule.draft_length(50 + block, 60 - block)
        drafting, verifying = length * costs.draft(50), costs.verify(length + 1, 50) * (1 if block else 1.4)
        seconds = drafting + verifying
        accepted = min(length, block % 2)
        schedule.observe(
            Outcome(50 + block, length, accepted, accepted + 1, length + 1, drafting, verifying, seconds)
        )
        drafted += length > 0
    assert drafted <= 1


def test_a_length_that_was_slow_once_is_tried_again() -> None:
    """Passes of more than two tokens take four times as long for a while: no long drafts then, and long ones afterwards."""
    costs = costs_of(FLAT, 0.02)
    accepts = np.random.default_rng(0).random((400, 16)) < 0.8
    schedule = after_plain_steps(costs, 0.8)
    lengths = []
    for block, accepting in enumerate(accepts):
        length = schedule.draft_length(100, 100)
        accepted = length if accepting[:length].all() else int(accepting[:length].argmin())
        slow = 4.0 if block < 30 and length > 1 else 1.0
        drafting, verifying = length * costs.draft(100), slow * costs.verify(length + 1, 100)
        seconds = drafting + verifying
        schedule.observe(
            Outcome(100, length, accepted, accepted + 1, length + 1, drafting, verifying, seconds)
        )
        lengths.append(length)
    assert max(lengths[10:28]) <= 2
    assert np.mean(np.array(lengths[200:]) >= 4) > 0.9


def test_drafts_that_were_slow_beside_another_program_are_tried_again_when_it_has_gone() -> None:
    """They are left while they do not pay. Plain steps alone never tell that they do again, so what was learnt fades."""
    costs = costs_of(FLAT, 0.1)
    drafted = np.zeros((12, 1200))
    for seed, blocks in enumerate(drafted):
        accepts = np.random.default_rng(seed).random((1200, 16)) < 0.4
        schedule = Adaptive(costs, 0.4)
        for block, accepting in enumerate(accepts):
            if block % 60 == 0:
                schedule.begin()
            length = schedule.draft_length(100, 60)
            accepted = length if accepting[:length].all() else int(accepting[:length].argmin())
            slow = 2.0 if 180 <= block < 480 and length else 1.0
            drafting, verifying = slow * length * costs.draft(100), slow * costs.verify(length + 1, 100)
            seconds = drafting + verifying
            outcome = Outcome(100, length, accepted, accepted + 1, length + 1, drafting, verifying, seconds)
            schedule.observe(outcome)
            blocks[block] = length > 0
    # A reply whose first drafts fail may go on plainly; none of the twelve chats must go on so.
    assert drafted[:, :180].mean() > 0.9
    assert drafted[:, 180:480].mean() < 0.1
    assert drafted[:, 600:].mean() > 0.9
    assert drafted[:, 600:].mean(axis=1).min() > 0.6
