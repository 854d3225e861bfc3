"""The schedule against a simulated machine and drafter: never much slower than plain decoding, near the best fixed draft length.

Seconds are simulated, so nothing here depends on this machine; every random number has a fixed seed.
"""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_runtime.acceptance_rates import AcceptanceRates
from edgespec_runtime.adaptive import CHECKING_STEPS, HELD, Adaptive
from edgespec_runtime.pass_costs import Costs
from edgespec_runtime.schedule import Fixed, Outcome
from simulated_machine import (
    FLAT,
    SAW,
    SHAPES,
    SLOW,
    STEEP,
    STEP,
    Machine,
    Padded,
    after_plain_steps,
    costs_of,
    seconds_of,
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("guess", [0.3, 0.8])
def test_near_the_best_fixed_length_and_never_much_slower_than_plain(
    shape: str, draft: float, alpha: float, guess: float
) -> None:
    costs = costs_of(SHAPES[shape], draft)
    machine = Machine(costs, lambda _: alpha)
    adaptive = seconds_of(machine, Adaptive(costs, guess))
    fixed = [seconds_of(machine, Padded(length, costs)) for length in range(9)]
    assert sum(adaptive) <= 1.05 * min(map(sum, fixed))
    assert all(mine <= 1.02 * plain for mine, plain in zip(adaptive, fixed[0], strict=True))


@pytest.mark.parametrize(("draft", "alpha"), [(0.1, 0.6), (0.1, 0.75), (0.4, 0.75)])
@pytest.mark.parametrize("shape", ["flat", "saw-tooth"])
def test_other_programs_turns_lock_it_into_no_length(shape: str, draft: float, alpha: float) -> None:
    """One pass in twenty takes twice as long: what it makes a length look like must not stay. Counted are the other passes."""
    costs = costs_of(SHAPES[shape], draft)
    machine = Machine(costs, lambda _: alpha, hiccups=0.05)
    adaptive = seconds_of(machine, Adaptive(costs, 0.6))
    fixed = [seconds_of(machine, Padded(length, costs)) for length in range(9)]
    assert sum(adaptive) <= 1.05 * min(map(sum, fixed))
    assert all(mine <= 1.02 * plain for mine, plain in zip(adaptive, fixed[0], strict=True))


def test_it_follows_a_text_that_turns() -> None:
    """Easy and hard stretches: better than the best fixed length, which must compromise."""
    costs = costs_of(SAW, 0.05)
    machine = Machine(costs, lambda emitted: 0.9 if emitted // 200 % 2 else 0.05)
    adaptive = sum(seconds_of(machine, Adaptive(costs, 0.5), tokens=800))
    assert adaptive < min(sum(seconds_of(machine, Padded(length, costs), tokens=800)) for length in range(9))


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


@pytest.fixture
def considered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for every time that a length is considered, which takes microseconds."""
    times: list[int] = []
    estimate = AcceptanceRates.estimate
    monkeypatch.setattr(AcceptanceRates, "estimate", lambda *given: times.append(1) or estimate(*given))
    return times


def test_a_length_is_kept_for_some_blocks_and_no_longer(considered: list[int]) -> None:
    """After drafts that were accepted it is considered in one block of HELD, or where the room ends."""
    costs = costs_of(FLAT, 0.1)
    schedule = after_plain_steps(costs, 0.8)
    times, lengths = [], []
    for _ in range(38):
        length = schedule.draft_length(100, 100)
        drafting, verifying = length * costs.draft(100), costs.verify(length + 1, 100)
        seconds = drafting + verifying
        schedule.observe(Outcome(100, length, length, length + 1, length + 1, drafting, verifying, seconds))
        lengths.append(length)
        times.append(len(considered))
    later = np.flatnonzero(np.diff(times[20:]))
    assert len(later) >= 3
    assert np.diff(later).tolist() == [HELD] * (len(later) - 1)
    assert min(lengths[20:]) == 8
    assert [schedule.draft_length(100, room) for room in (3, 2, 1, 0)] == [3, 2, 1, 0]


@pytest.mark.parametrize(("accepted", "blocks"), [(1, HELD), (0, 1)])
def test_a_length_is_kept_while_it_wins(accepted: int, blocks: int, considered: list[int]) -> None:
    """Drafts of a third of a step: HELD that fail would cost more than a reply may lose, so one that fails is thought over."""
    costs = costs_of([1.0] * 16, 0.33)
    schedule = after_plain_steps(costs, 0.6)

    def block(kept: int) -> None:
        assert schedule.draft_length(100, 1) == 1
        drafting = costs.draft(100)
        schedule.observe(Outcome(100, 1, kept, kept + 1, 2, drafting, STEP, drafting + STEP))

    for place in range(24):
        block(int(place % 4 > 0))
    schedule.begin()
    considered.clear()
    for _ in range(blocks):
        block(accepted)
    assert len(considered) == 1
    schedule.draft_length(100, 1)
    assert len(considered) == 2


def test_replies_too_short_for_a_draft_are_not_considered_one_by_one(considered: list[int]) -> None:
    """A new reply's empty account changes nothing where plain steps were chosen with one."""
    schedule = Adaptive(costs_of(FLAT, 0.5), 0.4)
    replies, tokens = 64, 10
    for _ in range(replies):
        schedule.begin()
        for token in range(tokens):
            assert schedule.draft_length(50 + token, tokens - token) == 0
            schedule.observe(Outcome(50 + token, 0, 0, 1, 1, 0.0, STEP, STEP))
    assert 2 <= len(considered) <= replies * tokens / 24


@pytest.mark.parametrize(("step", "least", "most"), [(1e-4, 50, 70), (1e-5, 100, 140), (1e-2, 8, 9)])
def test_considering_takes_a_small_share_of_short_steps(
    step: float, least: int, most: int, considered: list[int]
) -> None:
    """It takes 30 us here, and no draft pays: 60 steps of 0.1 ms make that half a percent; a rest of 128 is the longest."""
    schedule = Adaptive(Costs((32, 1024), (tuple(step * v for v in STEEP),) * 2, (0.5 * step,) * 2), 0.5)
    blocks = []
    for block in range(200):
        before = len(considered)
        schedule.draft_length(40, 400)
        choosing = 3e-5 * (len(considered) - before)
        blocks += [block] * (len(considered) - before)
        schedule.observe(Outcome(40, 0, 0, 1, 1, choosing, step, step + choosing))
    assert least <= blocks[1] - blocks[0] <= most


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


def test_room_bounds_the_draft() -> None:
    schedule = after_plain_steps(costs_of(FLAT, 0.01), 0.95)
    assert schedule.draft_length(100, 100) == 8
    assert schedule.draft_length(100, 2) == 2
    assert schedule.draft_length(100, 0) == 0


def test_no_draft_where_no_pass_of_two_was_measured() -> None:
    """A context of two tokens has room for plain steps only."""
    schedule = after_plain_steps(Costs((1,), ((STEP,),), (0.1 * STEP,)), 0.9)
    assert [schedule.draft_length(1, 0) for _ in range(40)] == [0] * 40


@pytest.mark.parametrize(("draft", "later"), [(0.25, 0), (0.3, 16)])
def test_what_a_reply_lost_is_forgiven_in_the_next(draft: float, later: int) -> None:
    """Rejected blocks end drafting within a reply; a new reply may try again, with a dearer drafter after some plain steps."""
    costs = costs_of(FLAT, draft)
    schedule = after_plain_steps(costs, 0.4)
    tries = 0
    while length := schedule.draft_length(50, 50):
        drafting, verifying = length * costs.draft(50), costs.verify(length + 1, 50)
        schedule.observe(Outcome(50, length, 0, 1, length + 1, drafting, verifying, drafting + verifying))
        tries += 1
    assert 1 <= tries <= 3
    schedule.begin()
    for _ in range(later):
        if schedule.draft_length(50, 50):
            break
        schedule.observe(Outcome(50, 0, 0, 1, 1, 0.0, costs.verify(1, 50), costs.verify(1, 50)))
    assert schedule.draft_length(50, 50) > 0


def test_after_a_draft_that_failed_shorter_ones_are_tried() -> None:
    """Two long ones would use up what a reply may lose; a text whose first tokens are hard would go on plainly to its end."""
    costs = costs_of(FLAT, 0.1)
    known = Machine(costs, lambda _: 0.75)
    schedule = Adaptive(costs, 0.75)
    for seed in range(10):
        schedule.begin()
        known.reply(schedule, 64, seed)
    schedule.begin()
    lengths = []
    while length := schedule.draft_length(50, 50):
        drafting, verifying = length * costs.draft(50), costs.verify(length + 1, 50)
        schedule.observe(Outcome(50, length, 0, 1, length + 1, drafting, verifying, drafting + verifying))
        lengths.append(length)
    assert lengths[0] >= 4
    assert len(lengths) >= 4
    assert max(lengths[1:]) <= lengths[0] // 2


@pytest.mark.parametrize(("tokens", "bound"), [(64, 1.02), (120, 1.05)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.6, 0.75, 0.9])
def test_a_text_of_which_the_drafter_knows_nothing_after_one_it_knows(
    alpha: float, draft: float, shape: str, tokens: int, bound: float
) -> None:
    """What earlier replies promised is not believed for long, and least where few tokens may follow."""
    costs = costs_of(SHAPES[shape], draft)
    known, unknown = Machine(costs, lambda _: alpha), Machine(costs, lambda _: 0.02)
    schedule = Adaptive(costs, alpha)
    for seed in range(10):
        schedule.begin()
        known.reply(schedule, tokens, seed)
        schedule.begin()
        taken = unknown.reply(schedule, tokens, 100 + seed)
        assert taken <= bound * unknown.reply(Fixed(0), tokens, 100 + seed)


def test_a_drafter_that_ends_every_draft_at_once_is_left_alone() -> None:
    """Confidence stop: the draft is empty, its time is lost, and plain decoding is never much slower for it."""
    costs = costs_of(FLAT, 0.3)
    schedule = after_plain_steps(costs, 0.8)
    asked, spent, steps = 0, 0.0, 300
    for position in range(steps):
        drafting = costs.draft(50) if schedule.draft_length(50 + position, steps - position) else 0.0
        asked += drafting > 0
        seconds = drafting + costs.verify(1, 50)
        schedule.observe(Outcome(50 + position, 0, 0, 1, 1, drafting, costs.verify(1, 50), seconds))
        spent += seconds
    assert asked >= 1
    assert spent <= 1.02 * steps * costs.verify(1, 50)


def test_prompt_lookup_may_find_nothing_most_of_the_time() -> None:
    """Looking costs microseconds, so misses are no reason to stop: with hits in one block of five, all that is found is tried."""
    costs = Costs((32, 1024), (tuple(STEP * v for v in FLAT),) * 2, (0.0, 0.0))
    schedule = after_plain_steps(costs, 0.7)
    asked, looking, blocks = 0, 2e-5, 200
    for block in range(blocks):
        length = schedule.draft_length(100, 100)
        asked += length > 0
        drafted = length if block % 5 == 0 else 0
        accepted = drafted if block % 15 else 0
        verifying = costs.verify(drafted + 1, 100)
        outcome = Outcome(
            100, drafted, accepted, accepted + 1, drafted + 1, looking, verifying, looking + verifying
        )
        schedule.observe(outcome)
    assert asked > 0.9 * blocks
