"""Whether two models mean the same by a token id, and which of its target's tokens a drafter has rows for.

Tokenizers are compared as the tokenizers library reads them, so that older and newer forms of one file are the same. Ids are
drafted: they must mean the same pieces. The target's tokenizer splits every text, so post-processors, chat templates and how an
added token is looked for may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgespec.core.errors import InputError
from edgespec.model_folder.head import shape_of_drafter
from edgespec_runtime.engines.vocabulary import Vocabulary, vocabulary_of
from edgespec_runtime.text.tokenizer import read_tokenizer

# of a tokenizer's model: which pieces there are, and what bytes one stands for
_MODEL = ("type", "merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")


def check_same_ids(both: Mapping[Path, Tokenizer], what: str, *, pieces: bool = False) -> None:
    """Raise InputError naming the first token id that two tokenizers, by their folders, use differently; `what`: the two models.

    An added token that only one of them has is no difference, nor is a row of an embedding that no token has. One folder has one
    tokenizer. With `pieces` they must also make their pieces from text in one way.
    """
    if len(both) == 1:
        return
    (a_folder, one), (b_folder, other) = both.items()
    a, b = _texts(one), _texts(other)
    added = {token.content for each in (one, other) for token in each.get_added_tokens_decoder().values()}
    shared = {*a.values()} & {*b.values()}
    for index in sorted(a.keys() | b.keys()):
        mine, theirs = a.get(index), b.get(index)
        only = mine if theirs is None else theirs if mine is None else None
        if mine != theirs and (only not in added or only in shared):
            seen, found = ("no token" if text is None else repr(text[:80]) for text in (mine, theirs))
            raise InputError(
                f"{what} must have one tokenizer: token {index} is {seen} in {a_folder} ({len(a)} tokens) and {found} in "
                f"{b_folder} ({len(b)} tokens); give two models of one family"
            )
    ways = _pieces(other)
    for part, way in _pieces(one).items() if pieces else ():
        if way != ways[part]:
            raise InputError(
                f"{what} must have one tokenizer: those of {a_folder} and {b_folder} differ in {part!r}; give two models of one "
                "family"
            )


def subset_of(target_folder: Path, drafter_folder: Path) -> Vocabulary | None:
    """The target's tokens that a drafter drafts; None for all of them, row by row.

    vocabulary.json says so where the drafter has one. Else a drafter with more or fewer rows than the target drafts the tokens of
    its own tokenizer and never a row without a token; one such row is read in the place of tokens that it does not know. Where
    all its rows have tokens the last one is that. Raises InputError for files that are damaged.
    """
    found = vocabulary_of(drafter_folder)
    if found is not None:
        return found
    target, rows = (shape_of_drafter(folder).vocab_size for folder in (target_folder, drafter_folder))
    if target == rows:
        return None
    tokens = max(_texts(read_tokenizer(drafter_folder / "tokenizer.json", InputError)), default=0) + 1
    known = max(1, min(tokens, rows - 1, target))
    return Vocabulary(target, np.arange(known), rows - known - 1)


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """{id: text}; an added token has the last word on its id."""
    found = {index: text for text, index in tokenizer.get_vocab(with_added_tokens=False).items()}
    return found | {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}


def _pieces(tokenizer: Tokenizer) -> dict[str, Any]:
    spec = json.loads(tokenizer.to_str())
    model = {name: spec["model"].get(name) for name in _MODEL}
    return {**model, "normalizer": spec["normalizer"], "pre_tokenizer": spec["pre_tokenizer"]}
