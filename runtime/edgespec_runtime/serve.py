"""Serve a bundle over HTTP to programs that speak OpenAI's protocol: /v1/completions, /v1/chat/completions, with speculation.

One request is answered at a time, others wait their turn. It listens on this machine alone unless told otherwise and asks nobody
for a password; requests have bounds in size, time and number.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError, InputError
from edgespec.files import parse_json
from edgespec.options import from_mapping, knob
from edgespec_runtime.bundle import LoadOptions, open_pair
from edgespec_runtime.serve_api import ROUTES, Events, Refused, Service

MAX_BODY = 8 * 1024 * 1024
SECONDS_TO_READ = 30.0  # a client that is slower to send its request is hung up on
LOCAL = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


@dataclass(frozen=True, kw_only=True)
class Options(LoadOptions):
    bundle: str = knob(help="bundle folder", positional=True)
    host: str = knob(
        "127.0.0.1", "address to listen on; anything but this machine is open to whoever reaches it"
    )
    port: int = knob(8080, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    name: str = knob("", "the model's name for clients (default: the target's)")
    draft: bool = knob(True, "speculate with the drafter")
    draft_length: int | None = knob(
        None,
        "draft tokens in a block (γ) (default: chosen block by block from costs measured on this machine)",
        at_least=1,
    )
    waiting: int = knob(16, "requests that may wait; further ones are told to come back", at_least=0)


OPTIONS = Options


class Server(ThreadingHTTPServer):
    """The service behind sockets; `turns` bounds the requests that are inside."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service, waiting: int) -> None:
        super().__init__(address, Handler)
        self.service, self.turns = service, threading.BoundedSemaphore(waiting + 1)
        self.local = address[0] in LOCAL

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news; a mistake of ours is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_READ
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: prompts are nobody else's business."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        try:
            self._check_host()
            action = ROUTES.get((method, urlsplit(self.path).path))
            if action is None:
                raise Refused(404, f"there is no {method} {self.path[:200]}")
            body = self._body() if method == "POST" else {}
            if not self.server.turns.acquire(blocking=False):
                raise Refused(503, "too many requests are waiting; try again in a second")
            try:
                answer = action(self.server.service, body)
                if isinstance(answer, Generator):
                    with closing(answer):  # also where the client leaves: the next request gets its turn
                        self._stream(answer)
                else:
                    self._send(200, answer)
            finally:
                self.server.turns.release()
        except Refused as error:
            self._refuse(error.status, str(error))
        except EdgespecError as error:
            self._refuse(400 if isinstance(error, InputError) else 500, str(error))

    def _check_host(self) -> None:
        """A page in a browser must not reach a local server by a name of its own for this address (DNS rebinding)."""
        host = self.headers.get("Host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if self.server.local and name not in LOCAL:
            raise Refused(403, f"the host {host[:100]!r} is not this machine")

    def _body(self) -> dict[str, Any]:
        kind = self.headers.get_content_type()
        if kind != "application/json":
            raise Refused(415, f"the body is {kind}; application/json is wanted")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused(411, "the body has no Content-Length")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            raise Refused(413, f"the body has {length[:20]} bytes; at most {MAX_BODY} are read")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise Refused(400, f"the body ends after {len(data)} of {length} bytes")
        value = parse_json(data, "the request", strict=True)
        if not isinstance(value, dict):
            raise Refused(400, "the body is no JSON object")
        return value

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Events) -> None:
        """Server-sent events; the connection's end is the stream's."""
        first = next(events)  # what is wrong with a request shows here, before a status is sent
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event(first)
        for event in events:
            self._event(event)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # of a body that was not read, the rest would look like the next request
        self._send(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    pair = open_pair(Path(options.bundle), options, with_draft=options.draft)
    try:
        service = Service(pair, options.name or pair.manifest.target.name, options.draft_length)
        try:
            server = Server((options.host, options.port), service, options.waiting)
        except OSError as error:
            raise InputError(
                f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; give another --port or --host"
            ) from error
        with server:
            host, port = server.server_address[:2]
            print(f"serving {service.name} at http://{host!s}:{port}/v1 ({pair.exactness()})", flush=True)
            server.serve_forever()
        return 0
    finally:
        pair.close()
