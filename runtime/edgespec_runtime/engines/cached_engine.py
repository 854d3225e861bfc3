"""An engine that remembers which tokens its cache holds, so that a prompt which repeats an earlier one is not computed twice.

Knows no sampling and no drafts. An engine that fails loses its cache and nothing else: the next pass starts from an empty one.

LongRoPE: Phi-3, Phi-3.5 and Phi-4-mini have two sets of RoPE factors. In transformers a text of at most
`original_max_position_embeddings` tokens (the border) takes the short set, a longer one the long set, at every position;
`generate` drops its cache where a text crosses. So the keys in a cache hold on one side of the border only. Here it is the same:
where a text crosses the border, or falls back below it, it is read again with the other set. A pass that would cross is made in
two, so a block has the logits of single steps everywhere.
(Ding et al. 2024, LongRoPE; transformers, Phi3ForCausalLM.prepare_inputs_for_generation.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

import numpy as np

from edgespec.core.errors import EdgespecError, InputError
from edgespec_runtime.engines.engine import Engine, Features, Logits, check_room


def common_length(one: Iterable[object], other: Iterable[object]) -> int:
    """How many items both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class CachedEngine:
    """The tokens in an engine's KV cache, kept true to it on every path.

    Attributes:
        before_pass: called before every pass, None for nothing. What it raises stops the reply, and the cache stays as it was.
        features: float32 [context, H], the engine's last hidden state at each of `tokens`; None where it gives none.
        rope_border: most tokens of a text with the short RoPE factors; None where all texts have the same.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # the engine holds a beginning of them where the factors have just changed
        self.tokens: list[int] = []
        self.before_pass: Callable[[], None] | None = None
        self.features: Features | None = None
        if (given := getattr(engine, "features", None)) is not None:
            self.features = np.zeros((engine.context_length, given.shape[1]), np.float32)
        self.rope_border: int | None = getattr(engine, "rope_border", None)
        self._long: bool | None = None  # which factors the engine's keys have; None: unknown
        engine.rewind(0)

    def reach(self, length: int) -> int:
        """How long a text of `length` tokens can become without its keys being computed again: where drafts had better end."""
        border = self.rope_border
        return border if border is not None and length <= border else self.engine.context_length

    def holds_for(self, length: int) -> bool:
        """Whether the keys in the cache are those of a text of `length` tokens; an empty cache is."""
        return self.rope_border is None or not self.tokens or self._long is (length > self.rope_border)

    def forward(self, tokens: Sequence[int], of: int | None = None) -> Logits:
        """Append tokens (one pass); float32 logits [len(tokens), V], valid until the next pass.

        `of`: the length of a whole text that is being read, of which only the last logits are wanted. Its keys have the RoPE
        factors of that length from the start; else a prompt beyond the border would be read twice.

        Raises InputError where the engine refuses the tokens (the cache is as it was), EdgespecError naming the engine where it
        fails (the cache is empty).
        """
        engine, border, held = self.engine, self.rope_border, len(self.tokens)
        if engine.n_past > held:  # the last pass was interrupted after it was made
            engine.rewind(held)
        if border is not None:
            check_room(engine, len(tokens))  # before the text is read again
            if of is None and held < border < held + len(tokens):
                return self._crossing(tokens, border - held)
        if self.before_pass is not None:
            self.before_pass()
        try:
            if border is not None:
                self._take_rope(long=max(of or 0, held + len(tokens)) > border)
            logits = engine.forward(tokens)
        except InputError:
            raise
        except Exception as error:  # an engine's library raises what it likes
            self.tokens.clear()
            with suppress(Exception):  # where it cannot even rewind now, the next pass tries again
                engine.rewind(0)
            # a library may tell what a stranger wrote
            most = None if isinstance(error, EdgespecError) else 300
            reason = " ".join(str(error)[:most].split()) or type(error).__name__
            raise EdgespecError(
                f"{engine.name} failed on {len(tokens)} tokens after {held}: {reason}; its cache is emptied, try again"
            ) from error
        if self.features is not None:
            self.features[held : held + len(tokens)] = engine.features  # type: ignore[attr-defined]
        self.tokens.extend(tokens)
        return logits

    def _crossing(self, tokens: Sequence[int], short: int) -> Logits:
        """One pass on each side of the border; the first `short` tokens end at it."""
        held = len(self.tokens)
        try:
            first = self.forward(tokens[:short]).copy()
            return np.concatenate([first, self.forward(tokens[short:])])
        except BaseException:
            del self.tokens[held:]  # the next pass rewinds the engine
            raise

    def _take_rope(self, *, long: bool) -> None:
        """Make the engine hold `tokens` with the factors asked for. An interrupted call is finished by the next one."""
        engine, size = self.engine, self.engine.block_length
        if long is not self._long:
            self._long = None
            engine.use_rope(long=long)  # type: ignore[attr-defined]
            self._long = long
        for start in range(engine.n_past, len(self.tokens), size):
            piece = self.tokens[start : start + size]
            engine.forward(piece)
            if self.features is not None:
                self.features[start : start + len(piece)] = engine.features  # type: ignore[attr-defined]

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
            if length < self.engine.n_past:  # else the engine has yet to read it again
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
