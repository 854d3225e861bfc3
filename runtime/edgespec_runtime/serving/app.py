"""The server as an ASGI application: routes, bounds on what is read, replies whole and in pieces.

Knows HTTP and the line of jobs. What a request means and is answered: api.py; who may ask: access.py; sockets, and clients that
are slow: listening.py.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import TypeVar

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.core.errors import EdgespecError
from edgespec.core.files import parse_json
from edgespec.core.texts import check_json
from edgespec_runtime.serving.access import Access, Guard
from edgespec_runtime.serving.api import POSTS, Asked, Json, Service
from edgespec_runtime.serving.errors import HANDLERS, LEFT, JsonAnswer, error_of, refused_by
from edgespec_runtime.serving.line import ClientLeft, Closed, Full, Job, Line, Watch
from edgespec_runtime.serving.metrics import CONTENT_TYPE, Metrics
from edgespec_runtime.serving.page import front_page
from edgespec_runtime.serving.request import Refused

MAX_BODY = 8 * 1024 * 1024
MAX_BODIES = 8 * MAX_BODY  # of all requests that are being read
MAX_BRACKETS = 200_000  # in a body: as values in memory, empty lists take 30 times their bytes
SMALL = 4 * 1024  # bytes that are read and tokenised in about the time that a thread takes to begin
SECONDS_TO_READ = 30.0  # a client that is slower to send its request, or to take its answer, is hung up on
SECONDS_UNTIL_STREAM = 10.0  # then a stream begins with pings: proxies give up on silence
LONGEST_RETRY = 60  # seconds that a client is told to wait at most
LINE_ENDS = {
    code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)
}  # to some clients; in JSON they stand in texts alone

T = TypeVar("T")


class _Counted:
    """Outermost: counts what was answered, and how long it took."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app, self._sums, self._paths = app, service.sums, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = perf_counter(), "left"
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            left = scope.get(LEFT, False)
            self._sums.answered(path, "left" if left else status, perf_counter() - start)


class _Stream(EventSourceResponse):
    """Server-sent events of a job; whoever leaves, or takes too little, ends it."""

    def __init__(self, line: Line, job: Job[Json], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, sep="\n", ping=SECONDS_UNTIL_STREAM)
        self._line, self._job = line, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = ended = False

        async def noting(message: Message) -> None:
            nonlocal begun, ended
            begun, ended = True, not message.get("more_body", True)
            await send(message)

        try:
            await super().__call__(scope, receive, noting)
            if begun and not ended:  # the server was stopped
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._line.leave(self._job)


