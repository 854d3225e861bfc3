"""A served bundle in a process of its own, and a server in front of it that spoils what passes through."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.serving.access import Access
from edgespec_runtime.serving.api import Service
from edgespec_runtime.serving.listening import Listener, Server
from repository import REPOSITORY

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
Spoil = Callable[[str, int, bytes], tuple[int, bytes] | None]
"""(path, number of this request, the honest answer) -> (status, body), or None to hang up."""


@contextmanager
def served(bundle: Path, *flags: str) -> Iterator[str]:
    """The address of `edgespec serve` on a free port."""
    with started(bundle, *flags) as (_, url):
        yield url


@contextmanager
def started(bundle: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `edgespec serve` and its address; on a free port unless the flags say otherwise.

    Ctrl-C is in force there: the test run itself may have been started with it ignored.
    """
    rooms = [str(REPOSITORY / room) for room in (".", "runtime")]
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [
        *(sys.executable, "-c", program, "serve", str(bundle), "--port", "0", "--draft-length", "3"),
        *flags,
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(rooms), "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving"), line
            yield process, line.split(" at ")[1].split("/v1")[0]
        finally:
            process.terminate()


@contextmanager
def listening(
    bundle: Path,
    host: str = "127.0.0.1",
    *,
    waiting: int = 4,
    draft_length: int | None = 3,
    draft: bool = True,
    key: str = "",
    origins: tuple[str, ...] = (),
) -> Iterator[Server]:
    """The server of `edgespec serve` on a free port, in this process."""
    listener = Listener(host, 0)
    pair = open_pair(bundle, LoadOptions(), with_draft=draft)
    access = Access(listener.is_local, key, origins)
    server = Server(listener, Service(pair, "target", draft_length), waiting, access)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
        pair.close()


def send(url: str, path: str, body: Any = None, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    """The answer to one request, and its text; `body` may be bytes, sent as they are."""
    parts = urlsplit(url)
    assert parts.hostname
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {
        "Content-Type": "application/json",
        **{name.replace("_", "-"): text for name, text in headers.items()},
    }
    try:
        connection.request("GET" if body is None else "POST", path, data, names)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """(status, JSON) of one request."""
    answer, text = send(url, path, body, **headers)
    return answer.status, json.loads(text) if text else None


def stream(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a streamed answer, the mark of its end left out."""
    answer, text = send(url, path, {**body, "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes | None) -> None:
        with self.server.lock:
            number = self.server.seen[self.path] = self.server.seen.get(self.path, -1) + 1
            self.server.bodies.append((self.path, body, dict(self.headers)))
        status, answer = ask(self.server.behind, self.path, body)
        spoilt = self.server.spoil(self.path, number, json.dumps(answer).encode())
        if spoilt is None:
            self.connection.close()
            return
        code, data = spoilt
        self.send_response(status if code == 200 else code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Spoiler(ThreadingHTTPServer):
    """Passes requests on to `behind`; `bodies` keeps (path, body, headers), `seen` counts the requests of each path."""

    daemon_threads = True

    def __init__(self, behind: str, spoil: Spoil) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.spoil = behind, spoil
        self.seen: dict[str, int] = {}
        self.bodies: list[tuple[str, bytes | None, dict[str, str]]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut on purpose."""


@contextmanager
def spoiling(behind: str, spoil: Spoil) -> Iterator[Spoiler]:
    with Spoiler(behind, spoil) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
