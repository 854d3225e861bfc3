"""Token ids of many documents on disk, in shards of bounded size that resume. Knows nothing of text, tokenizers or models.

`tokens.json` says what is there: whose tokens they are, and for every shard its size, its checksum and the document it ends in.
So a killed run goes on at the last whole shard, no more is read than is wanted, and a damaged shard is made again alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sha256_file, whole_file, write_json
from edgespec.core.progress import progress

log = logging.getLogger(__name__)

SHARD_TOKENS = 2**24
STATE = "tokens.json"

DocumentsFrom = Callable[[int], Iterator[Sequence[int]]]
"""The token ids of every document from the n-th on, always the same."""


@dataclass(frozen=True)
class Shard:
    """Its tokens and checksum, and where it ends: after so many whole documents and `begun` tokens of the next."""

    tokens: int
    sha256: str
    documents: int
    begun: int


@dataclass(frozen=True)
class State:
    """What `tokens.json` holds. `complete`: the last shard ends with the last document."""

    about: dict[str, Any]
    dtype: str
    shards: tuple[Shard, ...] = ()
    complete: bool = False

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def end(self) -> tuple[int, int]:
        """Where the next shard begins: (whole documents, tokens of the next one) before it."""
        return (self.shards[-1].documents, self.shards[-1].begun) if self.shards else (0, 0)


class TokenShards:
    """The tokens in a folder as one long array. Raises InputError where there are none."""

    def __init__(self, folder: Path) -> None:
        state = _read_state(folder)
        self.folder, self.dtype = folder, np.dtype(state.dtype)
        self.ends = list(accumulate(shard.tokens for shard in state.shards))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [start, stop) in their stored type. A file is opened for the read only: there may be thousands."""
        parts = [np.empty(0, self.dtype)]
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = self.ends[number - 1] if number else 0
            end = min(stop, self.ends[number])
            file, offset = shard_file(self.folder, number), (start - first) * self.dtype.itemsize
            parts.append(np.fromfile(file, self.dtype, end - start, offset=offset))
            start, number = end, number + 1
        return np.concatenate(parts)


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"


def write_tokens(
    folder: Path,
    about: dict[str, Any],
    kind: type[np.unsignedinteger[Any]],
    documents: DocumentsFrom,
    wanted: int | None,
) -> None:
    """Bring `folder` to the first `wanted` tokens of the documents (all of them by default), of type `kind`.

    `about` names the documents: tokens of others are removed. Whole shards stay; a damaged one is named in the log and made
    again. Memory: one shard. Raises what `documents` raises.
    """
    state = _state_of(folder, {**about, "shard_tokens": SHARD_TOKENS}, np.dtype(kind).name)
    number = have = 0
    while number < len(state.shards) and (wanted is None or have < wanted):
        shard = state.shards[number]
        try:
            check_file(
                shard_file(folder, number), shard.sha256, shard.tokens * np.dtype(state.dtype).itemsize
            )
        except InputError as error:
            log.warning("%s; it is made again", error)
            state = _remade(folder, number, state, documents)
        have += sum(shard.tokens for shard in state.shards[number : number + 1])
        number += 1
    if state.complete or (wanted is not None and state.tokens >= wanted):
        return
    if state.shards and state.shards[-1].tokens < SHARD_TOKENS:  # it ended where no more was wanted
        state = replace(state, shards=state.shards[:-1])
    with progress("tokenise text", wanted, "tokens", state.tokens) as bar:
        sizes = _sizes(state.tokens, wanted)
        for piece, shard in _pieces(state.end, documents, sizes, np.dtype(state.dtype), bar.update):
            _write_shard(folder, len(state.shards), piece)
            state = replace(state, shards=(*state.shards, shard))
            write_json(folder / STATE, asdict(state))
    write_json(folder / STATE, asdict(replace(state, complete=wanted is None or state.tokens < wanted)))


def _sizes(have: int, wanted: int | None) -> Iterator[int]:
    """Sizes of the shards still to be written."""
    while wanted is None or have < wanted:
        size = SHARD_TOKENS if wanted is None else min(SHARD_TOKENS, wanted - have)
        yield size
        have += size


def _pieces(
    start: tuple[int, int],
    documents: DocumentsFrom,
    sizes: Iterable[int],
    kind: np.dtype[Any],
    advance: Callable[[int], Any],
) -> Iterator[tuple[np.ndarray, Shard]]:
    """The tokens from `start` (whole documents, tokens of the next) on, in arrays of these sizes; where the documents end, the
    last is shorter. An array is valid until the next one is asked for.
    """
    sizes = iter(sizes)
    piece, filled = np.empty(next(sizes), kind), 0
    number, at = start
    for ids in documents(number):
        while at < len(ids):
            taken = min(len(piece) - filled, len(ids) - at)
            piece[filled : filled + taken] = ids[at : at + taken]
            filled, at = filled + taken, at + taken
            advance(taken)
            if filled == len(piece):
                whole = at == len(ids)
                yield piece, _shard(piece, number + whole, 0 if whole else at)
                if not (size := next(sizes, 0)):
                    return
                piece, filled = piece if size == len(piece) else np.empty(size, kind), 0
        number, at = number + 1, 0
    if filled:
        yield piece[:filled], _shard(piece[:filled], number, 0)


def _shard(piece: np.ndarray, documents: int, begun: int) -> Shard:
    return Shard(len(piece), hashlib.sha256(piece.data).hexdigest(), documents, begun)


def check_file(path: Path, sha256: Any, size: int | None = None) -> None:
    """Raise InputError where a file is missing or not as it was written; `size`: its bytes, which are looked at first."""
    if not path.is_file():
        raise InputError(f"{path} is missing")
    if size is not None and (seen := path.stat().st_size) != size:
        raise InputError(f"{path} has {seen} bytes and had {size} when it was written")
    if (found := sha256_file(path)) != sha256:
        raise InputError(f"{path} has the sha256 {found[:12]} and had {str(sha256)[:12]} when it was written")


def _remade(folder: Path, number: int, state: State, documents: DocumentsFrom) -> State:
    """Write one shard again. Where it is no longer what it was, the ones after it are forgotten: they do not go on from it."""
    old = state.shards[number]
    start = replace(state, shards=state.shards[:number])
    made = next(_pieces(start.end, documents, [old.tokens], np.dtype(state.dtype), lambda tokens: None), None)
    if made:
        piece, shard = made
        _write_shard(folder, number, piece)
        start = replace(start, shards=(*start.shards, shard))
        if shard == old:
            return state
    state = replace(start, complete=False)
    write_json(folder / STATE, asdict(state))
    return state


def _write_shard(folder: Path, number: int, piece: np.ndarray) -> None:
    with whole_file(shard_file(folder, number)) as temporary:
        piece.tofile(temporary)


def _state_of(folder: Path, about: dict[str, Any], dtype: str) -> State:
    """What `folder` holds of these documents; emptied of shards of others, and of what no state tells of."""
    state = None
    if (folder / STATE).exists():
        try:
            state = _read_state(folder)
        except InputError as error:
            log.warning("%s; the text is tokenised again", error)
    if state and (state.about, state.dtype) == (about, dtype):
        return state
    (folder / STATE).unlink(missing_ok=True)
    for file in folder.glob("tokens-*.bin"):
        file.unlink()
    return State(about, dtype)


def _read_state(folder: Path) -> State:
    values = read_json(folder / STATE)
    try:
        shards = tuple(Shard(**shard) for shard in values.pop("shards"))
        return State(**values, shards=shards)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / STATE} is not a list of token shards ({error}); remove that folder"
        ) from error
