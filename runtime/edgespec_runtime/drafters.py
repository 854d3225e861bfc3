"""Who proposes the tokens of a block. A drafter never looks at the target; what it proposes carries the q it was drawn from.

Whether a draft goes on may depend on the tokens so far and on q, never on the token that was drawn from q: dropping a token after
seeing it would make the kept ones follow q given that they were kept, and the rule, told q, would no longer be lossless.
(q = (0.9, 0.1), p = (0.5, 0.5), tokens below 0.5 dropped: the first one would come out with probability 0.55.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InputError
from edgespec_runtime.acceptance import Draft
from edgespec_runtime.decoding import HYBRID, LOOKUP, NOBODY, SHIFT, SINKS, ReplyOptions
from edgespec_runtime.lookup import LookupDrafter
from edgespec_runtime.sampling import RandomSource, Warp, warp
from edgespec_runtime.session import CachedEngine, Window


class Drafter(Protocol):
    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        """Read all of a new prompt but its last token; yields the size of each pass, so a caller may stop in between."""

    def propose(self, ids: list[int], room: int, how: Warp, generator: RandomSource, raw: bool) -> Draft:
        """At most `room` tokens that may follow `ids`, fewer where it has no more to say; with its logits where `raw`."""

    def settle(self, length: int) -> None:
        """Forget whatever follows the first `length` tokens."""


def drafter_of(options: ReplyOptions, model: CachedEngine | None) -> Drafter | None:
    """Who drafts under these options; None for plain decoding. Raises InputError for a hybrid drafter without a model."""
    if options.drafter == NOBODY:
        return None
    if options.drafter == LOOKUP:
        return LookupDrafter(options.lookup_ngram)
    if model is None:
        if options.drafter == HYBRID:
            raise InputError(
                "the hybrid drafter has no drafter model; load it, or choose the drafter 'lookup'"
            )
        return None
    drafter = ModelDrafter(model, options.p_min, window_of(model, options))
    return (
        HybridDrafter(LookupDrafter(options.lookup_ngram), drafter) if options.drafter == HYBRID else drafter
    )


def window_of(model: CachedEngine, options: ReplyOptions) -> Window | None:
    """How a model's context goes on when it is full; None where it stops."""
    if options.when_full != SHIFT:
        return None
    return Window(model.engine.context_length, SINKS if options.keep is None else options.keep)


class ModelDrafter:
    """The drafter model.

    Args:
        model: its cache holds a beginning of the text (of what the window shows of it) between two calls.
        p_min: a draft ends where even the most probable token has less than this (unwarped) probability.
        window: how its context goes on when it is full; None: it falls silent. It may be shorter than the target's.
    """

    def __init__(self, model: CachedEngine, p_min: float = 0.0, window: Window | None = None) -> None:
        self._model, self._p_min, self._window = model, p_min, window
        self._capacity = model.engine.context_length
        self._dropped = 0  # tokens of the text, behind the window's first ones, that the cache leaves out

    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        self._dropped = 0
        if len(prompt) > self._capacity and self._window is not None:
            self._dropped = self._window.surplus(len(prompt))
        shown = self._shown(prompt[:-1])
        yield from self._model.prefill_steps(shown if len(shown) < self._capacity else ())

    def propose(self, ids: list[int], room: int, how: Warp, generator: RandomSource, raw: bool) -> Draft:
        """Draws up to `room` tokens; first reads what it has not seen (two tokens after a block that was accepted whole).

        With `raw` the last entry of `logits` is of the place behind the last token, also where the draft ended at once.
        """
        draft = Draft()
        room = min(room, self._room(ids, raw))
        if room < 1:
            return draft
        unseen: Sequence[int] = ids[len(self._model.tokens) + self._dropped :]
        for _ in range(room):
            logits = self._model.read(unseen)
            if raw:
                draft.logits.append(logits.copy())
            if self._p_min > 0.0 and highest_probability(logits) < self._p_min:
                return draft
            q = warp(logits, how)
            token = q.sample(generator)
            draft.tokens.append(token)
            draft.q.append(q)
            unseen = (token,)
        if raw:
            draft.logits.append(self._model.read(unseen).copy())
        return draft

    def settle(self, length: int) -> None:
        self._model.rewind(max(0, length - self._dropped))

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens of the text that the cache is to hold."""
        if not self._dropped or self._window is None:
            return ids
        keep = self._window.keep
        return [*ids[:keep], *ids[keep + self._dropped :]]

    def _room(self, ids: list[int], raw: bool) -> int:
        """Tokens that can be drafted after `ids`: all of them but the last are read. A full context shifts first."""
        room = self._capacity - (len(ids) - self._dropped) + 1 - raw
        if room < 1 and self._window is not None:
            self._dropped = self._window.surplus(len(ids))
            self._model.prefill(self._shown(ids[:-1]))
            room = self._capacity - (len(ids) - self._dropped) + 1 - raw
        shown = len(ids) - self._dropped
        return min(room, self._model.reach(shown) - shown + 1 - raw)


class HybridDrafter:
    """Prompt lookup where it finds something, else the model, which then reads first what it has not seen meanwhile."""

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter) -> None:
        self._lookup, self._model = lookup, model

    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        yield from self._lookup.prefill_steps(prompt)
        yield from self._model.prefill_steps(prompt)

    def propose(self, ids: list[int], room: int, how: Warp, generator: RandomSource, raw: bool) -> Draft:
        draft = self._lookup.propose(ids, room, how, generator, raw)
        return draft if draft.tokens else self._model.propose(ids, room, how, generator, raw)

    def settle(self, length: int) -> None:
        self._lookup.settle(length)
        self._model.settle(length)


def highest_probability(logits: NDArray[np.float32]) -> float:
    """The largest softmax probability of unwarped logits [V]."""
    return 1.0 / float(np.exp(logits - logits.max()).sum())
