"""A chosen draft length is kept for some blocks, and no longer than what was known of it holds."""

from __future__ import annotations

import math

import pytest
from edgespec_runtime.held_length import HELD, LONGEST_HELD, LOSING_STEPS, TRIED, HeldLength
from edgespec_runtime.running_costs import BUCKET

STEP, RISK = 0.02, 0.01


def chosen(budget: float = 1.0, enough: float = math.inf, length: int = 3) -> HeldLength:
    held = HeldLength()
    held.choose(length, HELD, 100, STEP, RISK, budget, enough)
    return held


@pytest.mark.parametrize(("blocks", "kept"), [(None, HELD), (0, HELD), (17, 17), (10**6, LONGEST_HELD)])
def test_it_is_kept_for_so_many_blocks(blocks: int | None, kept: int) -> None:
    held = chosen(budget=2 * RISK)
    if blocks is not None:
        held.go_on_for(blocks)
    assert [held.goes_on(100, 50) for _ in range(LONGEST_HELD)] == [
        n < kept for n in range(1, LONGEST_HELD + 1)
    ]


def test_a_try_is_kept_for_fewer() -> None:
    held = HeldLength()
    held.choose(3, TRIED, 100, STEP, RISK, 1.0, math.inf)
    assert [held.goes_on(100, 50) for _ in range(3)] == [True] * (TRIED - 1) + [False] * (4 - TRIED)


def test_no_draft_is_not_kept() -> None:
    assert not chosen(length=0).goes_on(100, 50)


@pytest.mark.parametrize(
    ("context", "room", "kept"),
    [
        (100 + BUCKET - 1, 3, True),
        (100 + BUCKET, 3, False),
        (101 - BUCKET, 3, True),
        (100 - BUCKET, 3, False),
        (100, 2, False),
    ],
)
def test_only_around_the_context_it_was_chosen_at_and_where_there_is_room(
    context: int, room: int, kept: bool
) -> None:
    assert chosen().goes_on(context, room) is kept


def test_it_ends_when_what_may_be_lost_bears_no_further_failure() -> None:
    held = chosen(budget=2 * RISK)
    held.tell(1)
    assert held.goes_on(100, 50)
    held.tell(1)
    assert not held.goes_on(100, 50)


def test_it_ends_when_what_was_won_pays_for_the_longer_one() -> None:
    held = chosen(budget=RISK, enough=5 * STEP)
    held.tell(4)
    assert held.goes_on(100, 50)
    held.tell(4)
    assert not held.goes_on(100, 50)


def test_what_many_blocks_won_is_not_all_lost_again() -> None:
    held = chosen()
    held.go_on_for(LONGEST_HELD)
    for _ in range(10):
        held.tell(4)
    failures = 0
    while held.goes_on(100, 50):
        held.tell(1)
        failures += 1
    assert failures * RISK == pytest.approx(LOSING_STEPS * STEP, abs=RISK)
