"""`stop` of a request: where the reply ends, whole and streamed, with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from served import CHAT, ask, listening, stream

CHATS, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {**CHAT, "prompt": "What is", "max_tokens": 60}


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with listening(bundle) as server:
        yield server.url


def said(choice: dict[str, Any]) -> str:
    place = choice.get("message") or choice.get("delta") or choice
    return str(place.get("content", place.get("text")))


@pytest.fixture(scope="module", params=[CHATS, TEXT])
def reply(request: pytest.FixtureRequest, url: str) -> tuple[str, str]:
    """(path, the reply without `stop`)."""
    choice = ask(url, request.param, BODY)[1]["choices"][0]
    assert choice["finish_reason"] == "length"
    return request.param, said(choice)


def stops_in(text: str) -> list[str]:
    """Twenty parts of a text, of 1 to 12 characters: within a token, and of several."""
    draw = Random(0)
    starts = [draw.randrange(len(text)) for _ in range(20)]
    return [text[start : start + draw.randint(1, 12)] for start in starts]


def test_a_reply_ends_before_its_stop_string(url: str, reply: tuple[str, str]) -> None:
    path, text = reply
    for stop in stops_in(text):
        cut = text[: text.find(stop)]
        for given in (stop, ["not in it", stop]):
            choice = ask(url, path, {**BODY, "stop": given})[1]["choices"][0]
            assert (said(choice), choice["finish_reason"]) == (cut, "stop")
        pieces = [event["choices"][0] for event in stream(url, path, {**BODY, "stop": stop})]
        assert "".join(map(said, pieces)) == cut
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def test_drafts_change_neither_the_text_nor_the_count(url: str, reply: tuple[str, str]) -> None:
    """What was drafted and accepted behind a stop string, in its block, is not part of the reply."""
    path, text = reply
    for stop in stops_in(text)[:8]:
        answers = [
            ask(url, path, {**BODY, "stop": stop, **how})[1]
            for how in ({"speculative": False}, {"draft_length": 1}, {"draft_length": 7}, {})
        ]
        plain = answers[0]["usage"]["completion_tokens"]
        assert answers[0]["usage"]["speculation"]["blocks"] == plain  # nothing was decoded behind it
        for answer in answers:
            assert answer["choices"] == answers[0]["choices"]
            assert answer["usage"]["completion_tokens"] == plain
            assert answer["usage"]["speculation"]["blocks"] <= plain
        body = {**BODY, "stop": stop, "stream_options": {"include_usage": True}}
        *events, last = stream(url, path, body)
        assert last["usage"]["completion_tokens"] == plain
        assert sum(event["choices"][0].get("speculation", {}).get("tokens", 0) for event in events) == plain
        enough, short = (
            ask(url, path, {**BODY, "stop": stop, "max_tokens": plain - less})[1] for less in (0, 1)
        )
        assert enough["choices"] == answers[0]["choices"]
        if plain > 1 and "\ufffd" not in stop:  # where a reply ends, half a character becomes one
            assert short["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_that_does_not_come_changes_nothing(url: str, reply: tuple[str, str]) -> None:
    """Also where the reply ends with the beginning of one."""
    path, text = reply
    whole = ask(url, path, BODY)[1]["choices"]
    for stop in (None, [], "not in it", [text[-3:] + "z", text[-1:] + "zz", text[:5] + "z"]):
        assert ask(url, path, {**BODY, "stop": stop})[1]["choices"] == whole
        events = stream(url, path, {**BODY, "stop": stop})
        assert "".join(said(event["choices"][0]) for event in events) == text
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_the_next_turn_goes_on_from_the_text_that_was_shown(url: str) -> None:
    """The cache holds what was decoded behind it, too."""
    whole = said(ask(url, CHATS, BODY)[1]["choices"][0])
    first = ask(url, CHATS, {**BODY, "stop": whole[40:43]})[1]
    shown = said(first["choices"][0])
    assert shown == whole[:40]
    turns = [*BODY["messages"], {"role": "assistant", "content": shown}, {"role": "user", "content": "And?"}]
    after = ask(url, CHATS, {**BODY, "messages": turns})[1]
    cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] < cached < after["usage"]["prompt_tokens"] - 1
    ask(url, TEXT, BODY)  # another text: the chat leaves the cache
    again = ask(url, CHATS, {**BODY, "messages": turns})[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == after["choices"]


def test_token_ids_and_scores_are_of_the_tokens_and_an_echo_of_the_text(url: str) -> None:
    more = {"return_token_ids": True, "logprobs": 1}
    whole = ask(url, TEXT, {**BODY, **more})[1]["choices"][0]
    stop = whole["text"][5:8]
    cut = ask(url, TEXT, {**BODY, **more, "stop": stop})[1]
    choice, count = cut["choices"][0], cut["usage"]["completion_tokens"]
    assert choice["text"] == whole["text"][: whole["text"].find(stop)]
    assert choice["token_ids"] == whole["token_ids"][:count]
    assert choice["logprobs"] == {name: values[:count] for name, values in whole["logprobs"].items()}
    echoed = ask(url, TEXT, {**BODY, "stop": stop, "echo": True})[1]["choices"][0]["text"]
    assert echoed == "What is" + choice["text"]
    echoed = ask(url, TEXT, {**BODY, "stop": "What", "echo": True})[1]["choices"][0]["text"]
    assert echoed == "What is" + whole["text"]  # only a reply is searched
