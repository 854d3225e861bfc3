"""Clients that leave `edgespec serve`: their reply stops before the next pass of a model, and the next client has its turn."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.serving.line import ClientLeft, Full, Line, Watch
from edgespec_runtime.serving.listening import Server
from gate import LONG, SHORT, Gate, connected, gated, until
from served import ask, listening


def let(gate: Gate, count: int) -> None:
    """Let so many more passes begin, and the last of them wait."""
    begun = len(gate.sizes)
    for number in range(count):
        until(lambda number=number: len(gate.sizes) > begun + number - 1)  # type: ignore[misc]
        gate.passes.release()
    until(lambda: len(gate.sizes) >= begun + count)


def next_is_answered(server: Server, gate: Gate) -> int:
    """Ask for one token with every pass allowed once the server has seen everybody leave; passes begun before its answer."""
    until(lambda: all(job.left for job in list(server.line._jobs)))
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
            words = b"".join(iter(lambda: client.recv(4096), b""))
            assert b"[DONE]" not in words
            assert b"usage" not in words
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
        until(lambda: len(server.line) == 3)
        for client in waiting:
            client.close()
        until(lambda: len(server.line) == 1)  # while the first one's pass is still under way
        assert len(gate.sizes) == 1
        first.close()
        assert next_is_answered(server, gate) == OWN


def test_what_was_sent_behind_the_request_hides_nobodys_leaving(bundle: Path) -> None:
    with gated(bundle) as (server, gate):
        client = connected(server, LONG, behind=b"\r\n" * 20_000)
        until(lambda: len(gate.sizes) == 1)
        client.close()
        assert next_is_answered(server, gate) == OWN


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
        connection = http.client.HTTPConnection(*server.listener.address, timeout=30)
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


def test_jobs_are_done_in_the_order_of_arrival() -> None:
    """And their items come whole and in order, however many are made before the event loop looks."""
    seen: list[int] = []

    def work(number: int) -> Callable[[Watch], Iterator[int]]:
        def make(watch: Watch) -> Iterator[int]:
            seen.append(number)
            yield from range(number * 1000)

        return make

    async def main() -> None:
        line = Line(waiting=8)
        jobs = [line.submit(work(number)) for number in range(8)]
        for number, job in enumerate(jobs):
            made: list[int] = []
            while batch := await job.batch():
                made += batch
            assert made == list(range(number * 1000))
        await asyncio.to_thread(line.close)

    asyncio.run(main())
    assert seen == list(range(8))


def test_a_line_drops_who_left_at_once_and_tells_who_is_being_served() -> None:
    begun, go = threading.Event(), threading.Event()
    done: list[str] = []

    def slow(watch: Watch) -> Iterator[int]:
        begun.set()
        assert go.wait(30)
        watch()
        done.append("slow")
        yield 1

    def quick(watch: Watch) -> Iterator[int]:
        done.append("quick")
        yield 2

    async def main() -> None:
        line = Line(waiting=1)
        first = line.submit(slow)
        assert begun.wait(30)
        second = line.submit(quick)
        with pytest.raises(Full):
            line.submit(quick)
        line.leave(second)
        assert (len(line), first.left) == (1, False)
        assert await second.batch() == []
        third = line.submit(quick)
        line.leave(first)
        assert (len(line), first.left, third.left) == (2, True, False)
        go.set()
        with pytest.raises(ClientLeft):
            await first.batch()
        assert await third.batch() == [2]
        await asyncio.to_thread(line.close)
        with pytest.raises(Full):
            line.submit(quick)

    asyncio.run(main())
    assert done == ["quick"]


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
