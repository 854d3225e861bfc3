"""A feature drafter's head beside its target, as an engine of tokens: it looks up the features that each slot reads.

Slot s reads the token x_s and the feature f_{s−1}. Where the target has read token s − 1, that is the target's hidden state;
behind it, the head's own output at slot s − 1. A slot that read the head's own is a guess, and is to be read again once the
target has been there: `true_slots` says how many of the first slots are none (`FeatureDrafter` rewinds to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgespec.core.errors import BundleError
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Logits, check_tokens
from edgespec_runtime.engines.vocabulary import PartialEngine, Vocabulary


class FeatureEngine(PartialEngine):
    """The Engine of a head that follows one target. Logits are [n, V], -inf for tokens that it does not draft.

    Args:
        folder: the head's.
        vocabulary: the target's tokens that the head's V' outputs stand for.
        target: whose features it reads; both hold the same text.

    Raises BundleError where the three do not belong together.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, target: CachedEngine) -> None:
        # it imports ONNX Runtime, which a target on llama.cpp without a head does not need
        from edgespec_runtime.heads.feature_head import FeatureHead

        head = FeatureHead(folder, target.engine.context_length)
        if target.features is None:
            raise BundleError(
                f"{target.engine.name} gives no hidden states, which the drafter reads; build the bundle again"
            )
        if target.features.shape[1] != head.feature_size or head.hidden_size != head.feature_size:
            raise BundleError(
                f"{head.name} reads features of {head.feature_size} numbers, {target.engine.name} gives "
                f"{target.features.shape[1]}; build the drafter for this target"
            )
        if len(vocabulary.ids) != head.vocab_size:
            raise BundleError(
                f"{head.name} drafts over {head.vocab_size} tokens and its vocabulary lists {len(vocabulary.ids)}; fetch or "
                "build the bundle again"
            )
        super().__init__(head, vocabulary)
        self.target, self.true_slots = target, 0
        self._own = np.zeros((self.context_length, head.hidden_size), np.float32)
        self._read = np.zeros((self.block_length, head.feature_size), np.float32)

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append tokens; float32 logits [n, V], valid until the next call.

        Several slots in one pass need the target's features for all of them but one: a slot's own output comes too late for the
        next. Where a feature is missing (nobody asks for such a draft), zeros stand in its place.
        """
        count, first = len(tokens), self.n_past
        check_tokens(self, tokens)
        known = len(self.target.tokens)  # features 0 .. known − 1
        read = self._read[:count]
        read[:] = 0.0
        # slots that read them; slot 0 reads nothing
        begin, end = max(first, 1), min(first + count, known + 1)
        if begin < end:
            read[begin - first : end - first] = self.target.features[begin - 1 : end - 1]  # type: ignore[index]
        elif first:
            read[0] = self._own[first - 1]
        if self.true_slots >= first:
            self.true_slots = max(first, min(first + count, known + 1))
        logits, own = self.inner.forward(tokens, read)
        self._own[first : first + count] = own
        return self._spread(logits)

    def rewind(self, n_past: int) -> None:
        """Forget every slot but the first `n_past`."""
        super().rewind(n_past)
        self.true_slots = min(self.true_slots, n_past)
