"""A tokenizer that would make a text grow without bound is refused before the library reads it; those in use are not."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted.tokenizer_growth import check_growth
from tiny_models import byte_level_tokenizer, tokenizer_folder
from tiny_sentencepiece import LLAMA_2, sentencepiece_like, words_of_llama_2

from edgespec.core.errors import BundleError

LONG, COPY = "can make a text very long", "each may be a copy of the text"


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def sequence(*steps: Any, key: str = "normalizers") -> dict[str, Any]:
    return step("Sequence", **{key: list(steps)})


def template(*pieces: Any, special: dict[str, Any]) -> dict[str, Any]:
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]
    return step("TemplateProcessing", single=list(pieces), pair=pair, special_tokens=special)


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return step("Replace", pattern={kind: pattern}, content=content)


def charsmap(*texts: str) -> str:
    """As sentencepiece keeps it: the size of a tree, the tree, and the texts that it leads to."""
    return base64.b64encode((8).to_bytes(4, "little") + bytes(8) + "\0".join(texts).encode()).decode()


BYTES = step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
DOUBLE = replace("a", "aa")
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}
LONG_BOS = {"<s>": {"id": "<s>", "ids": [0] * 500, "tokens": ["<s>"] * 500}}


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("normalizer", sequence(*[DOUBLE] * 15), LONG),
        ("normalizer", sequence(*[replace("a", "a" * 1000)] * 5), LONG),
        ("normalizer", sequence(*[replace("a", "b")] * 16), "of 17 steps"),
        ("normalizer", sequence(*[sequence(*[DOUBLE] * 6)] * 2), LONG),
        ("normalizer", sequence(*[replace("", "b")] * 11), LONG),
        ("normalizer", sequence(*[replace("(?=a)", "b", "Regex")] * 11), LONG),
        ("normalizer", sequence(*[{**DOUBLE, "type": "Other"}] * 15), LONG),
        ("normalizer", sequence(*[step("Prepend", prepend="a" * 40), replace("a", "a" * 40)]), LONG),
        ("normalizer", sequence(*[step("NFKD"), replace(" ", "\ufdfa")] * 3), LONG),
        ("normalizer", step("Precompiled", precompiled_charsmap=charsmap("a", "b" * 2000)), LONG),
        ("normalizer", sequence([{"String": "a"}, "a" * 9]), "is not a readable tokenizer: a step is"),
        ("normalizer", [[DOUBLE]], "is not a readable tokenizer: a step is"),
        ("pre_tokenizer", sequence(*[BYTES] * 15, key="pretokenizers"), LONG),
        ("decoder", sequence(*[DOUBLE] * 15, key="decoders"), LONG),
        ("decoder", sequence(*[step("BPEDecoder", suffix="")] * 15, key="decoders"), LONG),
        ("post_processor", template(*[TEXT] * 1000, special={}), COPY),
        ("post_processor", template(BOS, TEXT, special=LONG_BOS), COPY),
        ("post_processor", sequence(*[BYTES] * 1001, key="processors"), COPY),
    ],
)  # fmt: skip
def test_a_text_that_would_grow(tmp_path: Path, part: str, value: Any, words: str) -> None:
    """The file's own tokens are normalised while it is read, so this comes first."""
    folder = tokenizer_folder(tmp_path / "tokenizer", byte_level_tokenizer(300))
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append(
        {**spec["added_tokens"][-1], "id": 300, "content": "aaaa", "normalized": True, "special": False}
    )
    (folder / "tokenizer.json").write_text(json.dumps({**spec, part: value}))
    with pytest.raises(BundleError, match=words):
        ChatTokenizer(folder)


def test_words_that_would_take_hours() -> None:
    """WordPiece looks for a token in every part of a word: one of 64,000 characters takes hours."""
    model: dict[str, Any] = {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 100}
    check_growth({"model": {**model, "continuing_subword_prefix": "##"}}, Path())
    for long in ({"max_input_chars_per_word": 10**6}, {"continuing_subword_prefix": "#" * 10**6}):
        with pytest.raises(BundleError, match="words of 1000000 characters; at most 1000 are wanted"):
            check_growth({"model": model | long}, Path())


def test_tokenizers_as_they_are_in_use() -> None:
    """Of GPT-2's kind, of Llama 2's and Gemma's, of Qwen's, of T5's and of ALBERT's."""
    blank = replace(" {2,}", "▁", "Regex")
    map_of_characters = step("Precompiled", precompiled_charsmap=charsmap("a", "x" * 18))
    quotes = [replace("``", '"'), replace("''", '"')]
    accents = [step("NFKD"), step("StripAccents"), step("Lowercase")]
    for tokenizer in (
        *map(sentencepiece_like, ("normalizer", "always")),
        words_of_llama_2(),
        byte_level_tokenizer(300),
    ):
        check_growth(json.loads(tokenizer.to_str()), Path())
    for normalizer in (
        step("NFC"),
        replace(" ", "▁"),
        sequence(map_of_characters, step("Strip", strip_left=False, strip_right=True), blank),
        sequence(*quotes, *accents, map_of_characters),
        step(
            "BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
        ),
    ):
        check_growth({"normalizer": normalizer, "pre_tokenizer": None}, Path())


def test_a_tokenizer_that_breaks_down_on_a_text(tmp_path: Path) -> None:
    """The library raises a bare Exception where it knows no token for a word, and none for what it does not know."""
    folder = tokenizer_folder(tmp_path / "tokenizer", byte_level_tokenizer(300))
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, **parts, "added_tokens": [], "model": model}))
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(BundleError, match="the tokenizer breaks down on a text of 1 characters"):
        tokenizer.encode("b")
    with pytest.raises(BundleError, match="the tokenizer breaks down on a text"):
        tokenizer.encode_chat([{"role": "user", "content": "b"}])


def test_a_tokenizer_that_pads_does_not(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like("never")
    tokenizer.enable_padding(length=1000)
    padding = ChatTokenizer(tokenizer_folder(tmp_path / "tokenizer", tokenizer, LLAMA_2, eos_token="</s>"))
    assert len(padding.encode("a a")) < 10
