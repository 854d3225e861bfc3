"""What the parts of a block take, for the raw counts and the schedule. Wrapped around the loop, which reads no clock itself."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.schedule import Outcome, Schedule

# Parts of a block; the last: the text is read again, after a shift for instance.
CHOOSE, DRAFT, VERIFY, REREAD = range(4)

T = TypeVar("T")


class BlockClock:
    """The clock of one reply.

    Args:
        counts: gets the seconds of every block, and those of reading a prompt as soon as a model has read it.
        schedule: is told of every block.
    """

    __slots__ = ("_counts", "_schedule", "_seconds", "_start")

    def __init__(self, counts: RawCounts, schedule: Schedule) -> None:
        self._counts, self._schedule = counts, schedule
        self._start, self._seconds = 0.0, [0.0] * 4

    def prefill(self, read: Callable[[], object]) -> None:
        """A model reads a prompt: no part of a block, also where it happens within one."""
        start = perf_counter()
        read()
        seconds = perf_counter() - start
        self._counts.prefill_seconds += seconds
        self._start += seconds

    def begin(self) -> None:
        """A block begins."""
        self._start, self._seconds = perf_counter(), [0.0] * 4

    def timed(self, part: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work`, which is this part of the block."""
        start = perf_counter()
        result = work(*arguments)
        self._seconds[part] += perf_counter() - start
        return result

    def end(self, context: int, drafted: int, accepted: int, emitted: int, size: int, origin: int) -> None:
        """A block is over, sampling and the loop's work included; the arguments are those of `Outcome`."""
        choose, draft, verify, reread = self._seconds
        seconds = perf_counter() - self._start - reread - choose
        self._schedule.observe(
            Outcome(context, drafted, accepted, emitted, size, draft, verify, seconds, choose, origin)
        )
        self._counts.draft_seconds += draft
        self._counts.verify_seconds += verify + reread
        self._counts.total_seconds += perf_counter() - self._start
