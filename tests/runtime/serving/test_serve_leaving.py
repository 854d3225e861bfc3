"""Clients that leave `edgespec serve`: their reply stops before the next pass of a model, and the next client has its turn."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_runtime.engines.engine import Engine, Logits
from edgespec_runtime.engines.session import CachedEngine
from edgespec_runtime.serving.serve import Server
from edgespec_runtime.serving.turns import Turns
from served import ask, listening

LONG = {"prompt": [5] * 200, "max_tokens": 50, "temperature": 0}  # 13 passes to read it, 50 tokens behind it
SHORT = {"prompt": [7, 8], "max_tokens": 1, "temperature": 0}
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
)


class Gate:
    """An engine whose passes wait: each takes one of `passes`. The model behind it is real.

    Attributes:
        sizes: tokens of every pass begun so far.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name, self.vocab_size, self.context_length = inner.name, inner.vocab_size, inner.context_length
        self.block_length = 16
        self.sizes: list[int] = []
        self.passes = threading.Semaphore(0)

    @property
    def n_past(self) -> int:
        return self._inner.n_past

    def forward(self, tokens: Sequence[int]) -> Logits:
        self.sizes.append(len(tokens))
        assert self.passes.acquire(timeout=30)
        return self._inner.forward(tokens)

    def rewind(self, n_past: int) -> None:
        self._inner.rewind(n_past)

    def close(self) -> None:
        self._inner.close()


@contextmanager
def gated(bundle: Path, role: str = "target", draft_length: int = 3) -> Iterator[tuple[Server, Gate]]:
    """A server whose target, or drafter, waits at a gate before every pass."""
    with listening(bundle, draft_length=draft_length) as server:
        pair = server.service.pair
        model = pair.target if role == "target" else pair.draft
        assert model is not None
        gate = Gate(model.engine)
        model.engine = gate
        try:
            yield server, gate
        finally:
            gate.passes.release(10_000)


def until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.005)


def connected(server: Server, body: dict[str, Any], *, behind: bytes = b"") -> socket.socket:
    """A client that has sent its request, and something `behind` it."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)
    client.sendall(f"{HEAD}{len(data)}\r\n\r\n".encode() + data + behind)
    return client


def let(gate: Gate, count: int) -> None:
    """Let so many more passes begin, and the last of them wait."""
    begun = len(gate.sizes)
    for number in range(count):
        until(lambda number=number: len(gate.sizes) > begun + number - 1)  # type: ignore[misc]
        gate.passes.release()
    until(lambda: len(gate.sizes) >= begun + count)


def next_is_answered(server: Server, gate: Gate) -> int:
    """Ask for one token with every pass allowed; how many passes began before its answer."""
    before = len(gate.sizes)
    gate.passes.release(200)
    status, answer = ask(server.url, "/v1/completions", SHORT)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    return len(gate.sizes) - before


# The next one's own passes: one reads its prompt, one is its only block.
OWN = 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["close", "reset", "half"])
@pytest.mark.parametrize("passes", [4, 20], ids=["in the prompt", "in the reply"])
def test_no_pass_is_made_for_who_left(bundle: Path, stream: bool, leave: str, passes: int) -> None:
    with gated(bundle) as (server, gate):
        client = connected(server, {**LONG, "stream": stream})
        until(lambda: len(gate.sizes) == 1)
        let(gate, passes)
        assert (gate.sizes[passes] == 16) is (passes < 13)
        if leave == "half":
            client.shutdown(socket.SHUT_WR)
        else:
            if leave == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        assert next_is_answered(server, gate) == OWN
        if leave == "half":
            words = b"".join(iter(lambda: client.recv(4096), b"")).decode()
            begun = stream and passes > 13
            assert words.startswith("HTTP/1.1 200" if begun else "HTTP/1.1 400")
            assert begun or "closed its sending side before the answer was ready" in words
            assert "[DONE]" not in words
            client.close()


def test_no_pass_is_made_for_who_left_in_the_drafters_prompt(bundle: Path) -> None:
    with gated(bundle, "drafter") as (server, gate):
        client = connected(server, LONG)
        until(lambda: len(gate.sizes) == 1)
        let(gate, 3)
        client.close()
        assert next_is_answered(server, gate) <= 1  # a block of one token has no draft


def test_no_pass_is_made_for_who_left_in_the_queue(bundle: Path) -> None:
    with gated(bundle) as (server, gate):
        first = connected(server, LONG)
        until(lambda: len(gate.sizes) == 1)
        waiting = [connected(server, {**LONG, "stream": stream}) for stream in (False, True)]
        until(lambda: len(server.service.turns) == 3)
        for client in waiting:
            client.close()
        until(lambda: len(server.service.turns) == 1)  # while the first one's pass is still under way
        assert len(gate.sizes) == 1
        first.close()
        assert next_is_answered(server, gate) == OWN


def test_what_was_sent_behind_the_request_hides_nobodys_leaving(bundle: Path) -> None:
    with gated(bundle) as (server, gate):
        client = connected(server, LONG, behind=b"\r\n" * 20_000)
        until(lambda: len(gate.sizes) == 1)
        client.close()
        assert OWN <= next_is_answered(server, gate) <= OWN + 2  # two looks may read what was sent


def test_who_stays_has_the_same_reply_after_others_left(bundle: Path) -> None:
    """What a reply that was cut off left in the caches is true: the next one that shares its prompt is the same as ever."""
    with gated(bundle) as (server, gate):
        gate.passes.release(500)
        whole = ask(server.url, "/v1/completions", LONG)[1]["choices"][0]
        for passes in (2, 9, 16, 21):
            gate.passes = threading.Semaphore(0)
            begun = len(gate.sizes)
            server.service.pair.target.rewind(0)
            client = connected(server, LONG)
            until(lambda begun=begun: len(gate.sizes) == begun + 1)  # type: ignore[misc]
            let(gate, passes)
            client.close()
            gate.passes.release(500)
            assert ask(server.url, "/v1/completions", LONG)[1]["choices"][0] == whole


def test_a_kept_connection_answers_again(bundle: Path) -> None:
    """Looking for who left eats nothing of the next request on the same connection."""
    import http.client

    with listening(bundle) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
        for _ in range(3):
            connection.request(
                "POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"}
            )
            used = connection.sock
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 50
            assert connection.sock is used is not None
        connection.close()


def test_turns_come_in_the_order_of_arrival() -> None:
    turns, seen = Turns(), []

    def take(number: int) -> None:
        with turns.one(lambda: None):
            seen.append(number)

    with turns.one(lambda: None):
        threads = []
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: len(turns) == number + 2)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert seen == list(range(8))
    assert len(turns) == 0


def test_what_stops_a_pass_leaves_the_cache_as_it_was(bundle: Path) -> None:
    from edgespec_runtime.pair.bundle import LoadOptions, open_pair

    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    model: CachedEngine = pair.target
    model.forward([5, 6, 7])
    model.before_pass = stop
    with pytest.raises(Stop):
        model.forward([8])
    model.before_pass = None
    assert (model.tokens, model.engine.n_past) == ([5, 6, 7], 3)
    seen = model.forward([8]).copy()
    model.rewind(0)
    model.forward([5, 6, 7])
    np.testing.assert_array_equal(model.forward([8]), seen)
    pair.close()
