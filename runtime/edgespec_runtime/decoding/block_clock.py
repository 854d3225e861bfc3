"""What the time of a block goes to. Knows seconds; no engines, no tokens."""

from __future__ import annotations

from time import perf_counter

from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.schedule import Outcome

# The parts of a block (REREAD: the text is read again, after a shift for instance), and reading a prompt.
CHOOSE, DRAFT, VERIFY, REREAD, PREFILL = range(5)


class BlockClock:
    """The clock of one reply. `counts` gets the seconds of every block, and those of reading a prompt at once."""

    __slots__ = ("_counts", "_last", "_seconds", "_start")

    def __init__(self, counts: RawCounts) -> None:
        self._counts = counts
        self.begin()

    def begin(self) -> None:
        """A block begins."""
        self._start = self._last = perf_counter()
        self._seconds = [0.0] * PREFILL

    def lap(self, part: int) -> None:
        """What was done since the last lap is this part. Reading a prompt is no part of a block, also where it happens in one."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        if part == PREFILL:
            self._counts.prefill_seconds += seconds
            self._start += seconds
        else:
            self._seconds[part] += seconds

    def outcome(self, drafted: int, accepted: int, emitted: int, size: int, origin: int) -> Outcome:
        """Of the block so far, its sampling and the loop's work included; the arguments are those of `Outcome`."""
        choose, draft, _, reread = self._seconds
        seconds = perf_counter() - self._start - reread - choose
        return Outcome(drafted, accepted, emitted, size, draft, seconds, choose, origin)

    def end(self) -> None:
        """The block is over."""
        _, draft, verify, reread = self._seconds
        self._counts.draft_seconds += draft
        self._counts.verify_seconds += verify + reread
        self._counts.total_seconds += perf_counter() - self._start
