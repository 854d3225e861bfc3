"""A few replies of a bench for a reader: which tokens the drafter proposed and the target kept, and which it wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from edgespec.core.metrics import RawCounts
from edgespec_runtime.bench.dialogues import Dialogue
from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.pair.bundle import Pair

REPLIES = 4  # enough to see a pattern, few enough to read
TOKENS = 160  # of a reply: about 15 lines
CHARACTERS = 600  # of a prompt


def samples_of(pair: Pair, dialogues: Sequence[Dialogue], how: DecodingOptions) -> list[dict[str, Any]]:
    """The first turns of the first dialogues, decoded once more with a fixed draft length; nothing here is timed.

    Each has `prompt` (the beginning of the user's text), `draft_length`, `tokens`, `passes`, `accepted`, and `parts`: pairs of a
    text and whether the drafter proposed it. A character whose bytes come from several tokens belongs to the last of them.
    """
    how = replace(how, max_new_tokens=min(how.max_new_tokens, TOKENS))
    return [_sample(pair, dialogue, how) for dialogue in dialogues[:REPLIES]]


def _sample(pair: Pair, dialogue: Dialogue, how: DecodingOptions) -> dict[str, Any]:
    for model in pair.models:
        model.rewind(0)
    counts = RawCounts()
    said = list(pieces(pair, dialogue.prompts[0], how, counts))
    return {
        "prompt": dialogue.question.turns[0][:CHARACTERS],
        "draft_length": how.draft_length,
        "tokens": counts.emitted,
        "passes": counts.blocks,
        "accepted": sum(len(piece.tokens) for piece in said if piece.accepted),
        "parts": [
            ["".join(piece.text for piece in group), drafted]
            for drafted, group in groupby(filter(attrgetter("text"), said), key=attrgetter("accepted"))
        ],
    }
