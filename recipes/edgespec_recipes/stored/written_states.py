"""What the target computed while it wrote, kept beside its rows: distributions, and hidden states where a drafter reads them.

Beside shard-00000.jsonl lie, where they were asked for,

    shard-00000.top_k.npy      records (top_k.record_type) of all response tokens, row after row: the untempered distribution
                               that each one was drawn from. 4 bytes for each of the k (6 for vocabularies above 65,536) and 2.
    shard-00000.features.npy   float16 [tokens, G], row after row: the last hidden state, after the final norm, of every token of
                               prompt and response but the last, which the target never read. 2 H bytes a token. For a head
                               that reads three layers, the states of the early ones lie before it.

shard-00000.json, written last, has their checksums and whose they are. What lies there is read, mapped and never copied, as a
source of distributions and as rows to train a feature drafter on. Knows no engine and no training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl, sha256_file, whole_file
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.data.token_rows import Row, Rows, documents_of
from edgespec_recipes.data.token_shards import check_file
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import Store

RECORDS, FEATURES = "top_k", "features"
OPEN_FILES = 64  # of a build with thousands; a system allows a process some 256 to 1,024


@dataclass(frozen=True)
class Wanted:
    """What is to be kept. `top_k`: tokens of a record, 0 for no records; `target`: a checksum of the target's file; `width`: G;
    `layers`: those whose states lie before the last one's."""

    target: str
    vocab_size: int
    width: int
    top_k: int = 0
    features: bool = False
    layers: tuple[int, ...] = ()

    def about(self) -> dict[str, dict[str, Any]]:
        """What shard-00000.json says of each file, beside its size and checksum."""
        found: dict[str, dict[str, Any]] = {}
        if self.top_k:
            found[RECORDS] = {"target": self.target, "top_k": self.top_k, "vocab_size": self.vocab_size}
        if self.features:
            found[FEATURES] = {"target": self.target, "width": self.width}
            if self.layers:
                found[FEATURES]["layers"] = list(self.layers)
        return found


def state_path(shard: Path, kind: str) -> Path:
    """Where a shard's records or features lie."""
    return shard.with_suffix(f".{kind}.npy")


