"""edgespec serve over real sockets: addresses, and requests that are turned away."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from edgespec_runtime.serving import api, serve
from edgespec_runtime.serving.app import MAX_BODY, MAX_BRACKETS
from edgespec_runtime.serving.errors import HANDLERS
from served import CHAT, ask, listening, send, served, started
from starlette.exceptions import HTTPException
from starlette.requests import Request

from edgespec.cli import main
from edgespec.core.errors import InputError

TEXT, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with served(bundle, "--waiting", "1") as address:
        yield address


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/nothing", {}, 404, "there is no POST"),
        (f"{TEXT}%0a", b"{", 400, "not valid JSON"),
        (TEXT, b"[]", 400, "no JSON object"),
        (TEXT, b"{", 400, "not valid JSON"),
        (TEXT, b"[" * 100_000, 400, "nests deeper than 64 levels"),
        (TEXT, b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, "value has 5000 digits"),
        (TEXT, b'{"prompt": "a", "prompt": "b"}', 400, "twice"),
        (TEXT, b'{"temperature": NaN}', 400, "NaN"),
        (TEXT, {"prompt": 5}, 400, "prompt is 5; it must be a text or a list of token ids below 512"),
        (TEXT, {"prompt": [512]}, 400, "token ids below 512"),
        (TEXT, {"prompt": [True]}, 400, "token ids"),
        (TEXT, {"prompt": []}, 400, "the prompt is empty"),
        (TEXT, {"prompt": [5] * 300}, 400, "the context holds 256"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature is -1; a number from 0 to 100"),
        (TEXT, {"prompt": "a", "max_tokens": "many"}, 400, 'max_tokens is "many"; a whole number'),
        (TEXT, {"prompt": "a", "logprobs": 10**6}, 400, "logprobs is 1000000; a whole number from 0 to 256"),
        (TEXT, {"prompt": "a", "n": 2}, 400, "n is 2; it is not supported"),
        (
            TEXT,
            {"prompt": "a", "stop": [""]},
            400,
            'stop is [""]; an empty text stands at the start of every reply',
        ),
        (TEXT, {"prompt": "a", "model": "other"}, 404, 'there is no model "other"; this is "target"'),
        (CHATS, {"messages": []}, 400, "messages is []; it must be a list of 1 to 4096"),
        (CHATS, {"messages": [{"role": "user"}]}, 400, "messages[0].content is missing; it must be a text"),
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
    error = ask(url, CHATS, body)[1]["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    error = ask(url, CHATS, {**CHAT, "model": "other"})[1]["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = ask(url, CHATS, {**CHAT, "n": 2})[1]["error"]
    assert (error["param"], error["code"]) == ("n", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'),
        (CHATS, rb'{"messages": [{"role": "\ud83d", "content": "a"}]}'),
        (TEXT, rb'{"prompt": "cut \ud83d"}'),
        (TEXT, rb'{"prompt": "a", "model": "\udfff"}'),
        (TEXT, rb'{"prompt": "a", "temperature": "\ud83d"}'),
        (TEXT, rb'{"prompt": "a", "\ud83d": 1}'),
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
    status, answer = ask(url, TEXT, body, Host="evil.example")
    assert status == 403
    assert "ask for localhost, or start the server with --host 0.0.0.0" in answer["error"]["message"]
    assert ask(url, "/v1/models", None, Host="evil.example:80")[0] == 403
    # what a page may send without asking
    assert ask(url, TEXT, body, Content_Type="text/plain")[0] == 415
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:80", "127.0.0.2", "[::1]", "[::1]:80"):
        assert ask(url, TEXT, body, Host=host)[0] == 200
    for host in ("", "[::1", "[::2]", "::1.evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        assert ask(url, TEXT, body, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "localhost", "127.0.0.1", "", "0.0.0.0"])
def test_addresses_of_both_kinds(bundle: Path, host: str) -> None:
    """The address that is printed answers; `::`, '' and 0.0.0.0 answer to everybody's name."""
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listening(bundle, host) as server:
        everywhere = host in ("::", "", "0.0.0.0")
        assert server.url.startswith("http://[" if ":" in host and not everywhere else "http://")
        assert ("//localhost:" in server.url) is everywhere  # not every browser opens the others
        assert ask(server.url, TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200
        stranger = ask(server.url, "/v1/models", None, Host="evil.example")[0]
        assert stranger == (200 if everywhere else 403)
        if host == "::":
            assert ask(f"http://127.0.0.1:{server.listener.address[1]}", "/health")[0] == 200


def test_another_machine_is_told_what_to_open(bundle: Path) -> None:
    with started(bundle, "--host", "0.0.0.0") as (process, url):
        assert url.startswith("http://localhost:")
        assert process.stdout is not None
        assert f"open {url}/ in a browser to chat; on another machine, " in process.stdout.readline()


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


def _raw(url: str, data: bytes) -> str:
    """The first line of the answer to bytes written by hand."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
        connection.sendall(data)
        return connection.recv(65536).decode().partition("\r\n")[0]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_sizes_are_bounded_before_they_are_read(url: str) -> None:
    length = b"Content-Length: %s\r\n\r\n"
    assert " 413 " in _raw(url, HEAD + length % str(MAX_BODY + 1).encode())
    assert " 413 " in _raw(url, HEAD + length % (b"9" * 19))
    assert " 400 " in _raw(url, HEAD + length % (b"9" * 5000))  # more digits than int() takes
    assert " 400 " in _raw(url, HEAD + length % b"-5")
    assert " 400 " in _raw(url, HEAD + b"\r\n")  # no body
    assert " 400 " in _raw(url, HEAD + b"X: " + b"a" * 70_000)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    assert " 413 " in _raw(url, chunked + 9 * chunk)
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert " 200 " in _raw(url, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    code, answer = ask(url, TEXT, {"prompt": "[" * (MAX_BRACKETS + 1)})[:2]
    assert (code, "brackets" in answer["error"]["message"]) == (413, True)
    assert ask(url, "/health")[0] == 200


def test_a_body_that_breaks_is_answered_once(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Behind its answer and before it. Nothing is printed: anybody can send one, without a key too."""
    chunked, broken = b"Transfer-Encoding: chunked\r\n\r\n", b"no chunk\r\n"
    with listening(bundle, key="k") as server:
        for first, then, status in (
            (HEAD + chunked, broken, 401),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + chunked + broken, b"", 400),
        ):
            with socket.create_connection(server.listener.address, timeout=30) as client:
                client.sendall(first)
                seen = client.recv(65536)
                client.sendall(then)
                while part := client.recv(65536):
                    seen += part
            assert seen.startswith(b"HTTP/1.1 %d " % status)
            assert seen.count(b"HTTP/1.1") == 1
            assert ask(server.url, "/health")[0] == 200
    assert [record.message for record in caplog.records if record.name in ("asyncio", "uvicorn.error")] == []


