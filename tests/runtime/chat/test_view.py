"""The figures of one reply, of two side by side and of all, from known counts."""

from __future__ import annotations

import pytest
from chats import new_chat
from edgespec_runtime.chat.commands import _verdict, handle
from edgespec_runtime.chat.replies import Piece
from edgespec_runtime.chat.view import WINDOW, Tally
from edgespec_runtime.pair.bundle import Pair

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


def test_the_figures_of_all_replies(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    chat.replies = 2
    chat.totals = RawCounts(
        blocks=4,
        drafted=9,
        emitted=10,
        tested=[4, 3, 2],
        accepted=[3, 2, 1],
        draft_seconds=1.0,
        verify_seconds=1.5,
        total_seconds=5.0,
    )
    handle(chat, "/stats")
    assert capsys.readouterr().err.splitlines() == [
        "replies 2, tokens 10, 2.0 tok/s",
        "time    drafter 20%, target 30%, loop 50%",
        "context 0 of 256 tokens",
        "now     drafter hybrid, γ 3, rule lossless",
        "τ 2.50, α 0.67 (in the block: 0.75, 0.67, 0.50); 6/9 drafted accepted",
    ]


@pytest.mark.parametrize(
    ("tokens", "seeded", "said"),
    [
        ((1, 2, 3), True, "the same 3 tokens"),
        ((1, 9, 3), True, "the texts part at token 2"),
        ((1, 2), True, "the texts part at token 3"),
        ((1, 9, 3), False, "other words, as of any two draws; /set seed 1 draws the same ones"),
    ],
)
def test_two_replies_to_one_prompt_are_compared(tokens: tuple[int, ...], seeded: bool, said: str) -> None:
    plain, speculative = (
        Tally(100, 50, counts=RawCounts(emitted=3, total_seconds=seconds), pieces=[Piece("", ids, False)])
        for seconds, ids in ((0.3, (1, 2, 3)), (0.2, tokens))
    )
    ends = "one run each; edgespec bench measures with intervals"
    assert _verdict(plain, speculative, seeded=seeded) == f"1.50x plain · {said} · {ends}"
