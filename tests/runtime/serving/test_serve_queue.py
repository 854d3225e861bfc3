"""Many clients of `edgespec serve` at once, clients that are slow, a server that is killed, and what `/metrics` says of it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from edgespec_runtime.serving import app
from edgespec_runtime.serving import listening as sockets
from gate import HEAD, LONG, SHORT, connected, gated, until
from prometheus_client.parser import text_string_to_metric_families
from served import CHAT, ask, listening, send, started, stream


def metrics(url: str) -> dict[str, float]:
    """The samples of `/metrics`, those with labels as name{a,b}."""
    answer, text = send(url, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels[name] for name in sorted(sample.labels))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_beyond_the_queue_a_client_is_told_when_to_come_back(bundle: Path) -> None:
    """One is answered and one waits: the third hears 503. Who asks for no reply is answered."""
    with gated(bundle, waiting=1) as (server, gate), ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(ask, server.url, "/v1/completions", SHORT)]
        until(lambda: len(gate.sizes) == 1)
        inside.append(pool.submit(ask, server.url, "/v1/completions", SHORT))
        until(lambda: len(server.line) == 2)
        connection = http.client.HTTPConnection(*server.listener.address, timeout=30)
        for body in (SHORT, {**SHORT, "stream": True}):
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["type"]) == (503, "server_error")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert "try again in" in error["message"]
        connection.close()
        assert ask(server.url, "/health")[0] == ask(server.url, "/v1/models")[0] == 200
        seen = metrics(server.url)
        assert (seen["llamacpp:requests_processing"], seen["llamacpp:requests_deferred"]) == (1, 1)
        assert seen["edgespec_requests_total{/v1/completions,503}"] == 2
        gate.passes.release(100)
        assert [one.result()[0] for one in inside] == [200, 200]
        # the last byte of an answer is sent before its request counts as done
        until(lambda: metrics(server.url)["llamacpp:requests_processing"] == 0)


def test_eight_at_once_are_answered_as_one_alone(bundle: Path) -> None:
    bodies = [
        {
            "prompt": [5 + number, 9],
            "max_tokens": 5 + number,
            "temperature": 0.0 if number % 2 else 1.0,
            "seed": number,
        }
        for number in range(8)
    ]
    with listening(bundle, waiting=16) as server:
        alone = [ask(server.url, "/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]

        def both(body: dict[str, Any]) -> tuple[str, str]:
            whole = ask(server.url, "/v1/completions", body)[1]["choices"][0]["text"]
            parts = stream(server.url, "/v1/completions", body)
            return whole, "".join(part["choices"][0]["text"] for part in parts)

        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                assert list(pool.map(both, bodies)) == [(text, text) for text in alone]
        until(lambda: len(server.line) == 0)  # the last byte of a stream is read before its place is free


def test_metrics_add_up(bundle: Path) -> None:
    with listening(bundle) as server:
        assert metrics(server.url)["llamacpp:tokens_predicted_total"] == 0
        usages = [ask(server.url, "/v1/chat/completions", CHAT)[1]["usage"] for _ in range(2)]
        usages.append(
            stream(server.url, "/v1/completions", {**LONG, "stream_options": {"include_usage": True}})[-1][
                "usage"
            ]
        )
        ask(server.url, "/v1/completions", {**SHORT, "n": 2})
        ask(server.url, '/no/such/path"}', {})
        seen = metrics(server.url)
    speculation = [usage["speculation"] for usage in usages]
    assert seen["llamacpp:tokens_predicted_total"] == sum(usage["completion_tokens"] for usage in usages)
    computed = [
        usage["prompt_tokens"] - 1 - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    ]
    assert computed[1] == 0 < computed[0]
    assert seen["llamacpp:prompt_tokens_total"] == sum(computed)
    for name, field in (("draft_tokens", "drafted"), ("accepted_tokens", "accepted"), ("blocks", "blocks")):
        assert seen[f"edgespec_{name}_total"] == sum(one[field] for one in speculation) > 0
    for name in ("tested", "accepted"):
        for place in range(3):
            assert seen[f"edgespec_{name}_by_position_total{{{place + 1}}}"] == sum(
                one[f"{name}_by_position"][place] for one in speculation
            )
    llama = "llamacpp:spec_decode_num"
    for name in ("draft_tokens", "accepted_tokens"):
        assert seen[f"{llama}_{name}_total"] == seen[f"edgespec_{name}_total"]
    assert seen[f"{llama}_drafts_total"] == seen["edgespec_tested_by_position_total{1}"]
    assert (
        seen[f"{llama}_accepted_tokens_per_pos_total{{0}}"] == seen["edgespec_accepted_by_position_total{1}"]
    )
    parts = [seen[f"edgespec_decoding_seconds_total{{{part}}}"] for part in ("draft", "verify", "rest")]
    assert seen["llamacpp:tokens_predicted_seconds_total"] == pytest.approx(sum(parts), rel=1e-3)
    assert seen["edgespec_requests_total{/v1/completions,400}"] == 1
    assert seen["edgespec_requests_total{other,404}"] == 1
    assert seen["edgespec_queue_seconds_count"] == 3


def test_a_stream_that_waits_long_begins_with_pings(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECONDS_UNTIL_STREAM", 0.05)
    with gated(bundle) as (server, gate), connected(server, {**SHORT, "stream": True}) as client:
        until(lambda: len(gate.sizes) == 1)
        seen = b""
        while b": ping" not in seen:
            seen += client.recv(4096)
        assert seen.startswith(b"HTTP/1.1 200")
        assert b"data:" not in seen
        gate.passes.release(100)
        while b"[DONE]" not in seen:
            seen += client.recv(4096)
        assert seen.count(b"data: {") == 2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of a tenth of a second."""
    for module in (app, sockets):
        monkeypatch.setattr(module, "SECONDS_TO_READ", 0.1)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/compl", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b""),
        (HEAD.encode() + b"100\r\n\r\n" + b'{"prompt"', b" 408 "),
    ],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_clients_that_never_finish_are_hung_up_on(
    bundle: Path, hasty: None, sent: bytes, answer: bytes
) -> None:
    with listening(bundle) as server, socket.create_connection(server.listener.address, timeout=30) as client:
        client.sendall(sent)
        assert answer in b"".join(iter(lambda: client.recv(4096), b""))
        assert ask(server.url, "/v1/completions", SHORT)[0] == 200


