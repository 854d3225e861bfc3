"""Real clients of `edgespec serve`: the openai package, and httpx2 with its own reading of the events; speculation by request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.rules.table import RULES
from edgespec_runtime.serving import app
from served import CHAT, ask, listening, served, stream
from simulated_machine import STEEP, costs_of

MESSAGES: Any = CHAT["messages"]


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with served(bundle) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as one:
        yield one


def test_the_openai_client(client: openai.OpenAI) -> None:
    """Whole and streamed are one text; our fields are there for who looks, and nobody stumbles over them."""
    how: Any = {"model": "target", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    assert [model.id for model in client.models.list()] == ["target"]
    whole = client.chat.completions.create(**how)
    words = whole.choices[0].message.content
    assert words
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens_details is not None
    text, tinted, usage = "", 0, None
    for chunk in client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            mark = (choice.model_extra or {}).get("speculation", {})
            tinted += mark.get("tokens", 0) if mark.get("accepted") else 0
    assert text == words
    assert usage is not None
    assert usage.completion_tokens == 20
    speculation = (usage.model_extra or {})["speculation"]
    assert (
        0
        < tinted
        == speculation["accepted"]
        == sum(speculation["accepted_by_position"])
        <= speculation["drafted"]
    )
    assert client.completions.create(model="target", prompt="What is", max_tokens=7).usage is not None


def test_the_openai_client_switches_speculation_by_request(client: openai.OpenAI) -> None:
    how: Any = {"model": "target", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    texts, seen = set(), {}
    for extra in (
        {},
        {"speculative": False},
        {"draft_length": 2},
        {"draft_length": "auto"},
        {"rule": "match-greedy"},
    ):
        answer = client.chat.completions.create(**how, extra_body=extra)
        texts.add(answer.choices[0].message.content)
        assert answer.usage is not None
        seen[str(extra)] = (answer.usage.model_extra or {})["speculation"]
    assert len(texts) == 1  # all of them are lossless
    assert len(seen["{}"]["tested_by_position"]) == 3
    assert seen["{'speculative': False}"]["drafted"] == 0
    assert seen["{'speculative': False}"]["blocks"] == 20
    assert len(seen["{'draft_length': 2}"]["tested_by_position"]) == 2


def test_the_openai_client_understands_our_errors(client: openai.OpenAI) -> None:
    how: Any = {"model": "target", "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError, match="max_tokens is -1; a whole number from 1") as bad:
        client.chat.completions.create(**how, max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="there is no model") as missing:
        client.chat.completions.create(**{**how, "model": "gpt"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].role is \"judge\""):
        client.chat.completions.create(**{**how, "messages": [{"role": "judge", "content": "x"}]})


def test_an_answer_says_why_it_has_no_drafts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do not pay, where the request wants none, where there is no drafter; nothing where some were made."""
    monkeypatch.setattr(Schedules, "_costs", costs_of(STEEP, 0.1))

    def off(url: str, **fields: Any) -> Any:
        body = {**CHAT, **fields}
        said = ask(url, "/v1/chat/completions", body)[1]["usage"]["speculation"]["off"]
        parts = stream(
            url, "/v1/chat/completions", {**body, "stream_options": {"continuous_usage_stats": True}}
        )
        assert {part["usage"]["speculation"]["off"] for part in parts} == {said}
        return said

    with listening(bundle) as server:
        assert off(server.url) is None
        assert off(server.url, speculative=False) == "drafts are off"
        assert re.fullmatch(  # whether copies go on too depends on what passes cost at the moment
            r"off: a draft of 1 token and its pass cost [\d.]+ plain steps here; the drafter would need α [\d.]+, it has [\d.]+"
            r"(; copies from the text go on)?",
            off(server.url, draft_length="auto"),
        )
    with listening(bundle, draft=False) as server:
        assert off(server.url) == "no drafter was loaded"