def write_states(shard: Path, wanted: Wanted, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write the arrays that are wanted; returns what is to be written into shard-00000.json about them."""
    found = wanted.about()
    for kind, about in found.items():
        about |= save_array(state_path(shard, kind), arrays[kind])
    return found


def save_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Write a .npy file; returns its size and checksum."""
    with whole_file(path) as temporary, open(temporary, "wb") as stream:
        np.save(stream, array, allow_pickle=False)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def check_states(shard: Path, about: Mapping[str, Any], wanted: Wanted | None = None) -> None:
    """Raise InputError where a file is not as `about` (shard-00000.json) has it, or is not what is wanted."""
    for kind, fields in (wanted.about() if wanted else {}).items():
        seen = about.get(kind) or {}
        other = [
            f"{name} {seen.get(name)!s:.12}" for name, value in fields.items() if seen.get(name) != value
        ]
        if other:
            raise InputError(f"{shard} has no {kind} as they are wanted ({', '.join(other)})")
    for kind in (RECORDS, FEATURES):
        if kind in about:
            check_file(state_path(shard, kind), about[kind].get("sha256"))


class Part(NamedTuple):
    """Rows of the array in a file: from `start` to before `end`."""

    path: Path
    start: int
    end: int


class Mapped:
    """Arrays in files, mapped from disk when they are read. Few are open at a time: each keeps a file open."""

    def __init__(self) -> None:
        self._open = lru_cache(OPEN_FILES)(partial(np.load, mmap_mode="r", allow_pickle=False))

    def __reduce__(self) -> tuple[type[Mapped], tuple[()]]:
        """A process that makes rows opens its own: it may be a new one, which gets the rows pickled."""
        return Mapped, ()

    def read(self, part: Part) -> np.ndarray:
        found: np.ndarray = self._open(part.path)[part.start : part.end]
        return found


def find_states(shard: Path) -> Iterator[tuple[dict[str, Any], Part | None, Part | None]]:
    """(row, where its records [R] are, where its features [P + R − 1, G] are) of every row of a shard; None where not kept.

    P and R are the lengths of row["prompt_ids"] and row["response_ids"]. Checksums are `check_states`'s. Raises InputError where
    the arrays are not of these rows.
    """
    rows = read_jsonl(shard)
    sizes = {
        RECORDS: [len(row["response_ids"]) for row in rows],
        FEATURES: [len(row["prompt_ids"]) + len(row["response_ids"]) - 1 for row in rows],
    }
    parts: dict[str, list[Part] | list[None]] = {}
    for kind, lengths in sizes.items():
        path = state_path(shard, kind)
        if not path.is_file():
            parts[kind] = [None] * len(rows)
            continue
        count = len(np.load(path, mmap_mode="r", allow_pickle=False))
        if count != sum(lengths):
            raise InputError(f"{path} has {count} rows; those of {shard.name} need {sum(lengths)}")
        ends = accumulate(lengths)
        parts[kind] = [Part(path, end - length, end) for length, end in zip(lengths, ends, strict=True)]
    yield from zip(rows, parts[RECORDS], parts[FEATURES], strict=True)


class WrittenTexts:
    """The texts of a folder of shards, cut as rows of `context` tokens cut them, with what was kept of each: no pass is needed.

    With records they are a source of distributions (target_store.Distributions).

    about: what is said of the last shard. `see` is told of every row. Raises InputError where a shard is damaged or lacks what is
    `wanted` (hidden states and distributions of any target by default).
    """

    def __init__(
        self,
        folder: Path,
        context: int,
        wanted: Wanted | None = None,
        see: Callable[[dict[str, Any]], Any] = lambda row: None,
    ) -> None:
        self.precision = Precision("as written", "kept while the target wrote these rows")
        self.about: dict[str, Any] = {}
        self._mapped = Mapped()
        self._parts: dict[bytes, tuple[Part | None, Part | None]] = {}
        for shard in sorted(folder.glob("shard-*.jsonl")):
            self.about = read_json(shard.with_suffix(".json"))
            check_states(shard, self.about, wanted)
            for row, *parts in find_states(shard):
                if wanted is None and None in parts:
                    raise InputError(
                        f"{shard} has no hidden states or no distributions beside its rows; write it again with "
                        "--generate.features and --distill.target-side stored"
                    )
                see(row)
                self._parts.setdefault(cut_key(row, context), (parts[0], parts[1]))

    def hold(self, rows: Any) -> bool:
        """Whether every text of packed rows was written here."""
        return all(key in self._parts for number in range(len(rows)) for _, key, _ in texts_of(rows[number]))

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        """See target_store.Distributions; `top_k` is the one that was wanted."""
        return (self.row_records(rows[number]) for number in part)

    def row_records(self, row: Row) -> np.ndarray:
        """Records at the compared positions of a packed row."""
        return np.concatenate([self._read(key, 0)[:compared] for _, key, compared in texts_of(row)])

    def features(self, row: Row, width: int) -> np.ndarray:
        """[T, width]: slot s has the hidden states at the slot before, and zeros at the beginning of a text."""
        features = np.zeros((len(row["input_ids"]), width), np.float16)
        for slots, key, _ in texts_of(row):
            features[slots[1:]] = self._read(key, 1)[: len(slots) - 1]
        return features

    def _read(self, key: bytes, kind: int) -> np.ndarray:
        part = self._parts[key][kind]
        assert part is not None
        return self._mapped.read(part)


class WrittenRows(Store, Dataset[Row]):
    """What the target wrote, as rows to train a feature drafter on: of the generate stage's folder, packed to `context` tokens.

    A row is one of `mixing.response_rows`, numbered from `first`, with `features` [T, G] beside it. No second pass of the target
    is needed.

    Attributes:
        vocab_size: the target's. width: G, of what was kept of a token. layers: the early ones in it. target: the checksum of
            the file that wrote.
        counts: [vocab_size] how often each token was written or read.

    Raises InputError where a shard lacks hidden states or distributions, or one is damaged.
    """

    def __init__(self, folder: Path, context: int, first: int = 0) -> None:
        conversations: list[Any] = []
        self._texts = WrittenTexts(
            folder, context, see=lambda row: conversations.append((row["prompt_ids"], row["response_ids"]))
        )
        about = self._texts.about
        if not about:
            raise InputError(f"{folder} has no responses; run the generate stage first")
        self.vocab_size, self.width = int(about["top_k"]["vocab_size"]), int(about["features"]["width"])
        self.layers = tuple(about["features"].get("layers", ()))
        self.target = str(about["features"]["target"])
        self.packed: Rows = response_rows(conversations, context)
        self.packed.arrays["row_id"] += first
        tokens = self.packed.arrays["input_ids"][self.packed.arrays["document_ids"] >= 0]
        self.counts = np.bincount(tokens, minlength=self.vocab_size)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Row:
        row = self.packed[index]
        return {**row, "features": self._texts.features(row, self.width)}

    def records(self, row: int) -> np.ndarray:
        return self._texts.row_records(self.packed[row])

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


class JoinedRows(Store):
    """What the target wrote and then what it read as one source of distributions, the rows numbered in this order.

    Raises InputError where they are not of one target.
    """

    def __init__(self, written: WrittenRows, read: WrittenRows) -> None:
        seen, wanted = ((one.target, one.vocab_size, one.layers) for one in (read, written))
        if seen != wanted:
            raise InputError(
                f"the written rows come from the target {written.target[:12]} and the read rows from {read.target[:12]}; "
                "remove the folder of the older one and run the same command again"
            )
        self.written, self.read, self.vocab_size = written, read, written.vocab_size

    def records(self, row: int) -> np.ndarray:
        behind = row - len(self.written)
        return self.written.records(row) if behind < 0 else self.read.records(behind)


def texts_of(row: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, bytes, int]]:
    """(its slots in the row, its `key_of`, how many of them are compared) of each text of a packed row."""
    for slots in documents_of(row):
        compared = np.flatnonzero(row["compared"][slots])
        yield slots, key_of(row["input_ids"][slots], int(compared[0]) + 1), len(compared)


def cut_key(row: Mapping[str, Any], context: int) -> bytes:
    """`key_of` a shard's row as `token_rows.pack_conversations` cuts it for rows of `context` tokens."""
    prompt = row["prompt_ids"]
    return key_of([*prompt, *row["response_ids"]][:context], len(prompt))


def key_of(tokens: Sequence[int] | np.ndarray, prompt: int) -> bytes:
    """Of a text and the length of its prompt."""
    data = np.asarray([prompt, *tokens], np.int64).tobytes()
    return hashlib.sha256(data).digest()
