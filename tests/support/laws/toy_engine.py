"""A deterministic engine of a few tokens for tests of the loop: logits are a function of the whole prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from edgespec_runtime.engines.engine import check_rewind, check_room

LogitsOf = Callable[[tuple[int, ...]], np.ndarray]


class ToyEngine:
    """Computes nothing but `logits_of(prefix)` for every token fed; returns one buffer again and again, as real engines do.

    Attributes:
        seen: the tokens in its cache.
        passes: length of every pass made.
    """

    name = "toy"

    def __init__(
        self, logits_of: LogitsOf, vocab_size: int, context_length: int = 1000, block_length: int = 8
    ) -> None:
        self._logits_of = logits_of
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.block_length = block_length
        self.seen: list[int] = []
        self.passes: list[int] = []
        self._buffer = np.zeros((block_length, vocab_size), dtype=np.float32)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def n_past(self) -> int:
        return len(self.seen)

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        check_room(self, len(tokens))
        self._buffer[:] = np.nan
        for row, token in enumerate(tokens):
            self.seen.append(token)
            prefix = tuple(self.seen)
            if prefix not in self._known:
                self._known[prefix] = self._logits_of(prefix)
            self._buffer[row] = self._known[prefix]
        self.passes.append(len(tokens))
        return self._buffer[: len(tokens)]

    def rewind(self, n_past: int) -> None:
        check_rewind(self, n_past)
        del self.seen[n_past:]

    def close(self) -> None:
        pass


def random_model(seed: int, vocab_size: int, spread: float = 2.0) -> LogitsOf:
    """Logits drawn anew for every prefix."""

    def logits_of(prefix: tuple[int, ...]) -> np.ndarray:
        return (np.random.default_rng([seed, *prefix]).normal(size=vocab_size) * spread).astype(np.float32)

    return logits_of


def successor_model(vocab_size: int, step: Callable[[int], int]) -> LogitsOf:
    """Certain of `step(last token)`."""

    def logits_of(prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(vocab_size, dtype=np.float32)
        logits[step(prefix[-1]) % vocab_size] = 30.0
        return logits

    return logits_of
