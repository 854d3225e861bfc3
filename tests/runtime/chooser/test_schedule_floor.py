"""benchmarks/schedule_floor.py against enumeration of every choice and every outcome."""

from __future__ import annotations

import pytest
from schedule_floor import least_seconds

RATES, BLOCKS = (0.6, 0.5, 0.7), (1.0, 1.3, 1.5, 1.8)


def won(left: int, slack: float) -> float:
    """Most that can be expected to be won in `left` tokens where `slack` may be lost."""
    best = won(left - 1, slack) if left else 0.0
    for length in range(1, min(len(BLOCKS), left)):
        if slack < BLOCKS[length] - 1.0 - 1e-9:
            continue
        total, reach = 0.0, 1.0
        for count in range(1, length + 2):
            goes_on = RATES[count - 1] if count <= length else 0.0
            gain = count - BLOCKS[length]
            total += reach * (1.0 - goes_on) * (gain + won(left - count, slack + gain))
            reach *= goes_on
        best = max(best, total)
    return best


@pytest.mark.parametrize(("tokens", "share"), [(6, 0.04), (8, 0.04), (9, 0.1), (10, 0.0)])
def test_the_floor_is_that_of_enumeration(tokens: int, share: float) -> None:
    _, best = least_seconds(RATES, BLOCKS, tokens, share)
    assert best == pytest.approx(tokens - won(tokens, share * tokens + 1e-9), abs=1e-6)


def won_unknowing(made: int, left: int, lost: float, share: float, sure: int) -> float:
    """The same where the reply may end with every token after `sure`, and then has lost no more than its share."""
    if not left:
        return 0.0
    best = won_unknowing(made + 1, left - 1, lost, share, sure)
    for length in range(1, min(len(BLOCKS), left)):
        if lost + BLOCKS[length] - 1.0 > share * max(made + 1, sure) + 1e-9:
            continue
        total, reach = 0.0, 1.0
        for count in range(1, length + 2):
            goes_on = RATES[count - 1] if count <= length else 0.0
            gain = count - BLOCKS[length]
            later = won_unknowing(made + count, left - count, lost - gain, share, sure)
            total += reach * (1.0 - goes_on) * (gain + later)
            reach *= goes_on
        best = max(best, total)
    return best


@pytest.mark.parametrize(("sure", "share"), [(0, 0.1), (2, 0.1), (3, 0.2)])
def test_the_floor_of_a_reply_that_may_end_is_that_of_enumeration(sure: int, share: float) -> None:
    _, best = least_seconds(RATES, BLOCKS, 8, share, sure)
    assert best == pytest.approx(8 - won_unknowing(0, 8, 0.0, share, sure), abs=1e-6)
    _, knowing = least_seconds(RATES, BLOCKS, 8, share)
    assert knowing < best - 0.01


def test_a_fixed_length_takes_what_its_blocks_take() -> None:
    """Two tokens at most: a draft of one, then a plain step where it failed."""
    fixed, _ = least_seconds((0.9,), (1.0, 1.2), 2, 0.0)
    assert fixed == pytest.approx([2.0, 0.9 * 1.2 + 0.1 * 2.2])


def test_with_all_to_lose_the_best_is_no_worse_than_a_fixed_length() -> None:
    fixed, best = least_seconds(RATES, BLOCKS, 30, 0.5)
    assert best <= min(fixed) + 0.01


def test_short_replies_cannot_keep_both_promises() -> None:
    """tiny-chat as a bench on a Xeon found it: 2 % of ten tokens buys no draft, and a fixed length is over 5 % faster."""
    fixed, best = least_seconds((0.57,) * 3, (1.0, 1.36, 1.54, 1.71), 10, 0.02)
    assert best == 10.0
    assert 1.05 * min(fixed) < best
