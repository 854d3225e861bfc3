"""An engine that remembers which tokens its cache holds, so that a prompt which repeats an earlier one is not computed twice.

Knows no sampling and no drafts. An engine that fails loses its cache and nothing else: the next pass starts from an empty one.
Keys that are not those of the text at its new length (rope_border.py) count as absent: they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

import numpy as np

from edgespec.core.errors import EdgespecError, InputError
from edgespec_runtime.engines.engine import Engine, Features, Logits
from edgespec_runtime.engines.rope_border import BorderedEngine


def common_length(one: Iterable[object], other: Iterable[object]) -> int:
    """How many items both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class CachedEngine:
    """The tokens in an engine's KV cache, kept true to it on every path.

    Attributes:
        before_pass: called before every pass, None for nothing. What it raises stops the reply, and the cache stays as it was.
        features: float32 [context, H], the engine's last hidden state at each of `tokens`; None where it gives none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.before_pass: Callable[[], None] | None = None
        self.features: Features | None = None
        if (given := getattr(engine, "features", None)) is not None:
            self.features = np.zeros((engine.context_length, given.shape[1]), np.float32)
        self._bordered = engine if isinstance(engine, BorderedEngine) else None
        engine.rewind(0)

    @property
    def rope_border(self) -> int | None:
        """Most tokens of a text with the short RoPE factors; None where all texts have the same."""
        return None if self._bordered is None else self._bordered.border

    def reach(self, length: int) -> int:
        """How long a text of `length` tokens can become without its keys being computed again: where drafts had better end."""
        border = self.rope_border
        return border if border is not None and length <= border else self.engine.context_length

    def holds_for(self, length: int) -> bool:
        """Whether the keys in the cache are those of a text of `length` tokens."""
        return self._bordered is None or self._bordered.holds_for(length)

    def forward(self, tokens: Sequence[int], of: int | None = None) -> Logits:
        """Append tokens (one pass); float32 logits [len(tokens), V], valid until the next pass.

        `of`: the length of a whole text that is being read, of which only the last logits are wanted.

        Raises InputError where the engine refuses the tokens (the cache is as it was), EdgespecError naming the engine where it
        fails (the cache is empty).
        """
        if self.before_pass is not None:
            self.before_pass()
        engine = self.engine
        if engine.n_past != len(self.tokens):  # the last pass was interrupted after it was made
            engine.rewind(len(self.tokens))
        try:
            logits = engine.forward(tokens) if self._bordered is None else self._bordered.forward(tokens, of)
        except InputError:
            raise
        except Exception as error:  # an engine's library raises what it likes
            held = len(self.tokens)
            self.tokens.clear()
            with suppress(Exception):  # where it cannot even rewind now, the next pass tries again
                engine.rewind(0)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EdgespecError(
                f"{engine.name} failed on {len(tokens)} tokens after {held}: {reason}; its cache is emptied, try again"
            ) from error
        if self.features is not None:
            held = len(self.tokens)
            self.features[held : held + len(tokens)] = engine.features  # type: ignore[attr-defined]
        self.tokens.extend(tokens)
        return logits

    def read(self, tokens: Sequence[int]) -> Logits:
        """Append any number of tokens, at least one, in passes that the engine takes; the logits [V] after the last."""
        size, total = self.engine.block_length, len(self.tokens) + len(tokens)
        for start in range(0, len(tokens), size):
            logits = self.forward(tokens[start : start + size], of=total)
        last: Logits = logits[-1]
        return last

    def read_rows(self, tokens: Sequence[int], most: int | None = None) -> Logits:
        """Append any number of tokens, at least one, in passes of at most `most`; the logits [len(tokens), V] after each.

        `most`: None for as many as the engine takes.
        """
        size = min(self.engine.block_length, most or self.engine.block_length)
        if len(tokens) <= size:
            return self.forward(tokens)
        return np.concatenate(
            [self.forward(tokens[start : start + size]).copy() for start in range(0, len(tokens), size)]
        )

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if length < len(self.tokens):
            self.engine.rewind(length)
            del self.tokens[length:]

    def prefill_steps(self, tokens: Sequence[int]) -> Iterator[int]:
        """Make the cache hold exactly `tokens`, computing only what follows the common beginning; yields the size of each pass.

        At least one more token follows: the keys are those of a text of one token more. The cache is true to `tokens` after every
        pass, so a caller may stop in between.
        """
        whole = len(tokens) + 1
        self.rewind(common_length(self.tokens, tokens) if self.holds_for(whole) else 0)
        for start in range(len(self.tokens), len(tokens), self.engine.block_length):
            piece = tokens[start : start + self.engine.block_length]
            self.forward(piece, of=whole)
            yield len(piece)

    def prefill(self, tokens: Sequence[int]) -> int:
        """`prefill_steps` to the end; returns how many tokens were computed."""
        return sum(self.prefill_steps(tokens))


class Window:
    """Which of a text's tokens a context holds once it does not hold them all: the first `keep` and the newest half of the rest.

    The first tokens stay because attention leans on them whatever they are, and a window without them writes nonsense (Xiao et
    al. 2023, attention sinks); a system prompt is kept the same way.

    Args:
        capacity: tokens that the context holds.
        keep: first tokens that stay; what exceeds half the context is not kept.
    """

    def __init__(self, capacity: int, keep: int) -> None:
        self.capacity = capacity
        self.keep = min(keep, most_kept(capacity))

    def surplus(self, length: int) -> int:
        """How many of `length` tokens are dropped from behind the first ones in a shift; at least one token stays besides."""
        return max(0, length - self.keep - max(1, (self.capacity - self.keep) // 2))


def most_kept(capacity: int) -> int:
    """Most first tokens that a context may keep in a shift: below half of it, so that two or more others fit behind them."""
    return max(0, (capacity - 1) // 2)
