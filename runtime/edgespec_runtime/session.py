"""An engine that remembers which tokens its cache holds, so that a prompt which repeats an earlier one is not computed twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec_runtime.engine import Engine, Logits


class CachedEngine:
    """The tokens in an engine's KV cache, kept true to it on every path."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        engine.rewind(0)

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append tokens (one pass); logits [len(tokens), V], valid until the next pass."""
        logits = self.engine.forward(tokens)
        self.tokens.extend(tokens)
        return logits

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if length < len(self.tokens):
            self.engine.rewind(length)
            del self.tokens[length:]

    def prefill_steps(self, tokens: Sequence[int]) -> Iterator[int]:
        """Make the cache hold exactly `tokens`, computing only what follows the common beginning; yields the size of each pass.

        The cache is true to `tokens` after every pass, so a caller may stop in between.
        """
        keep = 0
        for mine, wanted in zip(self.tokens, tokens, strict=False):
            if mine != wanted:
                break
            keep += 1
        self.rewind(keep)
        for start in range(keep, len(tokens), self.engine.block_length):
            piece = tokens[start : start + self.engine.block_length]
            self.forward(piece)
            yield len(piece)

    def prefill(self, tokens: Sequence[int]) -> int:
        """`prefill_steps` to the end; returns how many tokens were computed."""
        return sum(self.prefill_steps(tokens))
