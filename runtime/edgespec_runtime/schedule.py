"""How many tokens the drafter proposes for the next block. Knows costs and what was accepted; no engines, no tokens."""

from __future__ import annotations

from typing import Protocol


class Schedule(Protocol):
    def choose(self, context: int, room: int) -> tuple[int, int]:
        """(draft length γ, tokens of the target's pass): the second is γ + 1, or more where a longer pass is cheaper.

        `context`: tokens so far; `room`: most draft tokens that can still be used.
        """

    def observe(
        self, drafted: int, accepted: int, emitted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """What the block that was chosen came to."""


class Fixed:
    """Always the same draft length."""

    def __init__(self, draft_length: int) -> None:
        self._length = draft_length

    def choose(self, context: int, room: int) -> tuple[int, int]:
        length = max(0, min(self._length, room))
        return length, length + 1

    def observe(
        self, drafted: int, accepted: int, emitted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        pass
