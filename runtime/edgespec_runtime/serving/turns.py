"""One after the other, in the order of arrival. Knows neither sockets nor models."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watch = Callable[[], None]
"""Called now and then while somebody waits for an answer; raises where nobody waits any more."""

SECONDS_BETWEEN_LOOKS = 0.1


class Turns:
    """A lock that is fair, and that who waits for it can leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Event] = deque()  # whose turn it is comes first

    def __len__(self) -> int:
        """Who waits, and who has the turn."""
        return len(self._queue)

    @contextmanager
    def one(self, watch: Watch) -> Iterator[None]:
        """Wait for the turn and have it. What `watch` raises while waiting gives the place up."""
        mine = threading.Event()
        with self._lock:
            self._queue.append(mine)
            self._queue[0].set()
        try:
            while not mine.wait(SECONDS_BETWEEN_LOOKS):
                watch()
            yield
        finally:
            with self._lock:
                self._queue.remove(mine)
                if self._queue:
                    self._queue[0].set()
