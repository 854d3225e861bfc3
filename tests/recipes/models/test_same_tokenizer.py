"""Two model folders of one tokenizer, or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgespec_recipes.models.same_tokenizer import check_same_vocabulary
from tiny_models import make_model_folder

from edgespec.core.errors import InputError


def test_first_difference_is_named(tmp_path: Path) -> None:
    one, same = make_model_folder(tmp_path / "one"), make_model_folder(tmp_path / "same", seed=1, layers=1)
    check_same_vocabulary(one, same, "the teacher and the target")
    content = json.loads((same / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    tokens = {number: token for token, number in vocabulary.items()}
    vocabulary[tokens[7]], vocabulary[tokens[9]] = 9, 7
    (same / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        InputError, match="the teacher and the target must have one tokenizer: token 7 is "
    ) as told:
        check_same_vocabulary(one, same, "the teacher and the target")
    assert f"{tokens[7]!r} in {one}" in str(told.value)
    assert f"{tokens[9]!r} in {same}" in str(told.value)


def test_a_shorter_vocabulary(tmp_path: Path) -> None:
    one, short = make_model_folder(tmp_path / "one"), make_model_folder(tmp_path / "short", vocab_size=400)
    with pytest.raises(InputError, match=r"token \d+ is .*512 tokens.*400 tokens"):
        check_same_vocabulary(one, short, "both")
