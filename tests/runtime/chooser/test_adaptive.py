"""The chosen draft length: the formula by brute force, the guard, and whole sessions on a simulated clock."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from edgespec_runtime.chooser.adaptive import (
    BLOCKS_PER_CHOICE,
    FIRST_REST,
    FREE_LOSS,
    LONGEST_REST,
    LOSS_SHARE,
    REFRESH,
    AdaptiveSchedule,
    Guard,
)
from edgespec_runtime.chooser.expected_acceptance import AcceptanceRates
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import FROM_MODEL, LONG_COPY, SHORT_COPY, Fixed, Outcome, Schedule
from simulated_machine import DEAR, FLAT, MEASURED, SAW, STEEP, TINY, Machine, Padded, costs_of, seconds_of

CONTEXT, ROOM = 100, 1000
SHAPES = {"flat": FLAT, "measured": MEASURED, "dear": DEAR, "tiny": TINY, "saw-tooth": SAW, "steep": STEEP}


def step(
    schedule: AdaptiveSchedule, costs: Costs, accepted: Callable[[int], int], *, mixes: bool = False
) -> int:
    """One block at the table's costs; `accepted`: of so many draft tokens. Returns the draft length."""
    length = schedule.draft_length(CONTEXT, ROOM)
    size = schedule.pass_length(length + 1)
    drafting, passing, kept = (
        (length + mixes) * costs.at(CONTEXT).draft,
        costs.at(CONTEXT).verify(size),
        accepted(length),
    )
    schedule.observe(Outcome(length, kept, kept + 1, size, drafting, drafting + passing))
    return length


def nothing(length: int) -> int:
    return 0


def all_of_it(length: int) -> int:
    return length


def best_by_enumeration(costs: Costs, rate: float, most: int, mixes: bool) -> int:
    """argmax of expected tokens over seconds, the expectation over how many draft tokens stay."""
    found = {}
    for length in range(most + 1):
        chances = [rate**kept * (1 - rate) for kept in range(length)] + [rate**length]
        tokens = sum(chance * (kept + 1) for kept, chance in enumerate(chances))
        size = costs.at(CONTEXT).pass_length(length + 1)
        found[length] = tokens / ((length + mixes) * costs.at(CONTEXT).draft + costs.at(CONTEXT).verify(size))
    return max(found, key=lambda length: found[length])


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("draft", [0.02, 0.15, 0.4])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_length_is_the_best_one_of_the_table(shape: str, draft: float, mixes: bool) -> None:
    costs = costs_of(SHAPES[shape], draft)
    for rate in np.linspace(0.05, 0.95, 19):
        schedule = AdaptiveSchedule(costs, float(rate), 8, mixes=mixes)
        assert step(schedule, costs, nothing, mixes=mixes) == 0  # a session begins with a plain step
        assert schedule.draft_length(CONTEXT, ROOM) == best_by_enumeration(costs, float(rate), 8, mixes)


def test_a_rule_that_mixes_pays_for_the_drafter_in_plain_steps_too() -> None:
    """A slow drafter does not pay beside plain steps that are free of it. Beside plain steps that are not, it does."""
    costs = costs_of(FLAT, 0.6)
    lengths = []
    for mixes in (False, True):
        schedule = AdaptiveSchedule(costs, 0.5, mixes=mixes)
        step(schedule, costs, nothing, mixes=mixes)
        lengths.append(schedule.draft_length(CONTEXT, ROOM))
    assert lengths[0] == 0 < lengths[1]


def test_the_length_stays_for_some_blocks_and_never_exceeds_what_fits() -> None:
    costs = costs_of(FLAT, 0.02)
    schedule = AdaptiveSchedule(costs, 0.9, 6)
    step(schedule, costs, nothing)
    assert [step(schedule, costs, all_of_it) for _ in range(BLOCKS_PER_CHOICE)] == [6] * BLOCKS_PER_CHOICE
    for room in (3, 1, 0, -1):
        assert schedule.draft_length(CONTEXT, room) == max(0, room)
    assert (
        AdaptiveSchedule(Costs((32,), ((1.0,),), (0.1,)), 0.9).draft_length(CONTEXT, ROOM) == 0
    )  # no pass of two tokens


def test_one_plain_step_shows_now_and_then_what_it_takes() -> None:
    costs = costs_of(FLAT, 0.02)
    schedule = AdaptiveSchedule(costs, 0.9)
    lengths = [step(schedule, costs, all_of_it) for _ in range(3 * (REFRESH + 1))]
    assert [place for place, length in enumerate(lengths) if length == 0] == [
        n * (REFRESH + 1) for n in range(3)
    ]


