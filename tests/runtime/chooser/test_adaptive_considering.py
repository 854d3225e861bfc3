"""When the schedule considers a draft length: it takes microseconds, so a length is kept and plain steps come in rests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from edgespec_runtime.chooser.acceptance_rates import AcceptanceRates
from edgespec_runtime.chooser.adaptive import HELD, Adaptive
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule
from simulated_machine import FLAT, STEEP, STEP, Machine, after_plain_steps, costs_of


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


@pytest.mark.parametrize(("accepted", "blocks"), [(1, HELD), (0, 3)])
def test_a_length_is_kept_while_it_wins(accepted: int, blocks: int, considered: list[int]) -> None:
    """Drafts of a third of a step: a reply may lose three, and after these it is thought over."""
    costs = costs_of([1.0] * 16, 0.33)
    schedule = after_plain_steps(costs, 0.6)

    def block(kept: int) -> None:
        assert schedule.draft_length(100, 1) == 1
        drafting = costs.draft(100)
        schedule.observe(Outcome(100, 1, kept, kept + 1, 2, drafting, STEP, drafting + STEP))

    for place in range(32):  # a reply of 62 tokens: short ones would leave the next one a part of their share
        block(int(place % 16 > 0))
    schedule.begin()
    considered.clear()
    for _ in range(blocks):
        block(accepted)
    assert len(considered) == 1
    schedule.draft_length(100, 1)
    assert len(considered) == 2


def test_short_replies_of_plain_steps_are_not_considered_one_by_one(considered: list[int]) -> None:
    """A new reply's empty account changes nothing where plain steps were chosen with one."""
    schedule = Adaptive(costs_of(STEEP, 0.5), 0.4)
    replies, tokens = 64, 10
    for _ in range(replies):
        schedule.begin()
        for token in range(tokens):
            assert schedule.draft_length(50 + token, tokens - token) == 0
            schedule.observe(Outcome(50 + token, 0, 0, 1, 1, 0.0, STEP, STEP))
    assert 2 <= len(considered) <= replies * tokens / 24


def considered_at(step: float, seconds: Callable[[int], float], considered: list[int]) -> list[int]:
    """The plain steps before which drafting was considered, which took `seconds` of its number. No draft pays."""
    schedule = Adaptive(Costs((32, 1024), (tuple(step * v for v in STEEP),) * 2, (0.5 * step,) * 2), 0.5)
    at: list[int] = []
    for block in range(1500):
        before = len(considered)
        schedule.draft_length(40, 400)
        choosing = 0.0
        if len(considered) > before:
            choosing = seconds(len(at))
            at.append(block)
        schedule.observe(Outcome(40, 0, 0, 1, 1, 0.0, step, step, choosing))
    return at


@pytest.mark.parametrize(("step", "least", "most"), [(2e-4, 58, 62), (1e-5, 512, 512), (1e-2, 32, 32)])
def test_considering_takes_a_small_share_of_short_steps(
    step: float, least: int, most: int, considered: list[int]
) -> None:
    """It takes 30 us here: 60 steps of 0.2 ms make that a quarter of a percent; 512 are the longest rest, 32 the usual one."""
    at = considered_at(step, lambda _: 3e-5, considered)
    assert least <= at[-1] - at[-2] <= most


def test_one_slow_moment_of_considering_makes_no_long_rest(considered: list[int]) -> None:
    """Another program's turn, 5 ms instead of 30 us."""
    at = considered_at(2e-4, lambda time: 5e-3 if time == 12 else 3e-5, considered)
    assert 60 < np.diff(at)[12:].max() <= 90


@pytest.mark.parametrize(("step", "most"), [(2e-2, 1.4), (3e-4, 0.4)])
def test_where_blocks_are_short_a_length_is_kept_through_short_replies(
    step: float, most: float, considered: list[int]
) -> None:
    """Replies of four blocks that win: each is thought over where a block takes 20 ms, one in three where it takes 0.4 ms."""
    costs = costs_of(FLAT, 0.1, step)
    schedule = Adaptive(costs, 0.8)
    drafted, replies = 0, 60
    for reply in range(replies):
        schedule.begin()
        if reply == replies // 2:
            considered.clear()
            drafted = 0
        for block in range(4):
            before = len(considered)
            length = schedule.draft_length(100 + block, 100)
            choosing = 5e-5 * (len(considered) - before)
            drafting, verifying = length * costs.draft(100), costs.verify(length + 1, 100)
            accepted, seconds = min(length, 2), drafting + verifying
            schedule.observe(
                Outcome(
                    100 + block,
                    length,
                    accepted,
                    accepted + 1,
                    length + 1,
                    drafting,
                    verifying,
                    seconds,
                    choosing,
                )
            )
            drafted += length > 0
    assert drafted >= 0.95 * 4 * replies / 2  # else a plain step shows now and then what it takes
    assert 1 <= len(considered) <= most * replies / 2


def test_where_considering_is_dear_a_reply_that_lost_all_it_may_is_plain_to_its_end(
    considered: list[int],
) -> None:
    """It is not considered whether more may be lost; the next reply drafts at once, from what the others have left."""
    costs = costs_of(FLAT, 0.4, 3e-4)
    schedule = Adaptive(costs, 0.8, most=1)

    def reply(accepts: bool) -> list[int]:
        schedule.begin()
        lengths = []
        for block in range(16):
            before = len(considered)
            length = schedule.draft_length(100 + block, 100)
            drafting, verifying = length * costs.draft(100), costs.verify(length + 1, 100)
            kept, choosing = accepts * length, 1.5e-4 * (len(considered) - before)
            seconds = drafting + verifying
            schedule.observe(
                Outcome(100, length, kept, kept + 1, length + 1, drafting, verifying, seconds, choosing)
            )
            lengths.append(length)
        return lengths

    for _ in range(20):
        before = len(considered)
        reply(True)
        if len(considered) > before > 4:  # newly considered, for many blocks
            break
    considered.clear()
    failing = reply(False)
    assert 4 <= sum(failing) <= 12
    assert failing[-1] == 0
    assert reply(True)[0] == 1
    assert considered == []


def test_considering_that_takes_a_good_part_of_a_step_does_not_use_up_what_may_be_lost(
    considered: list[int],
) -> None:
    """Two fifths of a step, as on a Xeon between two passes, in replies of ten tokens that may lose half of that. Considered in
    nearly every reply it left nothing for drafts in 16 of these 24 starts: the schedule of 0ed69ac was 12 % behind."""
    step = 3.3e-4
    costs = costs_of([1, 1.05, 1.15, 1.25, 1.45, 1.55, 1.7, 1.8, *[2] * 8], 0.25, step)

    def choosing() -> float:
        taken = 1.4e-4 * len(considered)
        considered.clear()
        return taken

    def seconds(make: Callable[[], Schedule]) -> float:
        taken = 0.0
        for start in range(24):
            rates = np.clip(0.52 + 0.2 * np.random.default_rng(start).standard_normal(64), 0.02, 0.98)
            schedule = make()
            for reply, rate in enumerate(rates):
                schedule.begin()
                machine = Machine(costs, lambda _, rate=rate: rate, choosing=choosing)
                taken += machine.reply(schedule, 10, 1000 * start + reply)
        return taken

    best = min(seconds(lambda length=length: Fixed(length)) for length in range(4))
    assert seconds(lambda: Adaptive(costs, 0.52)) <= 1.08 * best
