"""What the target computed while it wrote, kept beside its rows: distributions, and hidden states where a drafter reads them.

Beside shard-00000.jsonl lie, where they were asked for,

    shard-00000.top_k.npy      records (top_k.record_type) of all response tokens, row after row: the untempered distribution
                               that each one was drawn from. 4 bytes for each of the k (6 for vocabularies above 65,536) and 2.
    shard-00000.features.npy   float16 [tokens, G], row after row: the last hidden state, after the final norm, of every token of
                               prompt and response but the last, which the target never read. 2 H bytes a token. For a head
                               that reads three layers, the states of the early ones lie before it.

shard-00000.json, written last, has their checksums and whose they are. Knows no engine and no training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl, sha256_file, whole_file
from edgespec_recipes.data.token_rows import documents_of
from edgespec_recipes.data.token_shards import check_file
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import record_type

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


class WrittenTarget:
    """The records of a folder of shards as a source of distributions (stored.Distributions): the target need not run again."""

    def __init__(self, folder: Path, target: str, top_k: int, vocab_size: int, context: int) -> None:
        """`context`: of the packed rows. Raises InputError where a shard has no such records, or is damaged."""
        self.precision = Precision("as written", "kept while the target wrote these rows")
        self.type = record_type(top_k, vocab_size)
        self._records: dict[bytes, Part] = {}
        self._mapped = Mapped()
        wanted = Wanted(target, vocab_size, 0, top_k)
        for shard in sorted(folder.glob("shard-*.jsonl")):
            check_states(shard, read_json(shard.with_suffix(".json")), wanted)
            for row, records, _ in find_states(shard):
                assert records is not None
                self._records.setdefault(cut_key(row, context), records)

    def holds(self, rows: Any) -> bool:
        """Whether every text of packed rows was written here."""
        texts = (key for number in range(len(rows)) for _, key, _ in texts_of(rows[number]))
        return all(key in self._records for key in texts)

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        """See stored.Distributions; `top_k` is the one that was asked for."""
        for number in part:
            texts = texts_of(rows[number])
            found = [self._mapped.read(self._records[key])[:compared] for _, key, compared in texts]
            yield np.concatenate([np.empty(0, self.type), *found])


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
