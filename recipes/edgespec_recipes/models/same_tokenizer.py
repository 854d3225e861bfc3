"""Whether two model folders number the same tokens alike: what one model's distributions mean to another rests on it."""

from __future__ import annotations

from pathlib import Path

from edgespec.core.errors import InputError
from edgespec_recipes.models.loading import load_tokenizer


def check_same_vocabulary(a_folder: Path, b_folder: Path, what: str) -> None:
    """Raise InputError naming the first token id that two tokenizers use differently; `what` names the two models.

    Vocabularies are compared, not files: a later release of a tokenizer's files may hold the same tokens. Rows of the embedding
    beyond the tokenizer (padding, as in Qwen2's larger models) are no tokens.
    """
    names = []
    for folder in (a_folder, b_folder):
        names.append({number: token for token, number in load_tokenizer(folder).get_vocab().items()})
    a, b = names
    for number in sorted(a.keys() | b.keys()):
        if a.get(number) != b.get(number):
            seen, other = (repr(name[number]) if number in name else "no token" for name in (a, b))
            raise InputError(
                f"{what} must have one tokenizer: token {number} is {seen} in {a_folder} ({len(a)} tokens) and {other} in "
                f"{b_folder} ({len(b)} tokens); give two models of one family"
            )
