"""Who proposes the tokens of a block. A drafter never looks at the target; what it proposes carries the q it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgespec_runtime.acceptance import Draft
from edgespec_runtime.sampling import Warp, warp
from edgespec_runtime.session import CachedEngine


class Drafter(Protocol):
    def prefill(self, prompt: Sequence[int]) -> None:
        """Read all of the prompt but its last token."""

    def propose(
        self, ids: list[int], room: int, how: Warp, generator: np.random.Generator, raw: bool
    ) -> Draft:
        """At most `room` tokens that may follow `ids`, fewer where it has no more to say; with its logits where `raw`."""

    def settle(self, length: int) -> None:
        """Forget whatever follows the first `length` tokens."""


class ModelDrafter:
    """The drafter model. `p_min`: a draft ends before a token to which it gives less than this (unwarped) probability."""

    def __init__(self, model: CachedEngine, p_min: float = 0.0) -> None:
        self._model, self._p_min = model, p_min

    def prefill(self, prompt: Sequence[int]) -> None:
        self._model.prefill(prompt[: self._model.engine.context_length][:-1])

    def propose(
        self, ids: list[int], room: int, how: Warp, generator: np.random.Generator, raw: bool
    ) -> Draft:
        """Draws up to `room` tokens; first reads what it has not seen (two tokens after a block that was accepted whole)."""
        draft = Draft()
        room = min(room, self._model.engine.context_length - len(ids) + 1 - raw)
        unseen = ids[len(self._model.tokens) :]
        while len(draft.tokens) < room:
            logits = self._model.forward(unseen)[-1]
            q = warp(logits, how)
            token = q.sample(generator)
            draft.tokens.append(token)
            draft.q.append(q)
            if raw:
                draft.logits.append(logits.copy())
            unseen = [token]
        if raw and draft.tokens:
            draft.logits.append(self._model.forward(unseen)[-1].copy())
        return draft

    def settle(self, length: int) -> None:
        self._model.rewind(length)
