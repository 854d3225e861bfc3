"""Sockets: where the server listens, and clients that are slow to ask or to take their answer. Knows no requests."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from h11 import LocalProtocolError
from uvicorn import Config
from uvicorn import Server as Uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.core.errors import InputError
from edgespec_runtime.serving.access import Access, is_local
from edgespec_runtime.serving.api import Service
from edgespec_runtime.serving.app import SECONDS_TO_READ, application
from edgespec_runtime.serving.line import Line

MAX_CONNECTIONS = 256  # beyond them a request is answered with 503
MAX_SOCKETS = 512  # beyond them a connection is closed unanswered; a process may usually open 1024 files
MAX_HEAD = 64 * 1024  # bytes of a request's line and headers
# An idle connection: longer than clients keep theirs (5 s in httpx), or they send into a closed one.
SECONDS_KEPT = 30
SECONDS_TO_END = 5  # for what is being sent when the server is stopped


class Listener:
    """A socket that listens; open from the start, so that a port in use is known before a model is loaded.

    Attributes:
        address: host and port.
        is_local: whether nobody but this machine can reach it.
        is_everywhere: whether it listens on every address of this machine.
        url: as this machine's browser opens it.

    Raises InputError where it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            family, address = _resolved(host, port)
            # asyncio sends small pieces at once (TCP_NODELAY) only where the protocol is named
            self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            try:
                self._listen(family, address)
            except OSError:
                self.socket.close()
                raise
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {host} port {port}: {reason}; give another --port or --host"
            ) from error
        host, port = self.address = self.socket.getsockname()[:2]
        self.is_local, self.is_everywhere = is_local(host), ip_address(host).is_unspecified
        name = "localhost" if self.is_everywhere else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port}"

    def _listen(self, family: int, address: Any) -> None:
        if os.name == "posix":  # elsewhere it would let two programs share the port
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds clients that vanished
        if family == socket.AF_INET6:  # `::` is every address of this machine, those of IPv4 as well
            with suppress(OSError, AttributeError):  # not on every platform
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(address)
        self.socket.listen()
        self.socket.setblocking(False)


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """(family, address) of a name or an IPv4 or IPv6 address, with or without brackets. Raises OSError where there is none."""
    name = host.removeprefix("[").removesuffix("]") if ":" in host else host
    found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # of both, IPv4
    return family, address


class Patient(H11Protocol):
    """uvicorn's connection, with bounds on how long a client may take, and eyes for one that leaves.

    A request's head must be there, and what the server has written must be taken, within SECONDS_TO_READ. The body's time is
    app.py's. What a client sends behind a request that is being answered is thrown away: it would hide the end behind it.
    """

    _late: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_SOCKETS:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` means: not all was taken
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self._answering:
            self._stop_waiting()
            if not self.cycle.more_body and self.conn.trailing_data[0]:  # more than one request came at once
                self.cycle.keep_alive = False
                self.flow.resume_reading()
        else:
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """The connection's last answer. A body that goes wrong behind its answer, as behind a 401, gets no second one."""
        try:
            super().send_400_response(msg)
        except LocalProtocolError:
            self.transport.close()
        if self._answering:
            self.cycle.disconnected = True  # what the application answers now is for nobody

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(SECONDS_TO_READ, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(SECONDS_TO_READ, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(Uvicorn):
    """A service behind a listener. Where it is stopped, replies end first: their clients need not wait for the last token.

    Args:
        waiting: most requests that wait while one is answered.
    """

    def __init__(self, listener: Listener, service: Service, waiting: int, access: Access) -> None:
        self.listener, self.url, self.service, self.line = listener, listener.url, service, Line(waiting)
        super().__init__(
            Config(
                application(service, self.line, access),
                http=Patient,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                log_level="error",  # prompts are nobody else's business
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=[("X-Content-Type-Options", "nosniff")],
                limit_concurrency=MAX_CONNECTIONS,
                h11_max_incomplete_event_size=MAX_HEAD,
                timeout_keep_alive=SECONDS_KEPT,
                timeout_graceful_shutdown=SECONDS_TO_END,
            )
        )

    def serve_forever(self) -> None:
        """Until a signal, or until `should_exit` is set."""
        try:
            self.run(sockets=[self.listener.socket])
        finally:
            self.line.close()
            self.listener.socket.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self.line.close)
        await super().shutdown(sockets)