class _Answers:
    """The endpoints."""

    def __init__(self, service: Service, line: Line) -> None:
        self._service, self._line = service, line
        self._reading = 0  # bytes of bodies

    async def post(self, path: str, request: Request) -> Response:
        async with self._body(request) as data:
            self._check_line()
            if len(data) <= SMALL:
                asked = self._read(path, data)
            else:
                asked = await asyncio.to_thread(self._read, path, data)
        return await self._reply(request, asked) if isinstance(asked, Asked) else JsonAnswer(asked)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Everything the client sends, within bounds. Raises Refused."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"the body is {kind[:100] or 'of no type'}; application/json is wanted")
        length = request.headers.get("content-length", "0")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            raise Refused(413, f"the body has {length[:20]} bytes; at most {MAX_BODY} are read")
        data = bytearray()
        try:
            async with asyncio.timeout(SECONDS_TO_READ):
                async for chunk in request.stream():
                    data += chunk
                    self._reading += len(chunk)
                    if len(data) > MAX_BODY:
                        raise Refused(413, f"the body has more than {MAX_BODY} bytes; send a shorter one")
                    if self._reading > MAX_BODIES:
                        raise self._busy("too many requests are being read")
            yield data
        except TimeoutError as error:
            words = f"the body did not come within {SECONDS_TO_READ:g} seconds, {len(data)} bytes of it did"
            raise Refused(408, words) from error
        finally:
            self._reading -= len(data)

    def _read(self, path: str, data: bytearray) -> Asked | Json:
        """What is asked. A long prompt takes long: seconds for a megabyte."""
        opened = data.count(b"{") + data.count(b"[")
        if opened > MAX_BRACKETS:
            raise Refused(413, f"the body opens {opened} brackets; at most {MAX_BRACKETS} are read")
        body = bytes(data)
        value = parse_json(body, "the request", strict=True)
        if not isinstance(value, dict):
            raise Refused(400, "the body is no JSON object")
        check_json(body.decode(), value, "the request")
        return POSTS[path](self._service, value)

    def _check_line(self) -> None:
        try:
            self._line.check()
        except Full as error:
            raise self._busy(str(error)) from error

    def _busy(self, words: str) -> Refused:
        """A place is free after about one reply."""
        seconds = min(LONGEST_RETRY, max(1, math.ceil(self._service.sums.seconds_a_reply)))
        return Refused(503, f"{words}; try again in {seconds} s", retry_after=seconds)

    async def _reply(self, request: Request, asked: Asked) -> Response:
        self._check_line()
        sums, start = self._service.sums, perf_counter()

        def work(watch: Watch) -> Iterator[Json]:
            sums.waited(perf_counter() - start)
            yield from self._service.answers(asked, watch)

        job = self._line.submit(work)
        gone = asyncio.create_task(self._leave_with(request.receive, job))
        stays = False
        try:
            first = await _within(SECONDS_UNTIL_STREAM if asked.request.stream else None, job)
            if first == []:  # it was dropped
                raise ClientLeft
            if first is not None and not asked.request.stream:
                return JsonAnswer(first[0])
            stays = True
            return _Stream(self._line, job, _events(job, first))
        except Closed as error:
            raise self._busy("the server is being stopped") from error
        finally:
            gone.cancel()
            if not stays:
                self._line.leave(job)

    async def _leave_with(self, receive: Receive, job: Job[Json]) -> None:
        """Give the place up when the client does."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._line.leave(job)


async def _within(patience: float | None, job: Job[T]) -> list[T] | None:
    """A job's first batch; None where it takes longer than `patience` seconds."""
    try:
        async with asyncio.timeout(patience) as limit:
            return await job.batch()
    except TimeoutError:
        if not limit.expired():
            raise
        return None


async def _events(job: Job[Json], batch: list[Json] | None) -> AsyncIterator[bytes]:
    """Server-sent events of what a job makes; what comes at once is sent at once."""
    try:
        while batch is None or batch:
            if batch:
                yield b"".join(map(_event, batch))
            batch = await job.batch()
    except EdgespecError as error:  # too late for a status
        yield _event(error_of(refused_by(error)))
    except (ClientLeft, Closed):
        pass
    else:
        yield b"data: [DONE]\n\n"


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).translate(LINE_ENDS).encode() + b"\n\n"


def application(service: Service, line: Line, access: Access) -> Starlette:
    """Everything behind one address."""
    answers, metrics, page = _Answers(service, line), Metrics(service.sums, line), front_page()

    gets: dict[str, Callable[[], Response]] = {
        "/": lambda: page,
        "/health": lambda: JsonAnswer({"status": "ok"}),
        "/metrics": lambda: Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE}),
        "/v1/models": lambda: JsonAnswer(service.models()),
    }

    async def get(answer: Callable[[], Response], request: Request) -> Response:
        return answer()

    routes = [
        *(Route(path, partial(get, answer)) for path, answer in gets.items()),
        *(Route(path, partial(answers.post, path), methods=["POST"]) for path in POSTS),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients send headers of their own; origin and key are the guard
        expose_headers=["Retry-After"],
        allow_private_network=True,  # which Chromium asks for a public page that calls this machine
    )
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_Counted, service=service, paths=frozenset(route.path for route in routes)),
            *([cors] if access.origins else []),
            Middleware(Guard, access=access),
        ],
        exception_handlers=HANDLERS,
    )
