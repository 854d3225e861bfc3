"""edgespec serve over real sockets: OpenAI's words, speculation that changes nothing, and requests that are turned away."""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from edgespec_runtime.bundle import LoadOptions, open_pair
from edgespec_runtime.decoding import DecodingOptions, plain
from edgespec_runtime.loop import decode
from edgespec_runtime.serve import MAX_BODY
from edgespec_runtime.serve_api import Service
from served import ask, served

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
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**CHAT, "stream": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"
        events = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    finally:
        connection.close()
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events]
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] in ("stop", "length")


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
        ("/v1/completions", {"prompt": 5}, 400, "prompt must be a text or a list of token ids below 512"),
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
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens is many"),
        ("/v1/completions", {"prompt": "a", "logprobs": 10**6}, 400, "logprobs must be a number from 0 to"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n must be 1"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"]}, 400, "'stop' is not supported"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "there is no model 'other'"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "'content' must be a text"),
    ],
)
def test_bad_requests_get_words(url: str, path: str, body: object, status: int, words: str) -> None:
    seen, answer = ask(url, path, body)
    assert seen == status
    assert words in answer["error"]["message"]
    assert ask(url, "/health")[0] == 200


def test_strangers_are_turned_away(url: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert ask(url, "/v1/completions", body, Host="evil.example")[0] == 403
    assert ask(url, "/v1/models", None, Host="evil.example:80")[0] == 403
    assert (
        ask(url, "/v1/completions", body, Content_Type="text/plain")[0] == 415
    )  # what a page may send without asking
    assert ask(url, "/v1/completions", body, Host="localhost")[0] == 200


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
    """Two inside, one that computes and one that waits: the third hears 503."""
    from concurrent.futures import ThreadPoolExecutor

    from edgespec_runtime.serve import Server

    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    service = Service(pair, "target", None)
    with Server(("127.0.0.1", 0), service, 1) as server, ThreadPoolExecutor(4) as pool:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        pool.submit(server.serve_forever, 0.01)
        body = {"prompt": "a", "max_tokens": 2}
        with service.lock:
            waiting = [pool.submit(ask, address, "/v1/completions", body) for _ in range(2)]
            while server.turns._value:
                pass
            assert ask(address, "/v1/completions", body)[0] == 503
        assert [future.result()[0] for future in waiting] == [200, 200]
        server.shutdown()
    pair.close()


def test_a_port_that_is_taken(bundle: Path, url: str) -> None:
    from edgespec_runtime import serve

    with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1 port \d+: .*give another --port"):
        serve.run({"bundle": str(bundle), "port": urlsplit(url).port})
