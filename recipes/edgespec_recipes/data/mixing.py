"""What a batch of distillation is made of: plain text, fixed data, the drafter's own responses, the target's. Knows no models.

DistillSpec, Algorithm A.2, with exact shares instead of drawn ones: λ1 of the rows that are not text come from fixed data, λ2
of what is left from the drafter, the remainder from the target. Every row has the same arrays, so all kinds share a batch:

    input_ids, position_ids [T] int64, document_ids [T] int32
    compared [T] bool   positions whose next token counts in the loss
    room     [T] bool   slots the drafter writes into while it trains (its own rows; nothing is compared there yet)
    kind, row_id, slot  [] int64: where the row comes from, its number there, its place in the order of the whole run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from edgespec.recipe.schema import DistillOptions
from edgespec_recipes.data.token_rows import Row, Rows, Shuffled, pack_conversations

TEXT, FIXED, STUDENT, TARGET = range(4)
KINDS = ("text", "fixed", "student", "target")


def shares(options: DistillOptions) -> dict[int, float]:
    """The share of every kind in a batch, those above 0; they sum to 1."""
    rest = 1.0 - options.text_fraction
    free = rest * (1.0 - options.fixed_fraction)
    parts = {
        TEXT: options.text_fraction,
        FIXED: rest * options.fixed_fraction,
        STUDENT: free * options.student_fraction,
        TARGET: free * (1.0 - options.student_fraction),
    }
    return {kind: share for kind, share in parts.items() if share > 0}


def take_turns(parts: Sequence[float], length: int) -> np.ndarray:
    """[length] uint8: which part each place goes to, so that every beginning holds its shares to within two places.

    The j-th place of a part is due at (j + ½) / share (the order of Sainte-Laguë), so kinds alternate and no process of several
    gets all rows of one kind.
    """
    due, owner = [], []
    for index, share in enumerate(parts):
        size = int(np.ceil(length * share)) + 1
        due.append((np.arange(size) + 0.5) / share)
        owner.append(np.full(size, index, np.uint8))
    order = np.argsort(np.concatenate(due), kind="stable")[:length]
    turns: np.ndarray = np.concatenate(owner)[order]
    return turns


class Mixture(Dataset[Row]):
    """`length` rows in a fixed order that depends on the seed alone; each source is shuffled anew every epoch.

    `sources` maps a kind to its rows, `parts` to its share; the kinds are those of `parts`.
    """

    def __init__(
        self, sources: Mapping[int, Any], parts: Mapping[int, float], length: int, seed: int
    ) -> None:
        self.kinds = list(parts)
        self.turns = take_turns([parts[kind] for kind in self.kinds], length)
        self.numbers = np.zeros(length, np.int64)  # how many rows of its kind come before each place
        self.shuffled = []
        for index, kind in enumerate(self.kinds):
            places = np.flatnonzero(self.turns == index)
            self.numbers[places] = np.arange(len(places))
            self.shuffled.append(Shuffled(sources[kind], max(1, len(places)), seed + kind))

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        turn = int(self.turns[index])
        row = self.shuffled[turn][int(self.numbers[index])]
        return {**row, "kind": np.asarray(self.kinds[turn]), "slot": np.asarray(index)}


def response_rows(
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]], context: int, together: bool = True
) -> Rows:
    """(prompt ids, response ids) packed into rows; `compared` is true where the next token is one of a response.

    Without `together` (packing.py) a row holds one conversation.
    """
    packed = pack_conversations(conversations, context, together=together)
    written = packed.pop("loss_mask")
    before = np.pad(written[:, 1:], ((0, 0), (0, 1)))  # the positions that predict the written tokens
    return Rows(
        {**packed, "compared": before, "room": np.zeros_like(written), "row_id": np.arange(len(written))}
    )


def prompt_rows(prompts: Sequence[Sequence[int]], longest: int, context: int, together: bool = True) -> Rows:
    """Prompts packed into rows, each with `room` for a response of `longest` tokens (less where the context ends)."""
    packed = pack_conversations([(prompt, [0] * longest) for prompt in prompts], context, together=together)
    room = packed.pop("loss_mask")
    return Rows({**packed, "compared": np.zeros_like(room), "room": room, "row_id": np.arange(len(room))})


class TextRows(Dataset[Row]):
    """Blocks of plain text in the form of `response_rows`: one document, every position compared."""

    def __init__(self, blocks: Any) -> None:
        self.blocks, context = blocks, blocks.shape[1]
        compared = np.ones(context, bool)
        compared[-1] = False  # the next token is in another block
        self.fixed: Row = {
            "position_ids": np.arange(context),
            "document_ids": np.zeros(context, np.int32),
            "compared": compared,
            "room": np.zeros(context, bool),
        }

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.blocks[index].astype(np.int64), "row_id": np.asarray(index), **self.fixed}


def held_out(rows: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of the rows to learn, of those to watch), ascending; never more than a quarter is watched.

    These lie at equal distances: rows are packed with the longest texts first, and the last ones hold the shortest. The prompt of
    a watched text may stand in a learnt row too, where it is answered at another temperature.
    """
    watched = min(wanted, rows // 4)
    places = (2 * np.arange(watched) + 1) * rows // (2 * max(1, watched))
    return np.setdiff1d(np.arange(rows), places), places