def test_no_more_log_probabilities_than_memory_has_room_for(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_SCORES", 30)
    asked = {"prompt": [5, 6], "max_tokens": 3, "logprobs": 6}
    with listening(bundle) as server:
        assert ask(server.url, TEXT, {**asked, "logprobs": 10})[0] == 200
        assert ask(server.url, TEXT, {**asked, "echo": True})[0] == 200
        code, answer = ask(server.url, TEXT, {**asked, "echo": True, "logprobs": 7})[:2]
    assert (code, answer["error"]["param"]) == (400, "logprobs")
    assert "makes 35 of them; at most 30" in answer["error"]["message"]


def test_a_prompt_of_ten_megabytes(url: str) -> None:
    """The client has sent all of it before it reads the answer, and the connection goes on."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=30)
    for text, status, words in (
        ("a" * 10 * 2**20, 413, "at most"),
        ("a " * 2**21, 400, "the context holds 256"),
    ):
        for path, field in (
            (TEXT, {"prompt": text}),
            (CHATS, {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
        ):
            connection.request("POST", path, json.dumps(field), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            assert answer.status == status
            assert words in error["message"]
            assert (error["code"] == "context_length_exceeded") is (status == 400)
    connection.close()


def test_a_client_that_leaves_frees_the_next(url: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 200, "temperature": 1, "stream": True}).encode()
    parts = urlsplit(url)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    for _ in range(4):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
            connection.sendall(head + body)
            connection.recv(64)
    for _ in range(100):
        status, _ = ask(url, TEXT, {"prompt": "a", "max_tokens": 1})
        if status == 200:
            break
    assert status == 200


@pytest.mark.parametrize("good_passes", [0, 4])
def test_an_engine_that_fails_is_said(
    bundle: Path, good_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first piece as a status, in the middle of a stream as an event that is no piece; never as half an answer."""
    with listening(bundle) as server:
        engine = server.service.pair.target.engine
        forward, left = engine.forward, [good_passes]

        def failing(tokens: list[int]) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("out of memory")
            return forward(tokens)

        monkeypatch.setattr(engine, "forward", failing)
        body = {**CHAT, "stream": True, "max_tokens": 60, "seed": 1, "temperature": 9}
        answer, text = send(server.url, CHATS, body)
        assert answer.status == (200 if good_passes else 500)
        last = [line for line in text.split("\n") if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "out of memory" in error["message"]
        assert "HTTP/1.1" not in text
        left[0] = 10_000
        assert ask(server.url, CHATS, CHAT)[0] == 200


def test_a_port_that_is_taken(bundle: Path, url: str) -> None:
    with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1 port \d+: .*give another --port"):
        serve.run({"bundle": str(bundle), "port": urlsplit(url).port})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cors": "https://page.example/path"}, "cors is 'https://page.example/path'; an origin such as"),
        ({"cors": "*\r\nX-Injected: 1"}, "an origin such as"),
        ({"api_key": "two words"}, "the API key has a character that a header cannot carry"),
        ({"api_key": "schl\u00fcssel"}, "the API key has a character"),
        ({"port": 70000}, "port is 70000; it must be at most 65535"),
    ],
)
def test_options_that_cannot_be(bundle: Path, given: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        serve.run({"bundle": str(bundle), **given})


def test_the_key_may_come_from_the_environment(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.API_KEY, "from-outside")
    with served(bundle) as address:
        assert ask(address, "/v1/models")[0] == 401
        assert ask(address, "/v1/models", None, Authorization="Bearer from-outside")[0] == 200


def test_without_its_packages_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before the bundle is looked at; the help needs none of them."""
    for name in [
        name
        for name in sys.modules
        if name.startswith(("edgespec_runtime.serving", "starlette", "sse_starlette", "uvicorn"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("starlette", "sse_starlette", "uvicorn", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "no/such/bundle"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ", which is not installed: " in error
    assert 'pip install "edgespec[serve]"' in error
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "EDGESPEC_API_KEY" in capsys.readouterr().out


def test_a_host_that_is_none_makes_no_traceback() -> None:
    """Where the server listens to the network, anybody can send one."""
    scope = {"type": "http", "method": "GET", "path": "/nothing", "headers": [(b"host", b"[")]}
    answer = asyncio.run(HANDLERS[HTTPException](Request(scope), HTTPException(404)))  # type: ignore[arg-type]
    assert answer.status_code == 404
