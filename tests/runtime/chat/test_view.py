"""The figures of a reply, from known counts."""

from __future__ import annotations

import pytest
from edgespec_runtime.chat.view import WINDOW, Tally

from edgespec.core.metrics import RawCounts


def known() -> Tally:
    """Five tokens in half a second, from two blocks; a plain step takes a fifth of a second."""
    counts = RawCounts(
        blocks=2,
        drafted=6,
        emitted=5,
        tested=[2, 2, 1],
        accepted=[2, 1, 0],
        prefill_seconds=9.0,  # is no part of the speed
        total_seconds=0.5,
    )
    return Tally(100, 50, prompt=10, computed=7, counts=counts, step=0.2, first_token=0.25)


def test_the_figures_of_a_reply_that_is_complete() -> None:
    tally = known()
    tally.finish = "length"
    assert tally.line().split(" · ") == [
        "5 tokens",
        "10.0 tok/s",
        "est. 2.00x plain",
        "3/6 drafted accepted (τ 2.50, α 0.60)",
        "context 15/100",
        "first token after 0.25 s (7 of 10 prompt tokens computed)",
        "cut at max_new_tokens 50",
    ]
    tally.title = "plain"
    assert tally.heading() == "plain: 0.50 s, 10.0 tok/s, 3/6 drafted accepted"
    tally.off, tally.finish, tally.context = "off: why", "context", 12
    assert tally.line().split(" · ")[4:6] == ["off: why", "context 12/12"]
    assert tally.line().endswith(" · cut: the context of 12 tokens is full")


def test_the_figures_of_a_reply_that_comes() -> None:
    tally = known()
    tally.title = "speculative"
    shown = ["speculative", "10.0 tok/s", "2.00x plain", "3/6 drafted accepted", "context 15/100"]
    assert tally.live().split(" · ") == shown
    tally.counts.emitted = 0
    assert tally.live() == "speculative · reading the prompt: 7 of 10 tokens computed"


def test_the_present_speed_is_that_of_the_last_seconds() -> None:
    """Twenty tokens a second for four seconds, then five; looked at every half second."""
    assert WINDOW == 2.0
    tally, rates = Tally(1000, 500), dict[float, float]()
    for look in range(15):
        seconds = look / 2
        emitted = int(20 * min(seconds, 4.0) + 5 * max(0.0, seconds - 4.0))
        tally.counts.total_seconds, tally.counts.emitted = seconds, emitted
        rates[seconds] = tally.rate_now()
    assert rates[0.0] == 0.0
    assert (rates[1.0], rates[4.0], rates[5.0]) == (20.0, 20.0, 12.5)
    assert rates[7.0] == pytest.approx(5.0)
