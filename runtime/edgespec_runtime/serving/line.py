"""One thread that does one job at a time, in the order of arrival, for an event loop. Knows neither HTTP nor models.

A job is a function that makes items; the event loop reads all that are there at once. Whoever waits can leave: a job that has not
begun is dropped at once, one that runs hears of it from its `watch`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
Watch = Callable[[], None]
"""Called before every pass of a model; raises ClientLeft where nobody waits for the answer any more, Closed where none comes."""


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


class Closed(Exception):
    """The line was closed before the job was done."""


class Full(Exception):
    """As many jobs wait as may, or the line is closed."""


class Job(Generic[T]):
    """Work that was handed to a line. Made by `Line.submit`.

    Attributes:
        left: whether nobody waits for it any more.
        closed: whether its line was closed before it was done.
    """

    def __init__(self, work: Callable[[Watch], Iterable[T]]) -> None:
        self._work: Callable[[Watch], Iterable[T]] = work
        self._loop = asyncio.get_running_loop()
        self._made: asyncio.Queue[T | BaseException | None] = asyncio.Queue()  # an error or None is the last
        self._error: BaseException | None = None
        self._over = self.left = self.closed = False

    def watch(self) -> None:
        if self.left:
            raise ClientLeft
        if self.closed:
            raise Closed

    async def batch(self) -> list[T]:
        """What was made since the last call, at least one item; [] at the end. Raises what the work raised."""
        items: list[T] = []
        while not self._over and not (items and self._made.empty()):
            one = await self._made.get()
            if one is None or isinstance(one, BaseException):
                self._over, self._error = True, one
            else:
                items.append(one)
        if not items and self._error is not None:
            raise self._error
        return items

    def run(self) -> None:
        """Do the work, in the line's thread."""
        try:
            self.watch()
            for item in self._work(self.watch):
                self._tell(item)
        except BaseException as error:
            self.end(error)
        else:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        self._work = lambda _: ()  # what it holds is free
        self._tell(error)

    def _tell(self, one: T | BaseException | None) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._made.put_nowait, one)


class Line:
    """The thread and its jobs; the first one is being done.

    Args:
        waiting: most jobs behind the first one.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._jobs: deque[Job[object]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="replies", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Jobs in it, with the one that is being done."""
        return len(self._jobs)

    def check(self) -> None:
        """Raise Full, with the reason, where `submit` would."""
        if self._closed:
            raise Full("the server is being stopped")
        if len(self._jobs) > self._waiting:
            raise Full("too many requests are waiting")

    def submit(self, work: Callable[[Watch], Iterable[T]]) -> Job[T]:
        """Stand in line, from the event loop that will read the job's items. Raises Full."""
        job = Job(work)
        with self._changed:
            self.check()
            self._jobs.append(job)  # type: ignore[arg-type]
            self._changed.notify()
        return job

    def leave(self, job: Job[T]) -> None:
        """Nobody waits for this job any more; of a job that is over it changes nothing."""
        job.left = True
        with self._changed:
            if job in list(self._jobs)[1:]:  # the first one ends by itself
                self._jobs.remove(job)  # type: ignore[arg-type]
                job.end()

    def close(self) -> None:
        """End every job, and then the thread; it waits for the pass of a model that is being made."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.closed = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            job.run()
            with self._changed:
                self._jobs.popleft()
