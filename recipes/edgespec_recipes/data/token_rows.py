"""Token rows of fixed length: plain text cut into blocks, conversations packed side by side. Knows nothing of models.

Plain text: documents joined by the end-of-sequence token, concatenated, cut into blocks of the context length, no padding
(direct alignment, appendix A.4). Conversations are never cut into each other: each keeps its own positions and may attend to
itself only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from edgespec.core.errors import InputError
from edgespec.recipe.data_sources import HUB
from edgespec_recipes.data.documents import fingerprint, listed, read_documents
from edgespec_recipes.data.token_shards import TextBlocks, write_tokens
from edgespec_recipes.parallel import processes

PADDING = -1  # document id of padding
# what is tokenised at once: so many documents, or fewer with so much text
_TOGETHER, _TOGETHER_CHARACTERS = 64, 2**20

Row = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


class Rows(Dataset[Row]):
    """Row i of every array (or of `TextBlocks`), under the array's name."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = dict(arrays)
        self.size = min(len(array) for array in arrays.values())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        return {name: np.asarray(array[index]) for name, array in self.arrays.items()}


class Shuffled(Dataset[Row]):
    """`length` rows of another dataset in a random order of its own for every epoch, from the seed alone."""

    def __init__(self, dataset: Any, length: int, seed: int) -> None:
        self.dataset, self.length, self.seed = dataset, length, seed
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.length:
            raise IndexError(index)
        epoch, place = divmod(index, len(self.dataset))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        row: Row = self.dataset[int(self.order[place])]
        return row


def tokenise(documents: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document between its start token (where the tokenizer has one of its own) and its end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            "the target's tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    start = [] if tokenizer.bos_token_id in (None, end) else [tokenizer.bos_token_id]
    for batch in _batches(documents):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield [*start, *ids, end]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _TOGETHER or sum(map(len, batch)) >= _TOGETHER_CHARACTERS:
            yield batch
            batch = []
    if batch:
        yield batch


def _about(source: str | Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """What the tokens of a text depend on."""
    vocabulary = [tokenizer.bos_token_id, tokenizer.eos_token_id, *sorted(tokenizer.get_vocab().items())]
    digest = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
    return {"source": fingerprint(source), "tokenizer": digest}


def tokens_to_read(source: str | Sequence[str], wanted: int) -> int | None:
    """How much of a text a training of `wanted` tokens reads.

    All of what is on this disk, so that its rows come from everywhere in it; of what is on the hub, which may be without end, the
    beginning.
    """
    return wanted if any(one.startswith(HUB) for one in listed(source)) else None


def text_blocks(
    source: str | Sequence[str], tokenizer: Any, context: int, folder: Path, tokens: int | None = None
) -> TextBlocks:
    """The first `tokens` tokens of a text (all of them by default) as blocks of `context`, kept in `folder`.

    What lies there is used and more is written as far as it is wanted; of several processes one writes. The blocks are the same
    whatever was written before. Raises InputError where the text gives not even one block.
    """

    def ids_from(document: int) -> Iterator[list[int]]:
        return tokenise(islice(read_documents(source), document, None), tokenizer)

    with processes.first():
        if not processes.rank():
            kind = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
            write_tokens(folder, _about(source, tokenizer), kind, ids_from, tokens)
        blocks = TextBlocks(folder, context, tokens)
    if not len(blocks):
        raise InputError(
            f"the text {', '.join(listed(source))!r} has {blocks.tokens} tokens; at least one block of {context} is needed: "
            "give more text or a shorter context"
        )
    return blocks


def pack_conversations(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    context: int,
    padding_id: int = 0,
    together: bool = True,
) -> dict[str, np.ndarray]:
    """Whole conversations (prompt_ids, response_ids) side by side in rows of `context` tokens, best fit, longest first.

    Without `together` each has a row of its own.

    Returns arrays [n, context]: input_ids (int64), position_ids (int64, from 0 in each conversation), document_ids (int32,
    from 0 in each row, PADDING beyond), loss_mask (bool, True on response tokens: the tokens to be predicted). A conversation
    longer than `context` loses its end; one whose prompt alone fills the row is left out.
    """
    usable = [(list(p), list(r)[: context - len(p)]) for p, r in rows if len(p) < context and len(r)]
    if not usable:
        raise InputError(
            f"no conversation has a response within the context of {context} tokens; raise the context"
        )
    usable.sort(key=lambda item: -(len(item[0]) + len(item[1])))  # stable: equal lengths keep their order
    free: list[list[int]] = [[] for _ in range(context + 1)]  # free[k]: rows with k tokens left
    bins: list[list[tuple[list[int], list[int]]]] = []
    for prompt, response in usable:
        size = len(prompt) + len(response)
        room = next((k for k in range(size, context + 1) if free[k]), None) if together else None
        if room is None:
            bins.append([])
            index, room = len(bins) - 1, context
        else:
            index = free[room].pop()
        bins[index].append((prompt, response))
        free[room - size].append(index)
    packed: dict[str, np.ndarray] = {
        "input_ids": np.full((len(bins), context), padding_id, np.int64),
        "position_ids": np.zeros((len(bins), context), np.int64),
        "document_ids": np.full((len(bins), context), PADDING, np.int32),
        "loss_mask": np.zeros((len(bins), context), bool),
    }
    for row, members in enumerate(bins):
        at = 0
        for document, (prompt, response) in enumerate(members):
            end = at + len(prompt) + len(response)
            packed["input_ids"][row, at:end] = prompt + response
            packed["position_ids"][row, at:end] = np.arange(end - at)
            packed["document_ids"][row, at:end] = document
            packed["loss_mask"][row, at + len(prompt) : end] = True
            at = end
    return packed


def documents_of(row: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """The columns of each conversation of a packed row, in order."""
    owner = row["document_ids"]
    for document in range(int(owner.max(initial=PADDING)) + 1):
        yield np.flatnonzero(owner == document)


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    """What a model is told of packed rows. Positions start anew in every conversation; packing.py gives them to the model so that
    each conversation sees itself only. A feature drafter's rows have `features`, and it tells texts apart by their numbers.
    """
    names = ("features", "document_ids") if "features" in batch else ("position_ids",)
    return {name: batch[name] for name in ("input_ids", *names)}
