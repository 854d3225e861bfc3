"""Token ids of many documents on disk, in shards of bounded size that resume. Knows nothing of text, tokenizers or models.

`tokens.json` says what is there: whose tokens they are, and for every shard its size, its checksum and the document it ends in.
So a killed run goes on at the last whole shard, no more is read than is wanted, and a damaged shard is made again alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sha256_file, whole_file, write_array, write_json
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


class TextBlocks:
    """[n, context] token ids in their stored type: row i is the tokens i * context ... of the first `most` in a folder, or all.

    Raises InputError where there are none.
    """

    def __init__(self, folder: Path, context: int, most: int | None = None) -> None:
        state = _read_state(folder)
        self.folder, self.dtype = folder, np.dtype(state.dtype)
        self.ends = list(accumulate(shard.tokens for shard in state.shards))
        self.tokens = state.tokens if most is None else min(most, state.tokens)
        self.shape = self.tokens // context, context

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def __getitem__(self, index: int) -> np.ndarray:
        """A file is opened for the read only: there may be thousands."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = index * self.shape[1], (index + 1) * self.shape[1]
        parts = []
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
        for made in _go_on(folder, state, documents, wanted, bar.update):
            write_json(folder / STATE, asdict(made))
            state = made
    write_json(folder / STATE, asdict(replace(state, complete=wanted is None or state.tokens < wanted)))


def _go_on(
    folder: Path, state: State, documents: DocumentsFrom, wanted: int | None, advance: Callable[[int], Any]
) -> Iterator[State]:
    """Write what follows `state` in shards, up to `wanted` tokens in all or to the documents' end; the state after each."""
    number, at = state.end

    def room() -> int:
        return SHARD_TOKENS if wanted is None else min(SHARD_TOKENS, wanted - state.tokens)

    def written(documents: int, begun: int) -> State:
        with whole_file(shard_file(folder, len(state.shards))) as temporary, open(temporary, "wb") as stream:
            write_array(stream, piece[:filled])
        checksum = hashlib.sha256(piece[:filled].data).hexdigest()
        return replace(state, shards=(*state.shards, Shard(filled, checksum, documents, begun)))

    piece, filled = np.empty(room(), np.dtype(state.dtype)), 0
    for ids in documents(number):
        while at < len(ids):
            taken = min(len(piece) - filled, len(ids) - at)
            piece[filled : filled + taken] = ids[at : at + taken]
            filled, at = filled + taken, at + taken
            advance(taken)
            if filled == len(piece):
                whole = at == len(ids)
                state = written(number + whole, 0 if whole else at)
                yield state
                piece, filled = piece[: room()], 0
                if not len(piece):
                    return
        number, at = number + 1, 0
    if filled:
        yield written(number, 0)


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
    made = next(_go_on(folder, start, documents, start.tokens + old.tokens, lambda tokens: None), start)
    if made.shards[number:] == (old,):
        return state
    state = replace(made, complete=False)
    write_json(folder / STATE, asdict(state))
    return state


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
