"""Serve a bundle over HTTP to programs that speak OpenAI's protocol: /v1/completions, /v1/chat/completions, with speculation.

One request is answered at a time, others wait their turn. It listens on this machine alone unless told otherwise and asks nobody
for a password; requests have bounds in size, time and number. Knows sockets and HTTP: what a request means is serve_request.py's,
what it is answered serve_api.py's.

A client that closes its side of the connection has left: its reply stops before the next pass of a model. This holds as well for
a client that closes its sending side alone and would go on reading (`nc -N`), since the two look the same; it is told so.
"""

from __future__ import annotations

import ipaddress
import json
import selectors
import socket
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import parse_json
from edgespec.core.options import from_mapping, knob, with_default
from edgespec.core.texts import check_json
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.serving.api import GETS, POSTS, Events, Service
from edgespec_runtime.serving.request import Refused
from edgespec_runtime.serving.turns import Watch

MAX_BODY = 8 * 1024 * 1024
SECONDS_TO_READ = 30.0  # a client that is slower to send its request is hung up on


@dataclass(frozen=True, kw_only=True)
class Options(LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    host: str = knob(
        "127.0.0.1",
        "address to listen on, IPv4 or IPv6; anything but this machine is open to whoever reaches it",
    )
    port: int = knob(8080, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    name: str = knob("", "the model's name for clients (default: the target's)")
    draft: bool = knob(True, "speculate with the drafter")
    draft_length: int | None = with_default(DecodingOptions, "draft_length", None)
    waiting: int = knob(16, "requests that may wait; further ones are told to come back", at_least=0)


OPTIONS = Options


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


class Server(ThreadingHTTPServer):
    """The service behind sockets; `turns` bounds the requests that are inside."""

    daemon_threads = True

    def __init__(self, host: str, port: int, service: Service, waiting: int) -> None:
        self.address_family, address = _resolved(host, port)
        super().__init__(address, Handler)
        self.service, self.turns = service, threading.BoundedSemaphore(waiting + 1)
        self.local = _is_local(str(self.server_address[0]))

    def server_bind(self) -> None:
        """`::` is every address of this machine, those of IPv4 as well."""
        if self.address_family == socket.AF_INET6:
            with suppress(OSError, AttributeError):  # not on every platform
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news; a mistake of ours is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """(family, address) of a name or an IPv4 or IPv6 address, with or without brackets. Raises OSError where there is none."""
    name = host.removeprefix("[").removesuffix("]") if ":" in host else host
    found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(
        found, key=lambda one: one[0] != socket.AF_INET
    )  # of a name with both, IPv4
    return family, address


def _is_local(host: str) -> bool:
    """Whether a host is a name or an address of this machine that nobody else can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


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
            path = urlsplit(self.path).path
            if method == "GET" and path in GETS:
                self._send(200, GETS[path](self.server.service))
            elif method == "POST" and path in POSTS:
                self._post(path)
            else:
                raise Refused(404, f"there is no {method} {self.path[:200]}")
        except Refused as error:
            self._refuse(error)
        except EdgespecError as error:
            self._refuse(Refused(400 if isinstance(error, InputError) else 500, str(error)))
        except ClientLeft as error:
            self._refuse(Refused(400, str(error)))

    def _post(self, path: str) -> None:
        body = self._body()
        if not self.server.turns.acquire(blocking=False):
            raise Refused(503, "too many requests are waiting; try again in a second")
        try:
            with self._watching() as watch:
                answer = POSTS[path](self.server.service, body, watch)
                if isinstance(answer, Generator):
                    with closing(answer):  # also where the client leaves: the next request gets its turn
                        self._stream(answer)
                else:
                    self._send(200, answer)
        finally:
            self.server.turns.release()

    @contextmanager
    def _watching(self) -> Iterator[Watch]:
        """What raises ClientLeft where the client has closed its side of the connection; a call takes two microseconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)

            def watch() -> None:
                if selector.select(0) and self._has_ended():
                    raise ClientLeft(
                        "the client closed its sending side before the answer was ready; keep the connection open until then"
                    )

            yield watch

    def _has_ended(self) -> bool:
        """Read what has come; whether that is the end. Other bytes are thrown away: they would hide the end behind them."""
        self.close_connection = True
        try:
            return not self.connection.recv(65536)
        except ConnectionError:  # reset
            return True

    def _check_host(self) -> None:
        """A page in a browser must not reach a local server by a name of its own for this address (DNS rebinding)."""
        host = self.headers.get("Host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # a bracket without the other
            name = ""
        if self.server.local and not _is_local(name):
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
        check_json(data.decode(), value, "the request")
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
        try:
            for event in events:
                self._event(event)
        except EdgespecError as error:  # too late for a status
            self._event(_error(Refused(500, str(error))))
        except ClientLeft:
            pass
        else:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        self.wfile.flush()

    def _refuse(self, error: Refused) -> None:
        self.close_connection = True  # of a body that was not read, the rest would look like the next request
        self._send(error.status, _error(error))


def _error(error: Refused) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    pair = open_pair(Path(options.bundle), options, with_draft=options.draft)
    try:
        service = Service(pair, options.name or pair.manifest.target.name, options.draft_length)
        try:
            server = Server(options.host, options.port, service, options.waiting)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {options.host} port {options.port}: {reason}; give another --port or --host"
            ) from error
        with server:
            print(f"serving {service.name} at {server.url}/v1 ({pair.exactness()})", flush=True)
            server.serve_forever()
        return 0
    finally:
        pair.close()
