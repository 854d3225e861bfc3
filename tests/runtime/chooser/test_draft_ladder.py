"""A draft length by what may be lost now: looked up for some blocks, and no longer than what was known of it holds."""

from __future__ import annotations

import math

import pytest
from edgespec_runtime.chooser.draft_ladder import LONGEST_HELD, SLOW_BLOCK, DraftLadder, Rung
from edgespec_runtime.chooser.running_costs import BUCKET
from edgespec_runtime.decoding.schedule import Outcome

STEP = 0.02
BLOCKS = [
    STEP,
    0.03,
    0.04,
    0.05,
]  # a block by draft length; drafts of three that fail lose one and a half steps
RUNGS = [
    Rung(0.01, False, 60.0, 1),
    Rung(0.02, False, 70.0, 2),
    Rung(0.04, True, 70.0, 2),
    Rung(0.06, True, 80.0, 3),
]
KNOWN = [True] * len(BLOCKS)


def ladder(
    slack: float, reserve: float | None = None, losing: float = math.inf, blocks: int = 10
) -> DraftLadder:
    made = DraftLadder()
    made.build(RUNGS, BLOCKS, slack, slack if reserve is None else reserve)
    made.hold(blocks, 100, losing, KNOWN)
    return made


def outcome(drafted: int, emitted: int, seconds: float | None = None) -> Outcome:
    taken = BLOCKS[drafted] if seconds is None else seconds
    return Outcome(100, drafted, emitted - 1, emitted, drafted + 1, 0.0, taken, taken)


@pytest.mark.parametrize(("slack", "length"), [(0.009, 0), (0.01, 1), (0.03, 2), (0.05, 2), (0.07, 3)])
def test_the_more_may_be_lost_the_longer_is_the_draft(slack: float, length: int) -> None:
    assert DraftLadder().build(reversed(RUNGS), BLOCKS, slack, slack) == length
    assert ladder(slack).take(100, 50) == length


def test_a_careful_rung_goes_before_a_faster_one_that_is_not() -> None:
    rungs = [
        Rung(0.01, True, 60.0, 1),
        Rung(0.02, False, 70.0, 2),
        Rung(0.05, True, 70.0, 2),
        Rung(0.06, True, 65.0, 3),
    ]
    lengths = [DraftLadder().build(rungs, BLOCKS, slack, slack) for slack in (0.015, 0.03, 0.055, 0.1)]
    assert lengths == [1, 1, 2, 2]


def test_blocks_that_lose_lead_down_and_blocks_that_win_lead_up() -> None:
    made = ladder(0.065)
    lengths = []
    for emitted in (1, 1, 3, 4):
        lengths.append(made.take(100, 50))
        made.tell(outcome(lengths[-1], min(emitted, lengths[-1] + 1)))
    assert lengths == [3, 2, 1, 2]  # which leaves 0.035, 0.015, 0.025 and 0.045
    assert made.take(100, 50) == 2


@pytest.mark.parametrize(("blocks", "served"), [(1, 1), (7, 7), (10**6, LONGEST_HELD)])
def test_it_serves_for_so_many_blocks(blocks: int, served: int) -> None:
    made = ladder(0.1, blocks=blocks)
    assert [made.take(100, 50) for _ in range(served + 1)] == [3] * served + [0]


def test_no_draft_where_nothing_was_built_or_it_is_not_held() -> None:
    made = DraftLadder()
    assert made.take(100, 50) == 0
    made.build(RUNGS, BLOCKS, 1.0, 1.0)
    assert made.take(100, 50) == 0


@pytest.mark.parametrize(
    ("context", "room", "length"),
    [
        (100 + BUCKET - 1, 3, 3),
        (100 + BUCKET, 3, 0),
        (101 - BUCKET, 3, 3),
        (100 - BUCKET, 3, 0),
        (100, 2, 0),
    ],
)
def test_only_around_the_context_it_was_built_at_and_where_there_is_room(
    context: int, room: int, length: int
) -> None:
    assert ladder(0.1).take(context, room) == length


def test_a_length_of_which_costs_are_not_known_is_considered_first() -> None:
    made = DraftLadder()
    made.build(RUNGS, BLOCKS, 0.05, 0.05)
    made.hold(10, 100, math.inf, [True, True, True, False])
    assert made.take(100, 50) == 2
    made.tell(outcome(2, 3))
    assert made.take(100, 50) == 0


@pytest.mark.parametrize(("losing", "failures"), [(0.0, 1), (0.025, 2), (0.05, 3)])
def test_what_was_won_is_not_all_lost_again(losing: float, failures: int) -> None:
    """It is to be considered anew when so much of it is lost, a step with each of these."""
    made = ladder(0.06, losing=losing)
    for _ in range(3):
        made.take(100, 50)
        made.tell(outcome(2, 3))
    served = 0
    while made.take(100, 50):
        made.tell(outcome(2, 1))
        served += 1
    assert served == failures


def test_a_slow_block_counts_and_another_programs_turn_does_not() -> None:
    slow, turn = ladder(0.025), ladder(0.025)
    slow.tell(outcome(1, 2, 1.2 * BLOCKS[1]))
    turn.tell(outcome(1, 2, 5.0))
    assert slow.take(100, 50) == 2  # 0.029
    assert turn.take(100, 50) == 2  # 0.026
    turn.tell(outcome(1, 2, SLOW_BLOCK * BLOCKS[1]))
    assert turn.take(100, 50) == 2
    turn.tell(outcome(1, 1, 5.0))  # 0.027 less 0.019
    assert turn.take(100, 50) == 0


def test_a_reply_that_lost_all_it_may_rests_and_the_next_one_has_a_part_of_the_others() -> None:
    made = ladder(0.012, reserve=0.1)
    assert not made.rest()
    made.tell(outcome(1, 1))
    assert made.rest()
    assert not made.rest()  # once: after the rest it is to be considered anew
    assert made.take(100, 50) == 0
    assert made.begin(0.05)
    assert made.take(100, 50) == 2
    for _ in range(5):  # these lose more than was left
        made.tell(outcome(2, 1))
    assert not made.begin(0.05)
    assert made.take(100, 50) == 0
