"""LongRoPE: a text longer than the context its model was first trained on takes other RoPE factors, and so do all its tokens.

Phi-3, Phi-3.5 and Phi-4-mini have two sets of factors. In transformers a text of at most `original_max_position_embeddings`
tokens (the border) takes the short set, a longer one the long set, at every position; `generate` drops its cache where a text
crosses. So the keys in a cache hold on one side of the border only.

`BorderedEngine` does the same. Where a text crosses the border, or falls back below it, the text is read again with the other
set. A pass that would cross is made in two, so a block has the logits of single steps everywhere.
(Ding et al. 2024, LongRoPE; transformers, Phi3ForCausalLM.prepare_inputs_for_generation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edgespec_runtime.engines.engine import Engine, Logits, check_rewind, check_room


class TwoRopes(Engine, Protocol):
    """An engine whose model may have two sets of RoPE factors."""

    rope_border: int | None
    """Most tokens of a text with the short set; None: the model, or the context, has one set only."""

    def use_rope(self, *, long: bool) -> None:
        """Empty the cache; keys have the long factors from now on, or the short ones."""


def across_border(engine: TwoRopes) -> Engine:
    """The engine itself where it has one set of factors, else one that chooses between the two."""
    return engine if engine.rope_border is None else BorderedEngine(engine, engine.rope_border)


class BorderedEngine:
    """An engine with two sets of factors, which has the one that the text's length asks for. What it lacks is the inner engine's.

    Args:
        inner: the engine; nobody else may use it.
        border: most tokens of a text with the short factors.
    """

    def __init__(self, inner: TwoRopes, border: int) -> None:
        self.inner, self.border = inner, border
        self.name, self.vocab_size = inner.name, inner.vocab_size
        self.context_length, self.block_length = inner.context_length, inner.block_length
        self.n_past = 0
        self._tokens: list[int] = []  # the text; the inner cache holds a beginning of it
        self._long: bool | None = None  # which factors the inner cache has; None: unknown

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, tokens: Sequence[int], of: int | None = None) -> Logits:
        """Append `tokens`; float32 logits [n, V], in each row those of transformers for the text up to there.

        `of`: the length of a whole text that is being read. The factors are those of that text, and rows before its end are of no
        use. Without it a prompt beyond the border would be read twice.
        """
        check_room(self, len(tokens))
        before, border = self.n_past, self.border
        del self._tokens[before:]  # of a pass that was interrupted at its end
        if of is None and before < border < before + len(tokens):
            return self._crossing(tokens, border - before)
        self._prepare(long=max(of or 0, before + len(tokens)) > border)
        logits = self.inner.forward(tokens)
        self._tokens.extend(tokens)
        self.n_past = len(self._tokens)
        return logits

    def _crossing(self, tokens: Sequence[int], short: int) -> Logits:
        """One pass on each side; the first `short` tokens end at the border."""
        before = self.n_past
        try:
            first = self.forward(tokens[:short]).copy()
            return np.concatenate([first, self.forward(tokens[short:])])
        except BaseException:
            self.rewind(before)
            raise

    def _prepare(self, *, long: bool) -> None:
        """Make the inner cache hold the text with the factors asked for. An interrupted call is finished by the next one."""
        inner = self.inner
        if long is not self._long:
            self._long = None
            inner.use_rope(long=long)
            self._long = long
        if inner.n_past > len(self._tokens):
            inner.rewind(len(self._tokens))
        for start in range(inner.n_past, len(self._tokens), self.block_length):
            inner.forward(self._tokens[start : start + self.block_length])

    def holds_for(self, length: int) -> bool:
        """Whether the keys in the cache are those of a text of `length` tokens; an empty cache is."""
        return not self._tokens or self._long is (length > self.border)

    def rewind(self, n_past: int) -> None:
        check_rewind(self, n_past)
        del self._tokens[n_past:]
        self.n_past = n_past

    def close(self) -> None:
        self.inner.close()
