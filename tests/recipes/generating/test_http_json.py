"""Answers over HTTP that are none, byte by byte, and addresses that are none."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import pytest
from edgespec_recipes.generating import http_json
from edgespec_recipes.generating.http_json import KEY, JsonServer, Refusal

from edgespec.core.errors import InputError, OneProcessError


@contextmanager
def answering(*pieces: bytes, status: int = 200, pause: float = 0.0) -> Iterator[JsonServer]:
    """A server that answers once with these pieces, and a pause before each."""

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):  # who asked may have left
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, sum(map(len, pieces)))
            )
            for piece in pieces:
                time.sleep(pause)
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield JsonServer(f"http://127.0.0.1:{listener.getsockname()[1]}", 5.0, 0)
        thread.join()


def test_an_answer_comes_in_pieces() -> None:
    wanted = {"a": ["é" * 1000] * 1000}
    data = json.dumps(wanted, ensure_ascii=False).encode()
    with answering(data[:7], data[7:90_001], data[90_001:], pause=0.01) as server:
        assert server.ask("/v1/models") == wanted


@pytest.mark.parametrize("answer", [b"[]", b"null", b"3", b'"text"'])
def test_an_answer_that_is_no_object_is_a_refusal(answer: bytes) -> None:
    with answering(answer) as server, pytest.raises(Refusal, match="where a JSON object is wanted"):
        server.ask("/v1/completions", {})


@pytest.mark.parametrize("words", [b"[" * 60_000, b"[1]", b"null", b'{"error": null}', b"\xff"])
def test_a_refusal_in_any_words_is_a_refusal(words: bytes) -> None:
    with answering(words, status=400) as server, pytest.raises(Refusal, match="status 400"):
        server.ask("/v1/completions", {})


def test_an_answer_has_a_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by ten seconds at every look: the socket itself need not wait, however busy the machine is."""
    monkeypatch.setattr(http_json, "monotonic", count(0, 10).__next__)
    with (
        answering(*[b" "] * 12) as server,
        pytest.raises(OneProcessError, match="takes longer than 5 seconds"),
    ):
        server.ask("/v1/completions", {})


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "127.0.0.1:8000", "ftp://host", "http://", "http://host?key=1"),
        *("http://[::1:8000", "http://host:port"),
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InputError, match="give http://HOST:PORT"):
        JsonServer(url, 1.0, 0)


@pytest.mark.parametrize("key", ["secret\n", "two words", "schlüssel"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, key)
    with pytest.raises(InputError, match=f"the key in {KEY} has a character") as caught:
        JsonServer("http://127.0.0.1:9", 1.0, 0)
    assert key.strip() not in str(caught.value)


def test_a_name_that_is_no_hosts() -> None:
    with pytest.raises(InputError, match="did not answer in 1 tries"):
        JsonServer("http://..:80", 1.0, 0).ask("/v1/models")


def test_a_refusal_that_breaks_off_is_a_refusal() -> None:
    """The connection is reset after the head of an error, in the middle of its body."""

    def break_off(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4000\r\n\r\n{")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=break_off, args=(listener,))
        thread.start()
        with pytest.raises(Refusal, match="status 404"):
            JsonServer(f"http://127.0.0.1:{listener.getsockname()[1]}", 5.0, 0).ask("/v1/models")
        thread.join()