def test_a_client_that_takes_nothing_is_hung_up_on(
    bundle: Path, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers are full in the middle of a stream: the reply ends, and the next one has its turn."""
    with listening(bundle) as server:
        made = server.service._parts

        def heavy(*given: Any, **named: Any) -> Iterator[dict[str, Any]]:
            for part in made(*given, **named):
                yield {**part, "weight": "x" * 2**20}

        monkeypatch.setattr(server.service, "_parts", heavy)
        with connected(server, {**LONG, "stream": True}) as client:
            until(lambda: len(server.line) == 0)
            until(lambda: not server.server_state.connections)
            assert client.recv(10).startswith(b"HTTP/1.1 2")
        monkeypatch.undo()
        assert ask(server.url, "/v1/completions", SHORT)[0] == 200


def test_a_client_that_vanishes_behind_a_kept_connection_takes_no_place(bundle: Path) -> None:
    with gated(bundle, waiting=0) as (server, gate):
        client = connected(server, LONG)
        until(lambda: len(gate.sizes) == 1)
        assert ask(server.url, "/v1/completions", SHORT)[0] == 503
        client.close()
        until(lambda: all(job.left for job in list(server.line._jobs)))
        gate.passes.release(500)
        until(lambda: len(server.line) == 0)
        assert ask(server.url, "/v1/completions", SHORT)[0] == 200
        seen = metrics(server.url)
        statuses = [
            seen[f"edgespec_requests_total{{/v1/completions,{status}}}"] for status in ("left", "503", "200")
        ]
        assert statuses == [1, 1, 1]


def test_a_killed_server_starts_again_on_its_port(bundle: Path) -> None:
    """Killed with eight streams open: not all of them see the mark of an end, none hangs, and the next server answers as ever."""
    body = json.dumps({**LONG, "stream": True, "temperature": 9}).encode()
    port, answers = "0", []
    for _ in range(2):
        with started(bundle, "--port", port) as (process, url), ExitStack() as opened:
            port = str(urlsplit(url).port)
            answers.append(ask(url, "/v1/completions", {**LONG, "max_tokens": 20})[1]["choices"])
            clients = []
            for _ in range(8):
                clients.append(
                    opened.enter_context(socket.create_connection(("127.0.0.1", int(port)), timeout=30))
                )
                clients[-1].sendall(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
            seen = [clients[0].recv(16)]
            process.kill()
            for client in clients:
                with suppress(ConnectionResetError):
                    while part := client.recv(65536):
                        seen.append(part)
            assert seen[0].startswith(b"HTTP/1.1 200")
            assert b"".join(seen).count(b"[DONE]") < 8
    assert answers[0] == answers[1]


def test_who_waits_for_a_server_that_is_stopped_hears_503(bundle: Path) -> None:
    """The one whose reply is under way, and the one in line behind it; no further pass is made."""
    with gated(bundle) as (server, gate), ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(send, server.url, "/v1/completions", LONG)]
        until(lambda: len(gate.sizes) == 1)
        asked.append(pool.submit(send, server.url, "/v1/completions", SHORT))
        until(lambda: len(server.line) == 2)
        jobs = list(server.line._jobs)
        server.should_exit = True
        until(lambda: all(job.closed for job in jobs))
        gate.passes.release(1)
        for one in asked:
            answer, text = one.result()
            error = json.loads(text)["error"]
            assert (answer.status, error["type"]) == (503, "server_error")
            assert "the server is being stopped; try again in" in error["message"]
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert len(gate.sizes) == 1


def test_ctrl_c_ends_the_streams_and_the_server(bundle: Path) -> None:
    body = json.dumps({**LONG, "stream": True, "temperature": 9}).encode()
    with started(bundle) as (process, url), ExitStack() as opened:
        address = ("127.0.0.1", urlsplit(url).port or 0)
        clients = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(8)]
        for client in clients:
            client.sendall(f"{HEAD}{len(body)}\r\n\r\n".encode() + body)
        assert clients[0].recv(16).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        for client in clients:
            with suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
