"""A drafter that knows only some of the target's tokens: which ones, and the engine that gives all others q = 0.

Such a drafter numbers its tokens itself. Row i < V' of its tables is the target's token `ids[i]`; the last row is read in the
place of every other token, and its logit is never used. Beside the model lies

    vocabulary.json    {"target_vocab_size": V, "ids": [V' ascending target ids], "fillers": rows behind the last one (0)}

Losslessness needs nothing more: the loop samples from q and the rule compares q with p, and both see the logits [V] of this
engine, -inf where the drafter has no token (Leviathan et al. 2023 ask of q only that the tokens were drawn from it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import read_json, write_text
from edgespec.core.manifest import MAX_VOCAB_SIZE
from edgespec_runtime.engines.engine import Engine, Logits, check_tokens

VOCABULARY = "vocabulary.json"
MAX_BYTES = 16 * 1024 * 1024  # a vocabulary of a million tokens takes 8 MB


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The target's tokens that a drafter knows: ascending `ids` [V'] (int64) out of `target_vocab_size`."""

    target_vocab_size: int
    ids: NDArray[np.int64]
    fillers: int = 0
    """Rows of the drafter's tables that come last and that nothing reads."""

    @property
    def rows(self) -> int:
        """Rows of the drafter's tables: V' + 1, and the fillers."""
        return len(self.ids) + 1 + self.fillers

    @property
    def keeps_numbers(self) -> bool:
        """Whether the drafter's numbers are the target's."""
        return int(self.ids[-1]) == len(self.ids) - 1

    def places(self) -> NDArray[np.int64]:
        """[V] the drafter's row of each of the target's tokens; V' for those it does not know."""
        found = np.full(self.target_vocab_size, len(self.ids), np.int64)
        found[self.ids] = np.arange(len(self.ids))
        return found


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """One line, whole or not at all."""
    value = {"target_vocab_size": vocabulary.target_vocab_size, "ids": vocabulary.ids.tolist()}
    if vocabulary.fillers:
        value["fillers"] = vocabulary.fillers
    write_text(path, json.dumps(value) + "\n")


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """The subset a model folder knows, or None where it knows all tokens. Raises InputError where the file is damaged."""
    path = folder / VOCABULARY
    return read_vocabulary(path, InputError) if path.exists() else None


def read_vocabulary(path: Path, error: type[EdgespecError] = BundleError) -> Vocabulary:
    """Read vocabulary.json, which may come from a stranger: every value is checked. Raises `error` naming file and value."""

    def refuse(what: str) -> EdgespecError:
        return error(f"{path}: {what}; build the drafter again")

    value: Any = read_json(path, error=error, limit=MAX_BYTES)
    if not isinstance(value, dict):
        raise refuse(f"it holds {type(value).__name__}, and a JSON object is wanted")
    total, ids = value.get("target_vocab_size"), value.get("ids")
    if type(total) is not int or not 1 <= total <= MAX_VOCAB_SIZE:
        raise refuse(f"'target_vocab_size' is {_short(total)}, and 1 to {MAX_VOCAB_SIZE} is wanted")
    if not isinstance(ids, list) or not ids:
        raise refuse(f"'ids' is {_short(ids)}, and a list of token ids is wanted")
    before = -1
    for place, token in enumerate(ids):
        if type(token) is not int or not before < token < total:
            raise refuse(
                f"ids[{place}] is {_short(token)} after {before}, and ascending ids below {total} are wanted"
            )
        before = token
    fillers = value.get("fillers", 0)
    if type(fillers) is not int or not 0 <= fillers <= MAX_VOCAB_SIZE:
        raise refuse(f"'fillers' is {_short(fillers)}, and 0 to {MAX_VOCAB_SIZE} is wanted")
    return Vocabulary(total, np.array(ids, np.int64), fillers)


def _short(value: Any) -> str:
    return repr(value)[:80] if not isinstance(value, int) or abs(value) < 10**18 else "a huge number"


class PartialEngine:
    """Around an engine, or a head, that knows V' of the target's V tokens: what it gives for these becomes rows of V."""

    def __init__(self, inner: Any, vocabulary: Vocabulary) -> None:
        self.inner, self.name, self.vocab_size = inner, inner.name, vocabulary.target_vocab_size
        self.context_length, self.block_length = inner.context_length, inner.block_length
        self._ids = vocabulary.ids
        self._logits = np.full((self.block_length, self.vocab_size), -np.inf, np.float32)

    @property
    def n_past(self) -> int:
        return self.inner.n_past  # type: ignore[no-any-return]

    def _spread(self, known: Logits) -> Logits:
        """Logits [n, V' or more] as [n, V], -inf for all other tokens; valid until the next call."""
        logits, ids = self._logits[: len(known)], self._ids
        for row, values in zip(logits, known, strict=True):  # 8 µs a row of 8,000; in one statement 21
            row[ids] = values[: len(ids)]
        return logits

    def rewind(self, n_past: int) -> None:
        """Forget every token but the first `n_past`."""
        self.inner.rewind(n_past)

    def close(self) -> None:
        self.inner.close()


class SubsetEngine(PartialEngine):
    """An engine of V' + 1 rows or more as one of V tokens. Takes the target's ids, gives logits [n, V], -inf outside the subset.

    Raises BundleError where the model's tables have other rows than the vocabulary says.
    """

    def __init__(self, inner: Engine, vocabulary: Vocabulary) -> None:
        if inner.vocab_size != vocabulary.rows:
            raise BundleError(
                f"{inner.name} has a vocabulary of {inner.vocab_size} rows; {VOCABULARY} lists {len(vocabulary.ids)} tokens, "
                f"which needs {vocabulary.rows}: fetch or build the bundle again"
            )
        super().__init__(inner, vocabulary)
        self.rope_border: int | None = getattr(inner, "rope_border", None)
        self._places = vocabulary.places()

    def forward(self, tokens: Sequence[int]) -> Logits:
        check_tokens(self, tokens)
        return self._spread(self.inner.forward(self._places.take(tokens).tolist()))

    def use_rope(self, *, long: bool) -> None:
        self.inner.use_rope(long=long)
