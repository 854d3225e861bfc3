"""edgespec serve over real sockets: OpenAI's words, speculation that changes nothing, and requests that are turned away."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from edgespec_runtime import serve
from edgespec_runtime.bundle import LoadOptions, open_pair
from edgespec_runtime.decoding import DecodingOptions, plain
from edgespec_runtime.loop import decode
from edgespec_runtime.serve import MAX_BODY
from served import ask, listening, served, stream

from edgespec.errors import InputError
from edgespec.metrics import RawCounts

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with served(bundle, "--waiting", "1") as address:
        yield address


def plain_reply(bundle: Path, text: str | None, count: int) -> tuple[list[int], str]:
    """The target's own greedy reply to the chat above, or to a bare text, and its words."""
    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        tokenizer = pair.tokenizer
        prompt = (
            tokenizer.encode(text) if text else tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        )
        how = plain(DecodingOptions(max_new_tokens=count))
        blocks = decode(pair.target, None, prompt, how, tokenizer.stop_ids, RawCounts())
        ids = [token for block in blocks for token in block.tokens]
        return ids, tokenizer.decode(ids)
    finally:
        pair.close()


def test_a_served_reply_is_the_targets(bundle: Path, url: str) -> None:
    _, words = plain_reply(bundle, None, 12)
    status, answer = ask(url, "/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": words}
    ids, words = plain_reply(bundle, "What is", 7)
    body = {"prompt": "What is", "max_tokens": 7, "temperature": 0, "return_token_ids": True}
    status, answer = ask(url, "/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (words, ids)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert choice["finish_reason"] == ("stop" if ids[-1] == 2 else "length")
    given = {**body, "prompt": choice["prompt_token_ids"]}
    assert ask(url, "/v1/completions", given)[1]["choices"][0]["token_ids"] == ids


def test_a_stream_is_the_reply_in_pieces(url: str) -> None:
    whole = ask(url, "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    events = stream(url, "/v1/chat/completions", CHAT)
    pieces = [event["choices"][0] for event in events]
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in piece["delta"] for piece in pieces[1:])
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert not any("usage" in event for event in events)
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] in ("stop", "length")
    body = {"prompt": "What is", "max_tokens": 7, "temperature": 0}
    text = ask(url, "/v1/completions", body)[1]["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in stream(url, "/v1/completions", body)) == text


def test_a_stream_counts_its_tokens_when_asked(url: str) -> None:
    whole = ask(url, "/v1/chat/completions", CHAT)[1]
    *events, last = stream(url, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(len(event["choices"]) == 1 for event in events)


def test_a_seed_is_said_and_gives_its_reply_again(url: str) -> None:
    body = {**CHAT, "temperature": 1.0, "max_tokens": 20}
    answers = [ask(url, "/v1/chat/completions", body)[1] for _ in range(4)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) > 1
    seeds = [answer["seed"] for answer in answers]
    assert len(set(seeds)) == 4
    assert all(type(seed) is int for seed in seeds)
    for path in ("/v1/chat/completions", "/v1/completions"):
        given = {**body, "prompt": "a", "seed": 11}
        again = [ask(url, path, given)[1] for _ in range(3)]
        assert len({json.dumps(answer["choices"]) for answer in again}) == 1
        assert {answer["seed"] for answer in again} == {11}
        assert {event["seed"] for event in stream(url, path, given)} == {11}
        drawn = {event["seed"] for event in stream(url, path, {**given, "seed": None})}
        assert len(drawn) == 1
        assert drawn != {11}
    assert ask(url, "/v1/chat/completions", CHAT)[1]["seed"] is None  # greedy: there is nothing to draw


def test_sampling_is_cut_as_asked(bundle: Path, url: str) -> None:
    """At a temperature of 100 tokens are nearly equally probable; a cut that keeps one of them makes it greedy all the same."""
    _, words = plain_reply(bundle, None, 12)
    hot = {**CHAT, "temperature": 100}
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        answer = ask(url, "/v1/chat/completions", {**hot, **cut})[1]
        assert answer["choices"][0]["message"]["content"] == words, cut
    assert ask(url, "/v1/chat/completions", hot)[1]["choices"][0]["message"]["content"] != words


def test_what_clients_send_beside_the_text(url: str) -> None:
    """Nulls, neutral values, unknown fields, text parts: the same answer as without them."""
    words = ask(url, "/v1/chat/completions", CHAT)[1]["choices"]
    nulls = dict.fromkeys(("n", "model", "logprobs", "stop", "tools", "seed", "stream", "stream_options"))
    more = {"logprobs": False, "response_format": {"type": "text"}, "n": 1, "user": "me", "whatever": [1]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for extra in (nulls, more, {"messages": parts}, {"max_tokens": None, "max_completion_tokens": 12}):
        status, answer = ask(url, "/v1/chat/completions", {**CHAT, **extra})
        assert (status, answer["choices"]) == (200, words)
    three = {**CHAT, "max_tokens": None, "max_completion_tokens": 3}
    assert ask(url, "/v1/chat/completions", three)[1]["usage"]["completion_tokens"] == 3
    chat = [CHAT["messages"][0], {"role": "assistant", "content": None}, CHAT["messages"][0]]  # type: ignore[index]
    assert ask(url, "/v1/chat/completions", {**CHAT, "messages": chat})[0] == 200


def test_log_probabilities_are_those_of_the_logits(bundle: Path, url: str) -> None:
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 3,
        "echo": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = ask(url, "/v1/completions", body)[1]["choices"][0]
    scores, ids = choice["logprobs"], [5, 6, 7, *choice["token_ids"]]
    assert scores["tokens"] == [f"token_id:{token}" for token in ids]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        logits = pair.target.forward(ids).astype(float)
    finally:
        pair.close()
    for place, token in enumerate(ids[1:]):
        normaliser = math.log(sum(math.exp(value) for value in logits[place]))
        assert scores["token_logprobs"][place + 1] == pytest.approx(
            logits[place][token] - normaliser, abs=1e-4
        )
        best = sorted(range(len(logits[place])), key=lambda one: -logits[place][one])[:3]
        assert list(scores["top_logprobs"][place + 1]) == [f"token_id:{one}" for one in best]


def test_what_is_served_is_said(url: str) -> None:
    assert ask(url, "/health") == (200, {"status": "ok"})
    status, models = ask(url, "/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "target", 256)
    assert ask(url, "/tokenize", {"prompt": "Hello"})[1]["count"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/nothing", {}, 404, "there is no POST"),
        ("/v1/completions", b"[]", 400, "no JSON object"),
        ("/v1/completions", b"{", 400, "not valid JSON"),
        ("/v1/completions", b'{"prompt": "a", "prompt": "b"}', 400, "twice"),
        ("/v1/completions", b'{"temperature": NaN}', 400, "NaN"),
        (
            "/v1/completions",
            {"prompt": 5},
            400,
            "prompt is 5; it must be a text or a list of token ids below 512",
        ),
        ("/v1/completions", {"prompt": [512]}, 400, "token ids below 512"),
        ("/v1/completions", {"prompt": [True]}, 400, "token ids"),
        ("/v1/completions", {"prompt": []}, 400, "the prompt is empty"),
        ("/v1/completions", {"prompt": [5] * 300}, 400, "the context holds 256"),
        (
            "/v1/completions",
            {"prompt": "a", "temperature": -1},
            400,
            "temperature is -1; a number from 0 to 100",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": "many"},
            400,
            'max_tokens is "many"; a whole number',
        ),
        (
            "/v1/completions",
            {"prompt": "a", "logprobs": 10**6},
            400,
            "logprobs is 1000000; a whole number from 0 to 256",
        ),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n is 2; it is not supported"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"]}, 400, 'stop is ["x"]; it is not supported'),
        (
            "/v1/completions",
            {"prompt": "a", "model": "other"},
            404,
            'there is no model "other"; this is "target"',
        ),
        ("/v1/chat/completions", {"messages": []}, 400, "messages is []; it must be a list of 1 to 4096"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            400,
            "messages[0].content is missing; it must be a text",
        ),
    ],
)
def test_bad_requests_get_words(url: str, path: str, body: object, status: int, words: str) -> None:
    seen, answer = ask(url, path, body)
    assert seen == status
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}  # OpenAI's form
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert ask(url, "/health")[0] == 200


