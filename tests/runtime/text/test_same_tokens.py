"""Whether two tokenizers mean the same by an id, whatever their files look like; and rows that no token has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.text.same_tokens import check_same_ids, subset_of
from edgespec_runtime.text.tokenizer import read_tokenizer
from other_rows import in_older_form
from tiny_models import byte_level_tokenizer, tokenizer_folder

from edgespec.core.errors import InputError

Spec = dict[str, Any]


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "one", byte_level_tokenizer(300))


@pytest.fixture
def other(one: Path, tmp_path: Path) -> Path:
    return shutil.copytree(one, tmp_path / "other")


def change(folder: Path, how: Callable[[Spec], None]) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    how(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def check(one: Path, other: Path) -> None:
    both = {folder: read_tokenizer(folder / "tokenizer.json") for folder in (one, other)}
    check_same_ids(both, "these", pieces=True)


def added(index: int, text: str, **flags: bool) -> Spec:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": index, "content": text, **usual, **flags}


def test_the_two_forms_of_one_file(one: Path, other: Path) -> None:
    in_older_form(other)
    assert (one / "tokenizer.json").read_text() != (other / "tokenizer.json").read_text()
    check(one, other)


def test_a_model_has_the_tokens_that_it_has(one: Path) -> None:
    """It may be its own drafter, and two GGUF files of the same bytes are one folder."""
    check(one, one)


def test_what_no_draft_depends_on(one: Path, other: Path) -> None:
    def spoil(spec: Spec) -> None:
        spec["added_tokens"].append(
            added(300, "<tool_call>")
        )  # in a row that fills up the other model's table
        spec["added_tokens"][1]["special"] = False
        spec |= {"post_processor": None, "padding": None, "truncation": None}

    change(other, spoil)
    check(one, other)
    check(other, one)


def swap(spec: Spec) -> None:
    a, b = list(spec["model"]["vocab"])[100:102]
    vocab = spec["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def rename(spec: Spec) -> None:
    spec["added_tokens"][1]["content"] = "<|im_begin|>"
    spec["model"]["vocab"]["<|im_begin|>"] = spec["model"]["vocab"].pop("<|im_start|>")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            swap,
            r"these must have one tokenizer: token \d+ is '.*' in .*one \(300 tokens\) and '.*' in .*other",
        ),
        (rename, r"token 1 is '<\|im_start\|>' in .* and '<\|im_begin\|>' in"),
        (lambda spec: spec["model"]["merges"].reverse(), r"differ in 'merges'"),
        (lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True), r"differ in 'pre_tokenizer'"),
        (lambda spec: spec.update(normalizer={"type": "NFC"}), r"differ in 'normalizer'"),
    ],
)
def test_what_would_be_another_text(one: Path, other: Path, how: Callable[[Spec], None], words: str) -> None:
    change(other, how)
    with pytest.raises(InputError, match=words):
        check(one, other)


def test_an_added_token_with_two_ids(one: Path, other: Path) -> None:
    """Each in a row that the other has no token for."""
    for folder, index in ((one, 300), (other, 301)):
        change(folder, lambda spec, index=index: spec["model"]["vocab"].update({"<new>": index}))
        change(folder, lambda spec, index=index: spec["added_tokens"].append(added(index, "<new>")))
    with pytest.raises(InputError, match=r"token 300 is '<new>' .* and no token"):
        check(one, other)


def test_a_token_of_the_model_that_only_one_has(one: Path, tmp_path: Path) -> None:
    shorter = tokenizer_folder(tmp_path / "shorter", byte_level_tokenizer(290))
    with pytest.raises(InputError, match=r"token 290 is .*\(300 tokens\) and no token in .*\(290 tokens\)"):
        check(one, shorter)


def test_a_file_that_is_no_tokenizer(one: Path) -> None:
    (one / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json is not a readable tokenizer"):
        read_tokenizer(one / "tokenizer.json", InputError)
    (one / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        read_tokenizer(one / "tokenizer.json", InputError)


@pytest.mark.parametrize(
    ("target", "drafter", "known", "fillers"),
    [(320, 310, 300, 9), (310, 320, 300, 19), (320, 300, 299, 0), (300, 301, 300, 0), (300, 320, 300, 19)],
)
def test_rows_that_no_token_has(
    one: Path, other: Path, target: int, drafter: int, known: int, fillers: int
) -> None:
    for folder, rows in ((one, target), (other, drafter)):
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": rows}
        more = {"model_type": "llama", "intermediate_size": 8, "max_position_embeddings": 8}
        (folder / "config.json").write_text(json.dumps({**shape, **more}))
    found = subset_of(one, other)
    assert found is not None
    assert (found.target_vocab_size, len(found.ids), found.fillers, found.rows) == (
        target,
        known,
        fillers,
        drafter,
    )
    assert found.keeps_numbers
    assert subset_of(one, one) is None
