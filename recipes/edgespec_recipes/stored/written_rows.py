"""What the target wrote, as rows to train a feature drafter on: tokens, its hidden states before them, its distributions.

A row is one of `mixing.response_rows` with `features` [T, G] beside it: slot s has the target's hidden states at the slot
before, and zeros at the beginning of a text. States and distributions come from the files that were kept while the target wrote
(written_states.py), so that no second pass of the target is needed. Mapped, never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.data.token_rows import Row, Rows
from edgespec_recipes.stored.top_k import Store
from edgespec_recipes.stored.written_states import Mapped, Part, check_states, cut_key, find_states, texts_of


class WrittenRows(Store, Dataset[Row]):
    """Rows of `context` tokens from the generate stage's folder, and the distributions of their compared positions.

    Attributes:
        vocab_size: the target's. width: G, of what was kept of a token. layers: the early ones in it. target: the checksum of
            the file that wrote.
        counts: [vocab_size] how often each token was written or read.

    Raises InputError where a shard lacks hidden states or distributions, or one is damaged.
    """

    def __init__(self, folder: Path, context: int) -> None:
        self._texts: dict[bytes, tuple[Part, Part]] = {}  # of a text: its records, its features
        self._mapped = Mapped()
        conversations = []
        about: dict[str, Any] = {}
        for shard in sorted(folder.glob("shard-*.jsonl")):
            about = read_json(shard.with_suffix(".json"))
            check_states(shard, about)
            for row, records, features in find_states(shard):
                if records is None or features is None:
                    raise InputError(
                        f"{shard} has no hidden states or no distributions beside its rows; write it again with "
                        "--generate.features and --distill.target-side stored"
                    )
                conversations.append((row["prompt_ids"], row["response_ids"]))
                self._texts.setdefault(cut_key(row, context), (records, features))
        if not about:
            raise InputError(f"{folder} has no responses; run the generate stage first")
        self.vocab_size, self.width = int(about["top_k"]["vocab_size"]), int(about["features"]["width"])
        self.layers = tuple(about["features"].get("layers", ()))
        self.target = str(about["features"]["target"])
        self.packed: Rows = response_rows(conversations, context)
        tokens = self.packed.arrays["input_ids"][self.packed.arrays["document_ids"] >= 0]
        self.counts = np.bincount(tokens, minlength=self.vocab_size)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Row:
        row = self.packed[index]
        features = np.zeros((len(row["input_ids"]), self.width), np.float16)
        for slots, key, _ in texts_of(row):
            features[slots[1:]] = self._mapped.read(self._texts[key][1])[: len(slots) - 1]
        return {**row, "features": features}

    def steps_seen(self, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [n], the features [n, G] before them and those at them, of row after row: about `most` tokens."""
        count = 0
        for index in range(len(self)):
            if count >= most:
                return
            row = self[index]
            inside = np.flatnonzero((row["position_ids"][1:-1] > 0) & (row["position_ids"][2:] > 0)) + 1
            count += len(inside)
            features = torch.from_numpy(row["features"].astype(np.float32))
            yield torch.from_numpy(row["input_ids"][inside]), features[inside], features[inside + 1]

    def records(self, row: int) -> np.ndarray:
        texts = texts_of(self.packed[row])
        found = [self._mapped.read(self._texts[key][0])[:compared] for _, key, compared in texts]
        return np.concatenate(found)


class JoinedRows(Store):
    """The rows of several folders as one source of distributions; each folder's rows are numbered behind those before it.

    Raises InputError where the folders are not of one target.
    """

    def __init__(self, parts: Sequence[WrittenRows]) -> None:
        first = parts[0]
        for other in parts[1:]:
            seen, wanted = ((one.target, one.vocab_size, one.layers) for one in (other, first))
            if seen != wanted:
                raise InputError(
                    f"the written rows come from the target {first.target[:12]} and the read rows from {other.target[:12]}; "
                    "remove the folder of the older one and run the same command again"
                )
        self.parts, self.vocab_size = parts, first.vocab_size
        self.starts = np.cumsum([0, *map(len, parts)])

    def records(self, row: int) -> np.ndarray:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[part].records(row - int(self.starts[part]))
