"""How many tokens the drafter proposes for the next block. Knows costs and what was accepted; no engines, no tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Outcome(NamedTuple):
    """What one block came to. `context`: tokens before it; `size`: tokens of the target's pass, padding included."""

    context: int
    drafted: int
    accepted: int
    emitted: int
    size: int
    draft_seconds: float
    verify_seconds: float
    seconds: float  # both, and sampling and the loop
    choosing_seconds: float = 0.0  # before them: of asking for its draft length


class Schedule(Protocol):
    def begin(self) -> None:
        """Called before every reply."""

    def draft_length(self, context: int, room: int) -> int:
        """γ of the next block, from 0 (a plain step) to `room`; `context`: tokens so far."""

    def pass_length(self, count: int, context: int) -> int:
        """Tokens of a target pass that has `count` to verify: more where a longer pass is cheaper."""

    def observe(self, outcome: Outcome) -> None:
        """Called after every block."""


class Fixed:
    """Always the same draft length."""

    def __init__(self, draft_length: int) -> None:
        self._length = draft_length

    def begin(self) -> None:
        pass

    def draft_length(self, context: int, room: int) -> int:
        return max(0, min(self._length, room))

    def pass_length(self, count: int, context: int) -> int:
        return count

    def observe(self, outcome: Outcome) -> None:
        pass
