"""The torture set parts tokenizers that differ in one thing, and passes those that do not."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.verify.hard_texts import TORTURE, compare, torture_set
from edgespec_export.verify.tokenizer_files import JsonTokenizer
from tiny_models import SPECIALS, byte_level_tokenizer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("reference") / "tokenizer.json"
    byte_level_tokenizer(512).save(str(path))
    return JsonTokenizer(path)


def altered(path: Path, change: Callable[[dict[str, Any]], None]) -> JsonTokenizer:
    spec = json.loads(byte_level_tokenizer(512).to_str())
    change(spec)
    path.write_text(json.dumps(spec))
    return JsonTokenizer(path)


def test_what_the_set_holds() -> None:
    """Every kind of text that the check is said to cover."""
    everything = "".join(TORTURE.values())
    assert TORTURE["empty"] == ""
    assert {"\u200d", "\U0001f3fd", "\ufe0f"} <= set(everything)  # joiner, a skin tone, a variation selector
    for script in ("CJK", "HIRAGANA", "HANGUL", "ARABIC", "HEBREW", "DEVANAGARI"):
        assert any(unicodedata.name(one, "").startswith(script) for one in everything), script
    assert any(unicodedata.bidirectional(one) == "NSM" for one in TORTURE["Arabic with marks"])
    assert " " * 400 in everything
    assert {"\t", "\r\n", "\n\n"} <= {text for text in ("\t", "\r\n", "\n\n") if text in everything}
    assert not unicodedata.is_normalized("NFC", TORTURE["decomposed"])
    assert unicodedata.normalize("NFC", TORTURE["decomposed"]) == TORTURE["composed"]
    for text in ("<s>", "</s>", "[INST]", "<|im_end|>", "<0x41>"):
        assert text in everything
    assert {f"special token {text!r}" for text in SPECIALS} <= set(torture_set(SPECIALS))


def test_a_tokenizer_agrees_with_itself(reference: JsonTokenizer, tmp_path: Path) -> None:
    found = compare(reference, altered(tmp_path / "t.json", lambda spec: None), torture_set(SPECIALS))
    assert (found.different, found.lost, found.excused) == ([], [], [])
    assert found.texts == len(TORTURE) + len(SPECIALS)


def swap_first_merges(spec: dict[str, Any]) -> None:
    merges = spec["model"]["merges"]
    merges[0], merges[40] = merges[40], merges[0]


def drop_special(spec: dict[str, Any]) -> None:
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "<|im_end|>"]


def exchange_two_pieces(spec: dict[str, Any]) -> None:
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "two merges in another order": swap_first_merges,
    "a special token that is none": drop_special,
    "two tokens with each other's ids": exchange_two_pieces,
    "another pre-tokenizer": lambda spec: spec["pre_tokenizer"].update(use_regex=False),
    "a space before the text": lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
    "text composed first": lambda spec: spec.update(normalizer={"type": "NFC"}),
    "text in lower case": lambda spec: spec.update(normalizer={"type": "Lowercase"}),
    "special tokens that take spaces": lambda spec: [
        token.update(rstrip=True) for token in spec["added_tokens"]
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_thing_changed_shows(reference: JsonTokenizer, tmp_path: Path, name: str) -> None:
    found = compare(reference, altered(tmp_path / "t.json", CHANGES[name]), torture_set(SPECIALS))
    assert found.different
    assert " instead of " in found.first


def test_a_decoder_that_loses_text_shows(reference: JsonTokenizer, tmp_path: Path) -> None:
    """The ids are the same; what they are shown as is not."""
    other = altered(
        tmp_path / "t.json",
        lambda spec: spec.update(decoder={"type": "Strip", "content": "Ġ", "start": 1, "stop": 0}),
    )
    found = compare(reference, other, TORTURE)
    assert not found.different
    assert "spaces at both ends" in found.lost


def test_excused_texts_are_not_compared_in_that_way(reference: JsonTokenizer, tmp_path: Path) -> None:
    other = altered(tmp_path / "t.json", lambda spec: spec.update(normalizer={"type": "NFC"}))
    beyond = other.beyond_llama_cpp()
    assert list(beyond) == ["text is composed (NFC) first"]
    found = compare(
        other,
        reference,
        TORTURE,
        lambda text, special: any(shows(text, special) for shows in beyond.values()),
    )
    assert found.different == []
    assert "decomposed" in found.excused
    assert "composed" not in found.excused
    assert not reference.beyond_llama_cpp()


@pytest.mark.parametrize(("scheme", "text", "special", "shows"), [
    ("always", " a", False, True), ("always", "a", True, False), ("always", "<s> a", True, True), ("always", "<s>a", True, False),
    ("first", "<s>a", True, True), ("first", "<s>a", False, False), ("first", "a<s>", True, False),
])  # fmt: skip
def test_where_spaces_are_put_otherwise(
    tmp_path: Path, scheme: str, text: str, special: bool, shows: bool
) -> None:
    def metaspace(spec: dict[str, Any]) -> None:
        spec["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        }
        spec["added_tokens"][0]["content"] = "<s>"

    beyond = altered(tmp_path / "t.json", metaspace).beyond_llama_cpp()
    assert [one(text, special) for one in beyond.values()] == [shows]