def test_httpx_reads_the_events_of_a_stream(url: str) -> None:
    """A second client, which knows nothing of OpenAI's: status, headers, one JSON object an event, the mark of the end."""
    body = {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    whole = ask(url, "/v1/chat/completions", CHAT)[1]
    with httpx2.Client(timeout=30) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            lines = [line for line in answer.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert (
            "".join(event["choices"][0]["delta"]["content"] for event in events)
            == whole["choices"][0]["message"]["content"]
        )
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == whole["usage"]["completion_tokens"]
        again = client.post(f"{url}/v1/chat/completions", json=CHAT)  # on the same connection
        assert again.json()["choices"] == whole["choices"]


def test_an_event_is_one_line_to_every_client() -> None:
    """httpx and requests split lines where Unicode does, which server-sent events do not."""
    told = {"content": "a\u2028b\u2029c\x85d 日"}
    (line,) = filter(None, app._event(told).decode().splitlines())
    assert json.loads(line.removeprefix("data: ")) == told


def test_every_rule_by_request(url: str) -> None:
    for name in RULES:
        status, answer = ask(
            url, "/v1/chat/completions", {**CHAT, "rule": name, "temperature": 1, "max_tokens": 6}
        )
        assert status == 200, name
        assert 1 <= answer["usage"]["completion_tokens"] <= 6, name  # the end may be drawn before
    status, answer = ask(url, "/v1/chat/completions", {**CHAT, "rule": "opt:a=0.9"})
    assert status == 200
    status, answer = ask(url, "/v1/chat/completions", {**CHAT, "rule": "opt:a=x"})
    assert (status, answer["error"]["param"]) == (400, "rule")


def test_a_conversation_is_not_read_again(url: str) -> None:
    """The second turn's prompt begins with the first turn's, which is in the cache."""
    first = ask(url, "/v1/chat/completions", CHAT)[1]
    messages = [*MESSAGES, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    second = ask(url, "/v1/chat/completions", {**CHAT, "messages": messages})[1]["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - 1 <= cached < second["prompt_tokens"]


def test_a_server_without_a_drafter(bundle: Path) -> None:
    with listening(bundle, draft=False) as server:
        assert ask(server.url, "/v1/models")[1]["data"][0]["speculation"]["drafter"] is False
        status, answer = ask(server.url, "/v1/chat/completions", {**CHAT, "speculative": True})
        assert (status, answer["error"]["param"]) == (400, "speculative")
        usage = ask(server.url, "/v1/chat/completions", CHAT)[1]["usage"]
        assert usage["speculation"]["drafted"] == 0
        assert not any(
            part["choices"][0]["speculation"]["accepted"]
            for part in stream(server.url, "/v1/completions", CHAT | {"prompt": "a"})
        )


def test_a_key(bundle: Path) -> None:
    with listening(bundle, key="secret-1") as server:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/models", None),
            ("/metrics", None),
            ("/tokenize", {}),
            ("/x", {}),
        ):
            for headers in (
                {},
                {"Authorization": "Bearer secret-2"},
                {"Authorization": "Basic secret-1"},
                {"Authorization": "Bearer "},
            ):
                status, answer = ask(server.url, path, body, **headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert ask(server.url, "/health")[0] == 200
        assert httpx2.get(server.url).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-1", max_retries=0) as client:
            assert client.chat.completions.create(model="target", messages=MESSAGES, max_tokens=2).choices
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="the API key is wrong"),
        ):
            client.models.list()


def test_cors_is_off_until_it_is_set(bundle: Path) -> None:
    origin = "https://page.example"
    ask_first = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization,x-stainless-lang",  # as openai's JavaScript client
    }
    for origins, told in (((), None), ((origin,), origin), (("https://other.example",), None), (("*",), "*")):
        with listening(bundle, key="k", origins=origins) as server:
            before = httpx2.options(f"{server.url}/v1/chat/completions", headers=ask_first)
            assert before.is_success is (told is not None)
            assert before.headers.get("access-control-allow-origin") == told
            private = {"Access-Control-Request-Private-Network": "true"}  # Chromium, of a public page
            before = httpx2.options(f"{server.url}/v1/chat/completions", headers=ask_first | private)
            assert before.is_success is (told is not None)
            assert told is None or before.headers["access-control-allow-private-network"] == "true"
            answer = httpx2.get(f"{server.url}/v1/models", headers={"Origin": origin})
            assert answer.status_code == 401
            assert answer.headers.get("access-control-allow-origin") == told
            assert told is None or answer.headers["access-control-expose-headers"] == "Retry-After"


def test_no_header_comes_from_a_request(url: str) -> None:
    """Line ends in paths, origins and names come back in no head."""
    with httpx2.Client(timeout=30) as client:
        for path in ("/%0d%0aX-Injected:%201", "/v1/models%0aX-Injected:1?%0d%0aX-Injected:1"):
            answer = client.get(url + path)
            assert answer.status_code == 404
            assert "x-injected" not in answer.headers
        answer = client.post(f"{url}/v1/completions", json={"prompt": "a", "model": "a\r\nX-Injected: 1"})
        assert answer.status_code == 404
        assert "x-injected" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers
