"""A target and a drafter behind caches, one way to run the decoding loop on them, and schedules: a fickle one, one that pads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import FROM_MODEL, Fixed, Outcome
from edgespec_runtime.engines.cached_engine import CachedEngine
from toy_engine import LogitsOf, ToyEngine

from edgespec.core.metrics import RawCounts

V = 32


class Setup:
    """A target and a drafter behind caches, and one way to run them."""

    def __init__(self, target: LogitsOf, draft: LogitsOf | None, vocab_size: int = V, **sizes: int) -> None:
        self.target_engine = ToyEngine(target, vocab_size, **sizes)
        self.draft_engine = ToyEngine(draft, vocab_size, **sizes) if draft else None
        self.target = CachedEngine(self.target_engine)
        self.draft = CachedEngine(self.draft_engine) if self.draft_engine else None
        self.counts = RawCounts()
        self.finish = ""

    def run(self, prompt: list[int], stop: tuple[int, ...] = (), **options: Any) -> list[int]:
        self.counts = RawCounts()
        reply: list[int] = []
        how = DecodingOptions(**{"max_new_tokens": 20, "rule": "lossless", **options})
        for block in decode(self.target, self.draft, prompt, how, stop, self.counts):
            reply += block.tokens
            self.finish = block.finish
            self.check([*prompt, *reply])
        return reply

    def leave(self, prompt: list[int], blocks: int, **options: Any) -> list[int]:
        """What the first `blocks` blocks say of a reply that is left behind them."""
        how = DecodingOptions(**options)
        with closing(decode(self.target, self.draft, prompt, how, (), RawCounts())) as said:
            return [token for block in itertools.islice(said, blocks) for token in block.tokens]

    def check(self, ids: list[int]) -> None:
        """Caches hold a beginning of what was emitted, and the session's list is the engine's."""
        for model in (self.target, self.draft):
            if model is not None:
                assert model.tokens == model.engine.seen == ids[: len(model.tokens)]  # type: ignore[attr-defined]
                assert len(model.tokens) < len(ids)


class Chosen(Fixed):
    """Another draft length for every block, as a schedule that measures times might choose."""

    def __init__(self) -> None:
        super().__init__(0)
        self._lengths = itertools.cycle((0, 2, 1, 3))

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        super().draft_length(context, room, origins)
        return min(next(self._lengths), room)


class Padding(Fixed):
    """Passes of a multiple of four tokens, as a schedule makes them where kernels work on rows of four.

    Attributes:
        told: tokens of every pass, as the loop says.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.told: list[int] = []

    def pass_length(self, count: int) -> int:
        return -(-count // 4) * 4

    def observe(self, outcome: Outcome) -> None:
        self.told.append(outcome.size)
