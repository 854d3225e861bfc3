"""Stop strings against the plainest reference: join the whole text, and cut it at the stop string that is whole first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from edgespec_runtime.text.stops import MAX_STOP, MAX_STOPS, UntilStop, stops_of
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.errors import InputError

LETTERS = "abé"  # few, so that texts hold stop strings and their beginnings
TEXTS = st.text(LETTERS, max_size=12)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=MAX_STOPS)


def reference(text: str, stops: Sequence[str]) -> str:
    """Letter by letter: up to the first place where a stop string ends, less the longest one that ends there."""
    for end in range(len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)]
    return text


def passed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str, bool]:
    until = UntilStop(stops)
    return [until.feed(piece) for piece in pieces], until.finish(), until.found


@given(st.lists(TEXTS), STOPS)
def test_what_comes_out_is_the_text_up_to_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, rest, found = passed(pieces, stops)
    assert "".join(shown) + rest == reference(text, stops)
    assert found is any(stop in text for stop in stops)


@given(st.lists(TEXTS), STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    until, text, shown = UntilStop(stops), "", ""
    for piece in pieces:
        text += piece
        shown += until.feed(piece)
        if until.found:
            break
        tails = [text[-size:] for size in range(1, len(text) + 1)]
        begun = [len(tail) for tail in tails for stop in stops if stop.startswith(tail)]
        assert shown == text[: len(text) - max(begun, default=0)]


def test_one_that_is_whole_first_counts_and_of_one_end_the_longest() -> None:
    for pieces in (["xabcd"], ["xa", "b", "cd"], list("xabcd")):
        shown, rest, found = passed(pieces, ["abcd", "bc"])
        assert ("".join(shown), rest, found) == ("xa", "", True)
        shown, rest, found = passed(pieces, ["bc", "abc"])
        assert ("".join(shown), rest, found) == ("x", "", True)


def test_one_text_or_a_few() -> None:
    assert stops_of("x") == stops_of(["x"]) == stops_of(("x",)) == ("x",)
    assert stops_of([]) == ()
    assert stops_of(["x" * MAX_STOP] * MAX_STOPS) == ("x" * MAX_STOP,) * MAX_STOPS
    wanted = "a text of 1 to 256 characters, or a list of at most 4 such texts, is wanted"
    for wrong in (None, 5, {}, ["x"] * 5, ["x", 5], [["x"]], "x" * 257, ["x" * 257]):
        with pytest.raises(InputError, match=wanted):
            stops_of(wrong)
    for empty in ("", ["x", ""]):
        with pytest.raises(InputError, match="an empty text stands at the start of every reply"):
            stops_of(empty)
