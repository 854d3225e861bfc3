"""Who proposes the tokens of a block. A drafter never looks at the target; what it proposes carries the q it was drawn from.

A drafter answers one question: what may follow this text? `propose` asks it position by position. So its answer depends on the
text alone, not on how many tokens are drafted at once. A rule that mixes p with q has the same output at every draft length.
Where a drafter has two origins, a copy and a model, the schedule says for each block which of them answers.

Whether a draft goes on may depend on the tokens so far and on q, never on the token that was drawn from q: dropping a token after
seeing it would make the kept ones follow q given that they were kept, and the rule, told q, would no longer be lossless.
(q = (0.9, 0.1), p = (0.5, 0.5), tokens below 0.5 dropped: the first one would come out with probability 0.55.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import InputError
from edgespec_runtime.decoding.lookup import SHORTEST, NgramIndex
from edgespec_runtime.decoding.options import (
    HYBRID,
    HYBRID_RULES,
    LOOKUP,
    MODEL,
    NOBODY,
    SHIFT,
    SINKS,
    ReplyOptions,
)
from edgespec_runtime.decoding.schedule import FROM_MODEL, LONG_COPY, SHORT_COPY
from edgespec_runtime.engines.cached_engine import CachedEngine, Window
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.rules.acceptance import Draft, Rule
from edgespec_runtime.rules.sampling import CERTAIN, Categorical, TokenSource, Warp, warp


class Guess(NamedTuple):
    """What a drafter says about the next token: the logits of a model, or a token that it copies.

    logits: float32 [V], valid until the drafter is asked again. unsure: end the draft here.
    """

    logits: NDArray[np.float32] | None = None
    copied: int = -1
    unsure: bool = False


def propose(
    drafter: Drafter,
    ids: list[int],
    room: int,
    how: Warp,
    source: TokenSource,
    rule: Rule,
    origin: int = FROM_MODEL,
) -> Draft:
    """Draft at most `room` tokens of one origin that may follow `ids`, fewer where the drafter has no more to say.

    `ids` is as it was afterwards. For a rule that `mixes` the draft also has q behind its last token; then `room` may be 0.
    """
    draft, length = Draft(), len(ids)
    room = min(room, drafter.begin(ids, origin) - rule.mixes)
    try:
        for drafted in range(room + rule.mixes):
            guess = drafter.guess(ids)
            if guess is None:
                break
            last = guess.unsure or drafted == room
            if last and not rule.mixes:
                break
            if guess.logits is None:
                q = Categorical(np.array([guess.copied], dtype=np.int64), CERTAIN)
            else:
                q = warp(guess.logits, how)
                if rule.raw:
                    draft.logits.append(guess.logits.copy())
            draft.q.append(q)
            if last:
                draft.behind = int(guess.logits is not None)
                break
            token = source.sample(q, len(ids))
            draft.tokens.append(token)
            draft.copied += guess.logits is None
            ids.append(token)
    finally:
        del ids[length:]
    return draft


def drafter_of(options: ReplyOptions, model: CachedEngine | None) -> Drafter | None:
    """Who drafts under these options; None for plain decoding. Raises InputError for a hybrid drafter without a model."""
    if options.who == NOBODY:
        return None
    if options.who == LOOKUP:
        return LookupDrafter(options.lookup_ngram)
    if model is None:
        if options.drafter == HYBRID:  # asked for, not by default
            raise InputError(
                "the hybrid drafter has no drafter model; load it, or choose the drafter 'lookup'"
            )
        return None
    drafter = (
        FeatureDrafter(model, options.p_min)
        if isinstance(model.engine, FeatureEngine)
        else ModelDrafter(model, options.p_min, window_of(model, options))
    )
    if options.who == MODEL:
        return drafter
    return LookupDrafter(options.lookup_ngram, drafter, by_text=options.rule_name not in HYBRID_RULES)


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

    def restart(self, ids: Sequence[int]) -> None:
        """A new text begins with `ids`. Computes nothing."""
        if not self.origins(ids):  # else the cache goes on from what both texts have in common
            self._model.rewind(0)

    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        """Read all of a new prompt but its last token; yields the size of each pass, so a caller may stop in between."""
        self._dropped = 0
        if len(prompt) > self._capacity and self._window is not None:
            self._dropped = self._window.surplus(len(prompt))
        shown = self._shown(prompt[:-1])
        yield from self._model.prefill_steps(shown if len(shown) < self._capacity else ())

    def origins(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Who can draft behind `ids` (schedule.ORIGINS), copies first. Computes nothing."""
        silent = self._window is None and len(ids) > self._capacity
        return () if silent else (FROM_MODEL,)

    def begin(self, ids: Sequence[int], origin: int = FROM_MODEL) -> int:
        """A block begins behind `ids`, of one of their origins; at how many positions from there it can be asked (0: at none).

        A full context shifts here, and only here: within a block it could shift at a token that is then rejected.
        """
        if len(ids) - self._dropped > self._capacity and self._window is not None:
            self._dropped = self._window.surplus(len(ids))
            self._model.prefill(self._shown(ids[:-1]))
        shown = len(ids) - self._dropped
        return max(0, self._model.reach(shown) - shown + 1)

    def guess(self, ids: Sequence[int]) -> Guess | None:
        """What may follow `ids`; None where it has nothing to say. Asked in order: `ids` grows by one token at a time.

        Reads first what it has not seen (two tokens after a block that was accepted whole).
        """
        logits = self._model.read(ids[len(self._model.tokens) + self._dropped :])
        return Guess(logits, unsure=self._p_min > 0.0 and highest_probability(logits) < self._p_min)

    def settle(self, length: int) -> None:
        """Forget whatever follows the first `length` tokens."""
        self._model.rewind(max(0, length - self._dropped))

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens of the text that the cache is to hold."""
        if not self._dropped or self._window is None:
            return ids
        keep = self._window.keep
        return [*ids[:keep], *ids[keep + self._dropped :]]


class FeatureDrafter(ModelDrafter):
    """A head that reads its target's hidden states (EAGLE; Li et al. 2024): a model drafter that takes its guesses back.

    While it drafts, the features behind the text are the head's own. When the target has read the block, the true ones are there:
    the slots that guessed are forgotten, and read again in the first pass of the next draft. So a draft's first token comes from
    true features only. Its context is its target's, so it never shifts by itself.
    """

    def settle(self, length: int) -> None:
        engine = self._model.engine
        assert isinstance(engine, FeatureEngine)
        self._model.rewind(min(length, engine.true_slots))


class LookupDrafter:
    """Prompt lookup: copies instead of computing; with a model beside it, which reads first what was copied meanwhile.

    A copied token is certain in the drafter's eyes, q = 1 there, so the lossless rule accepts it with probability p and else
    draws from p without it: the output is distributed as p, whatever was proposed.

    A block is drafted by one of the two. Under a rule that mixes p and q, who answers must depend on the text alone
    (`by_text`): at every position lookup where it finds something, else the model. The methods are those of `ModelDrafter`.
    """

    def __init__(self, longest: int, model: ModelDrafter | None = None, *, by_text: bool = False) -> None:
        self._longest, self._model, self._by_text = longest, model, by_text
        self._index = NgramIndex(longest)
        self._asked = model  # in this block; None: it is copied

    def restart(self, ids: Sequence[int]) -> None:
        self._index = NgramIndex(self._longest)
        self._index.extend(ids)
        if self._model is not None:
            self._model.restart(ids)

    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        return iter(()) if self._model is None else self._model.prefill_steps(prompt)

    def origins(self, ids: Sequence[int]) -> tuple[int, ...]:
        self._index.cut(len(ids) - 1)  # the last token is the target's own, in place of a rejected copy
        match = self._match(ids)
        origins = () if self._model is None else self._model.origins(ids)
        if match is not None:
            origins = (LONG_COPY if match[1] > SHORTEST else SHORT_COPY, *origins)
        return origins[:1] if self._by_text else origins

    def begin(self, ids: Sequence[int], origin: int = FROM_MODEL) -> int:
        self._asked = self._model if origin == FROM_MODEL else None
        return sys.maxsize if self._asked is None else self._asked.begin(ids)

    def guess(self, ids: Sequence[int]) -> Guess | None:
        match = self._match(ids) if self._asked is None or self._by_text else None
        if match is not None:
            return Guess(copied=match[0])
        return None if self._asked is None else self._asked.guess(ids)

    def settle(self, length: int) -> None:
        self._index.cut(length)
        if self._model is not None:
            self._model.settle(length)

    def _match(self, ids: Sequence[int]) -> tuple[int, int] | None:
        self._index.extend(ids[len(self._index.tokens) :])
        return self._index.match()


Drafter = ModelDrafter | LookupDrafter


def highest_probability(logits: NDArray[np.float32]) -> float:
    """The largest softmax probability of unwarped logits [V]."""
    return 1.0 / float(np.exp(logits - logits.max()).sum())