def test_errors_name_the_field_and_the_code(url: str) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "a" * 2000}]}
    error = ask(url, "/v1/chat/completions", body)[1]["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    error = ask(url, "/v1/chat/completions", {**CHAT, "model": "other"})[1]["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = ask(url, "/v1/chat/completions", {**CHAT, "n": 2})[1]["error"]
    assert (error["param"], error["code"]) == ("n", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'),
        ("/v1/chat/completions", rb'{"messages": [{"role": "\ud83d", "content": "a"}]}'),
        ("/v1/completions", rb'{"prompt": "cut \ud83d"}'),
        ("/v1/completions", rb'{"prompt": "a", "model": "\udfff"}'),
        ("/v1/completions", rb'{"prompt": "a", "temperature": "\ud83d"}'),
        ("/v1/completions", rb'{"prompt": "a", "\ud83d": 1}'),
        ("/tokenize", rb'{"prompt": "cut \ud83d"}'),
    ],
)
def test_half_a_character_is_refused(url: str, path: str, body: bytes) -> None:
    status, answer = ask(url, path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "half a character" in answer["error"]["message"]
    assert "ud" in answer["error"]["message"]


def test_a_whole_character_of_two_halves_is_fine(url: str) -> None:
    status, answer = ask(url, "/tokenize", rb'{"prompt": "\ud83d\ude42"}')
    assert (status, answer["count"]) == (200, ask(url, "/tokenize", {"prompt": "🙂"})[1]["count"])


def test_strangers_are_turned_away(url: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert ask(url, "/v1/completions", body, Host="evil.example")[0] == 403
    assert ask(url, "/v1/models", None, Host="evil.example:80")[0] == 403
    assert (
        ask(url, "/v1/completions", body, Content_Type="text/plain")[0] == 415
    )  # what a page may send without asking
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:80", "127.0.0.2", "[::1]", "[::1]:80"):
        assert ask(url, "/v1/completions", body, Host=host)[0] == 200
    for host in ("", "[::1", "[::2]", "::1.evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        assert ask(url, "/v1/completions", body, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "localhost", "127.0.0.1", ""])
def test_addresses_of_both_kinds(bundle: Path, host: str) -> None:
    """The address that is printed answers; `::` and '' answer to everybody's name."""
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listening(bundle, host) as server:
        assert server.url.startswith("http://[" if ":" in host else "http://")
        address = server.url.replace("[::]", "[::1]").replace("0.0.0.0", "127.0.0.1")
        assert ask(address, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        stranger = ask(address, "/v1/models", None, Host="evil.example")[0]
        assert stranger == (200 if host in ("::", "") else 403)
        if host == "::":
            assert ask(f"http://127.0.0.1:{server.server_address[1]}", "/health")[0] == 200


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "a" * 100, "fe80::zz"])
def test_an_address_that_is_none(bundle: Path, host: str) -> None:
    with pytest.raises(InputError, match=r"cannot listen on .* port 0: .*give another --port or --host"):
        serve.run({"bundle": str(bundle), "host": host, "port": 0})


def _raw(url: str, head: str) -> str:
    """The first line of the answer to a request written by hand."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
        connection.sendall(head.encode())
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096).decode().partition("\r\n")[0]


def test_sizes_are_bounded_before_they_are_read(url: str) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert " 413 " in _raw(url, f"{head}Content-Length: {MAX_BODY + 1}\r\n\r\n")
    assert " 413 " in _raw(url, f"{head}Content-Length: {'9' * 5000}\r\n\r\n")  # more digits than int() takes
    assert " 411 " in _raw(url, f"{head}\r\n")
    assert " 411 " in _raw(url, f"{head}Content-Length: -5\r\n\r\n")
    assert " 400 " in _raw(url, f'{head}Content-Length: 50\r\n\r\n{{"prompt": "a"')
    assert ask(url, "/health")[0] == 200


def test_a_client_that_leaves_frees_the_next(url: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 200, "temperature": 1, "stream": True}).encode()
    parts = urlsplit(url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    for _ in range(4):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
            connection.sendall(head.encode() + body)
            connection.recv(64)
    for _ in range(100):
        status, _ = ask(url, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        if status == 200:
            break
    assert status == 200


def test_too_many_at_once_are_told_to_come_back(bundle: Path) -> None:
    """Two inside, one that computes and one that waits: the third hears 503. Who asks for no reply is answered."""
    with listening(bundle, waiting=1) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "a", "max_tokens": 2}
        with server.service.turns.one(lambda: None):
            waiting = [pool.submit(ask, server.url, "/v1/completions", body) for _ in range(2)]
            while server.turns._value:
                time.sleep(0.01)
            status, answer = ask(server.url, "/v1/completions", body)
            assert (status, answer["error"]["type"]) == (503, "server_error")
            assert ask(server.url, "/health")[0] == ask(server.url, "/v1/models")[0] == 200
        assert [future.result()[0] for future in waiting] == [200, 200]


def test_a_port_that_is_taken(bundle: Path, url: str) -> None:
    with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1 port \d+: .*give another --port"):
        serve.run({"bundle": str(bundle), "port": urlsplit(url).port})