def plain_runs(lengths: list[int]) -> list[int]:
    """How many plain steps came in a row, each time."""
    text = "".join("d" if length else "p" for length in lengths)
    return [len(run) for run in text.split("d") if run]


def test_drafts_that_never_pay_are_tried_ever_later() -> None:
    costs = costs_of(STEEP, 0.1)
    schedule = AdaptiveSchedule(costs, 0.5)
    runs = plain_runs([step(schedule, costs, nothing) for _ in range(10_000)])
    assert runs[:5] == [1 + FIRST_REST, 64, 128, LONGEST_REST, LONGEST_REST]


def test_drafts_that_pay_again_are_made_again_and_the_rests_are_short_again() -> None:
    costs = costs_of(FLAT, 0.1)
    schedule = AdaptiveSchedule(costs, 0.6)
    for _ in range(600):
        step(schedule, costs, nothing)
    good = [step(schedule, costs, all_of_it) for _ in range(LONGEST_REST + 200)]
    assert sum(length > 0 for length in good[-100:]) >= 98
    bad = plain_runs([step(schedule, costs, nothing) for _ in range(200)])
    assert FIRST_REST in bad


def test_a_reply_on_which_drafts_fail_does_not_keep_them_from_the_next_ones() -> None:
    """First nothing is accepted, for some replies; then as much as the evaluation said, and that pays."""
    costs, draws = costs_of([1, 1.26, 1.45, 1.55, 1.67, 1.78, 1.9, 2, 2.2], 0.1), np.random.default_rng(0)
    schedule = AdaptiveSchedule(costs, 0.55)
    for _ in range(500):
        step(schedule, costs, nothing)
    lengths = [
        step(schedule, costs, lambda length: int((draws.random(length) < 0.55).cumprod().sum()))
        for _ in range(1000)
    ]
    assert sum(length > 0 for length in lengths) > 600


def copying(
    schedule: AdaptiveSchedule,
    costs: Costs,
    origins: tuple[int, ...],
    rates: dict[int, float],
    draws: np.random.Generator,
) -> tuple[int, int]:
    """One block of whoever is chosen among `origins`; each accepts at its own rate. Returns (its origin, its draft length)."""
    length = schedule.draft_length(CONTEXT, ROOM, origins)
    origin, size = schedule.origin, schedule.pass_length(length + 1)
    passed = draws.random(length) < rates.get(origin, 0.0)
    kept = length if passed.all() else int(passed.argmin())
    drafting = length * costs.at(CONTEXT).draft * (origin == FROM_MODEL)
    passing = costs.at(CONTEXT).verify(size)
    outcome = Outcome(length, kept, kept + 1, size, drafting, drafting + passing)
    schedule.observe(outcome._replace(origin=origin))
    return origin, length


def test_a_reply_that_ends_within_a_draft_rejects_nothing() -> None:
    """The second of three draft tokens ended it: the third was not tested."""
    costs, wanted = costs_of(FLAT, 0.1), AcceptanceRates(0.5, 8)
    schedule = AdaptiveSchedule(costs, 0.5, 8)
    step(schedule, costs, nothing)  # plain, so nothing is learnt
    assert schedule.draft_length(CONTEXT, ROOM) > 0
    schedule.observe(Outcome(3, 2, 2, 4, 0.006, 0.03))
    wanted.learn(2, 2)
    assert schedule.model.estimate() == wanted.estimate()
    assert schedule.model.estimate()[2] == schedule.model.estimate()[1] > 0.5


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({FROM_MODEL: 0.6, LONG_COPY: 0.9}, LONG_COPY),  # it stays more often, and costs nothing
        ({FROM_MODEL: 0.6, LONG_COPY: 0.6}, LONG_COPY),  # it costs nothing
        ({FROM_MODEL: 0.9, LONG_COPY: 0.1}, FROM_MODEL),
    ],
)
def test_who_drafts_is_who_gives_more_tokens_a_second(rates: dict[int, float], expected: int) -> None:
    costs, draws = costs_of(FLAT, 0.1), np.random.default_rng(0)
    schedule = AdaptiveSchedule(costs, 0.5)
    made = [copying(schedule, costs, (LONG_COPY, FROM_MODEL), rates, draws) for _ in range(400)]
    late = [origin for origin, length in made[200:] if length]
    assert late.count(expected) > 0.8 * len(late) > 100


def test_what_copies_do_says_nothing_of_the_model_nor_of_other_copies() -> None:
    """Copies that are always rejected: they rest, the model drafts as long as before, and copies after long matches too."""
    costs, draws = costs_of(FLAT, 0.1), np.random.default_rng(0)
    rates = {FROM_MODEL: 0.7, SHORT_COPY: 0.0, LONG_COPY: 0.9}
    schedule, alone = AdaptiveSchedule(costs, 0.5), AdaptiveSchedule(costs, 0.5)
    for block in range(600):
        offered = (SHORT_COPY, FROM_MODEL) if block % 2 else (LONG_COPY, FROM_MODEL)
        copying(schedule, costs, offered, rates, draws)
        copying(alone, costs, (FROM_MODEL,), rates, draws)
    made = [copying(schedule, costs, (SHORT_COPY, FROM_MODEL), rates, draws) for _ in range(60)]
    model = [length for origin, length in made if origin == FROM_MODEL and length]
    assert len(model) > 40
    assert abs(np.median(model) - alone.draft_length(CONTEXT, ROOM)) <= 1
    assert schedule.draft_length(CONTEXT, ROOM, (LONG_COPY, FROM_MODEL)) > np.median(model)
    assert schedule.origin == LONG_COPY


def test_the_model_rests_and_copies_go_on() -> None:
    """And what is said of it says both."""
    cheap, draws = costs_of(MEASURED, 0.1), np.random.default_rng(0)
    schedule = AdaptiveSchedule(cheap, 0.5)
    for _ in range(200):
        copying(schedule, cheap, (LONG_COPY, FROM_MODEL), {LONG_COPY: 0.9}, draws)
        copying(schedule, cheap, (FROM_MODEL,), {}, draws)
    assert schedule.off is not None
    assert schedule.off.startswith("off: a draft of ")
    assert schedule.off.endswith("; copies from the text go on")
    alone = AdaptiveSchedule(cheap, 0.5)
    for _ in range(200):
        copying(alone, cheap, (FROM_MODEL,), {}, draws)
    assert alone.off is not None
    assert "copies" not in str(alone.off)


def test_a_resting_model_is_still_the_one_that_is_asked() -> None:
    """A rule that mixes p and q asks it in plain steps too; asking who copied last would give that step another law."""
    costs, draws = costs_of(MEASURED, 0.1), np.random.default_rng(0)
    schedule = AdaptiveSchedule(costs, 0.5)
    for _ in range(200):
        copying(schedule, costs, (LONG_COPY,), {LONG_COPY: 0.9}, draws)
        copying(schedule, costs, (FROM_MODEL,), {}, draws)
    assert schedule.off is not None
    for context in range(10):
        schedule.draft_length(CONTEXT, ROOM, (LONG_COPY,))
        assert schedule.origin == LONG_COPY
        schedule.draft_length(CONTEXT, ROOM, (FROM_MODEL,))
        assert schedule.origin == FROM_MODEL, context


def test_where_nobody_can_draft_a_plain_step_is_made() -> None:
    costs = costs_of(FLAT, 0.1)
    schedule = AdaptiveSchedule(costs, 0.9)
    step(schedule, costs, nothing)
    assert schedule.draft_length(CONTEXT, ROOM, ()) == 0 == Fixed(4).draft_length(CONTEXT, ROOM, ())
    assert schedule.draft_length(CONTEXT, ROOM, (SHORT_COPY,)) > 0


def test_the_guard_stops_what_loses_too_much_of_the_session() -> None:
    guard = Guard()
    guard.add(50.0, 50.0)
    guard.add(4.0, 2.0)
    assert not guard.stops(1.0)  # FREE_LOSS plain steps may always be lost
    guard.add(1.0, 0.9)
    assert guard.lost > FREE_LOSS > LOSS_SHARE * guard.spent
    assert guard.stops(1.0)
    assert not guard.stops(2.0)
    guard.add(1000.0, 1000.0)  # of so long a session it is less than the share
    assert not guard.stops(1.0)
    guard.add(50.0, 0.0)
    assert guard.stops(1.0)
    guard.add(10.0, 60.0)  # what was won since makes it good
    assert not guard.stops(1.0)


def test_the_guard_ends_drafting_where_the_estimates_do_not() -> None:
    """Every block with a draft is held up by something that the factors call a hiccup: the table says that drafts pay."""
    costs = costs_of(FLAT, 0.02)
    schedule = AdaptiveSchedule(costs, 0.9)
    step(schedule, costs, nothing)
    lost, lengths = 0.0, []
    for _ in range(40):
        length = schedule.draft_length(CONTEXT, ROOM)
        lengths.append(length)
        size = schedule.pass_length(length + 1)
        usual = costs.at(CONTEXT).verify(size)
        lost += 19.0 * usual if length else 0.0
        choosing = 19.0 * usual if length else 0.0
        schedule.observe(Outcome(length, length, length + 1, size, 0.0, usual, choosing))
    assert lengths[:BLOCKS_PER_CHOICE] == [lengths[0]] * BLOCKS_PER_CHOICE
    assert set(lengths[BLOCKS_PER_CHOICE : BLOCKS_PER_CHOICE + FIRST_REST - 1]) == {0}
    assert lost > 0
    assert schedule.off is not None
    assert re.fullmatch(r"off for now: drafts have cost \d\d% of this session's time", schedule.off)


@pytest.mark.parametrize("shape", ["measured", "dear", "saw-tooth"])
def test_drafts_are_back_when_a_busy_machine_is_quiet_again(shape: str) -> None:
    """Another program slows a pass of several tokens more than a plain step. What it took then must not keep drafts off later."""
    costs, draws = costs_of(SHAPES[shape], 0.1), np.random.default_rng(0)
    schedule, drafted = AdaptiveSchedule(costs, 0.6), []
    for block in range(2400):
        length = schedule.draft_length(CONTEXT, ROOM)
        drafted.append(length > 0)
        size, kept = schedule.pass_length(length + 1), int((draws.random(length) < 0.6).cumprod().sum())
        slow = (2.5 if length else 1.5) if 600 <= block < 1000 else 1.0
        drafting, passing = slow * length * costs.at(CONTEXT).draft, slow * costs.at(CONTEXT).verify(size)
        schedule.observe(Outcome(length, kept, kept + 1, size, drafting, drafting + passing))
    assert np.mean(drafted[1200:]) > 0.95


def sessions(machine: Machine, make: Callable[[], Schedule]) -> np.ndarray:
    """Seconds of two sessions of ten replies of 128 tokens, each with a schedule of its own."""
    return np.array([sum(seconds_of(machine, make(), 10, 128, first=10 * n)) for n in range(2)])


@cache
def plainly(shape: str) -> np.ndarray:
    """Seconds of two plain sessions: no drafter is asked."""
    return sessions(Machine(costs_of(SHAPES[shape], 0.1), lambda _: 0.0), lambda: Fixed(0))


@cache
def best_fixed(shape: str, rate: float) -> float:
    """Seconds of two sessions together with the best length; a drafter step takes a tenth of a plain one."""
    costs = costs_of(SHAPES[shape], 0.1)
    machine = Machine(costs, lambda _: rate)
    return min(float(sessions(machine, lambda g=g: Padded(g, costs)).sum()) for g in range(1, 9))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rate", "guess"), [(0.1, 0.5), (0.5, 0.1), (0.5, 0.5), (0.5, 0.9), (0.9, 0.5), (0.9, 0.9)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_session_is_slower_than_plain_and_good_drafters_are_used(
    shape: str, rate: float, guess: float
) -> None:
    """Also where the first guess is far off. 3 % and 0.88 are the grid's (benchmarks/speed/schedule_grid.py)."""
    costs = costs_of(SHAPES[shape], 0.1)
    plain = plainly(shape)
    chosen = sessions(Machine(costs, lambda _: rate), lambda: AdaptiveSchedule(costs, guess))
    assert (chosen / plain).max() < 1.03
    assert min(plain.sum(), best_fixed(shape, rate)) / chosen.sum() > 0.88


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_a_table_that_is_a_tenth_off_loses_no_session(rate: float, seed: int) -> None:
    """One quick measurement differs from the next by so much, plain steps included."""
    for shape in SHAPES:
        costs = costs_of(SHAPES[shape], 0.1)
        off = np.exp(0.1 * np.random.default_rng(seed).standard_normal(costs.longest))
        seconds = np.array(costs.verify_seconds) * off
        told = replace(costs, verify_seconds=tuple(map(tuple, seconds.tolist())))
        chosen = sessions(Machine(costs, lambda _: rate), lambda told=told: AdaptiveSchedule(told, 0.6))  # type: ignore[misc]
        assert (chosen / plainly(shape)).max() < 1.03


@pytest.mark.parametrize(
    "trouble", [{"slowness": 1.5}, {"hiccups": 0.05}, {"turns": 200.0}, {"catch_up": 5e-4}]
)
def test_a_machine_that_is_not_the_measured_one(trouble: dict[str, float]) -> None:
    """Slower for good, slow now and then, slow in turns; and a drafter that must first read what plain steps wrote."""
    for shape in SHAPES.values():
        costs = costs_of(shape, 0.1)
        machine = Machine(costs, lambda _: 0.6, **trouble)
        plain = sessions(machine, lambda: Fixed(0))
        chosen = sessions(machine, lambda costs=costs: AdaptiveSchedule(costs, 0.6))  # type: ignore[misc]
        assert (chosen / plain).max() < 1.03
