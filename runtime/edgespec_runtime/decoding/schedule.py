"""Who drafts the next block, how many tokens, and what the block came to. Knows seconds and counts; no engines, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Where a draft comes from. Copies cost nothing, and one after a long match is accepted more often than one after a short match.
FROM_MODEL, SHORT_COPY, LONG_COPY = ORIGINS = range(3)


class Outcome(NamedTuple):
    """What one block came to. `size`: tokens of the target's pass, padding included."""

    drafted: int
    accepted: int
    emitted: int
    size: int
    draft_seconds: float
    seconds: float  # the draft, the pass, and sampling and the loop
    choosing_seconds: float = 0.0  # before them: of asking for its draft length
    origin: int = FROM_MODEL


class Schedule:
    """How a session drafts, block by block: this one makes plain steps only.

    Attributes:
        origin: who drafts the next block, one of those last offered; means nothing where its draft length is 0.
    """

    origin: int = FROM_MODEL

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        """γ of the next block, from 0 (a plain step) to `room`; sets `origin`.

        `context`: tokens so far; `origins`: who can draft now, copies first; nobody where it is empty.
        """
        return 0

    def pass_length(self, count: int) -> int:
        """Tokens of a target pass that has `count` to verify: more where a longer pass is cheaper."""
        return count

    def observe(self, outcome: Outcome) -> None:
        """Called after every block."""


class Fixed(Schedule):
    """Always the same draft length; copied where something can be copied."""

    def __init__(self, draft_length: int) -> None:
        self._length = draft_length

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        self.origin = origins[0] if origins else FROM_MODEL
        return max(0, min(self._length, room)) if origins else 0
