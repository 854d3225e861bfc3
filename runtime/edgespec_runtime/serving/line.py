"""One thread that does one job at a time, in the order of arrival, for an event loop. Knows neither HTTP nor models.

A job is a function that makes items. They reach the event loop in batches, so that a busy loop is woken once for many items.
Whoever waits can leave: a job that has not begun is dropped at once, one that runs hears of it from its `watch`.
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

    def __init__(self, work: Callable[[Watch], Iterable[T]], at_once: bool) -> None:
        self._work: Callable[[Watch], Iterable[T]] | None = work
        self._at_once = at_once
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._items: deque[T] = deque()
        self._woken = self._done = self.left = self.closed = False
        self._error: BaseException | None = None

    def watch(self) -> None:
        if self.left:
            raise ClientLeft
        if self.closed:
            raise Closed

    async def batch(self) -> list[T]:
        """What was made since the last call, at least one item; [] at the end. Raises what the work raised."""
        while True:
            self._woken = False  # first: whatever is made from here on wakes us again
            done = self._done
            if self._items:
                return [self._items.popleft() for _ in range(len(self._items))]
            if done:
                if self._error is not None:
                    raise self._error
                return []
            await self._ready.wait()
            self._ready.clear()

    def run(self) -> None:
        """Do the work, in the line's thread."""
        work, self._work = self._work, None
        try:
            self.watch()
            for item in work(self.watch) if work is not None else ():
                self._items.append(item)
                if not self._at_once:
                    self._wake()
        except BaseException as error:
            self._error = error
        self.end()

    def end(self) -> None:
        """Nothing more comes."""
        self._work, self._done = None, True
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._ready.set)


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

    def submit(self, work: Callable[[Watch], Iterable[T]], *, at_once: bool = False) -> Job[T]:
        """Stand in line, from the event loop that will read the job's items. Raises Full.

        at_once: the items are wanted when all of them are made.
        """
        job = Job(work, at_once)
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
