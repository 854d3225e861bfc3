"""A chosen draft length is kept for some blocks, and no longer than what was known of it holds."""

from __future__ import annotations

import math

import pytest
from edgespec_runtime.draft_ladder import AT_ONCE, HELD, LONGEST_HELD, LOSING_STEPS, TRIED, HeldLength
from edgespec_runtime.running_costs import BUCKET
from edgespec_runtime.schedule import Outcome

STEP, RISK = 0.02, 0.01


def chosen(budget: float = 1.0, enough: float = math.inf, length: int = 3) -> HeldLength:
    held = HeldLength()
    held.choose(length, HELD, 100, STEP, RISK, budget, enough)
    return held


def blocks_of(held: HeldLength, emitted: int, most: int = 10**6) -> int:
    """How many blocks it is kept for where each comes to `emitted` tokens, `most` looked at."""
    made = 0
    while made < most and (blocks := held.take(100, 50)):
        held.tell([outcome(emitted)] * blocks)
        made += blocks
    return made


def outcome(emitted: int) -> Outcome:
    return Outcome(100, 3, emitted - 1, emitted, 4, 0.0, STEP, STEP)


@pytest.mark.parametrize(("blocks", "kept"), [(None, HELD), (0, HELD), (17, 17), (10**6, LONGEST_HELD)])
def test_it_is_kept_for_so_many_blocks(blocks: int | None, kept: int) -> None:
    held = chosen(budget=2 * RISK)
    if blocks is not None:
        held.go_on_for(blocks)
    assert blocks_of(held, emitted=4) == kept


def test_a_try_is_kept_for_fewer() -> None:
    held = HeldLength()
    held.choose(3, TRIED, 100, STEP, RISK, 1.0, math.inf)
    assert blocks_of(held, emitted=4) == TRIED


def test_no_draft_is_not_kept() -> None:
    assert not chosen(length=0).take(100, 50)


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
    assert bool(chosen().take(context, room)) is kept


@pytest.mark.parametrize(
    ("budget", "enough", "at_once"),
    [(1.0, math.inf, AT_ONCE), (3.5 * RISK, math.inf, 3), (0.0, math.inf, 1), (1.0, STEP, 1)],
)
def test_so_many_are_made_at_once_as_may_all_fail(budget: float, enough: float, at_once: int) -> None:
    """And one, where what it wins may pay for the longer length."""
    held = chosen(budget, enough)
    held.left = LONGEST_HELD
    assert held.take(100, 50) == at_once
    assert held.left == LONGEST_HELD - at_once


def test_it_ends_when_what_may_be_lost_bears_no_further_failure() -> None:
    assert blocks_of(chosen(budget=2 * RISK), emitted=1) == 2


def test_it_ends_when_what_was_won_pays_for_the_longer_one() -> None:
    assert blocks_of(chosen(budget=RISK, enough=5 * STEP), emitted=4) == 2


def test_what_many_blocks_won_is_not_all_lost_again() -> None:
    held = chosen()
    held.go_on_for(LONGEST_HELD)
    assert blocks_of(held, emitted=4, most=10) >= 10
    failures = blocks_of(held, emitted=1)
    assert failures * RISK == pytest.approx(LOSING_STEPS * STEP, abs=RISK)
