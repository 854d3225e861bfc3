"""Tokenizers of an export against the model's own: good ones pass, each damage is caught in the row of its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changed_gguf import in_place
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify import tokenizers as verify_tokenizers
from edgespec_export.verify.tokenizer_files import FolderTokenizer
from edgespec_export.verify.tokenizers import Source, TokenizerCheck, check_tokenizers, tokenizer_table
from tiny_models import make_model_folder
from tiny_sentencepiece import LLAMA_2, sentencepiece_like

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json

GGUF, ONNX = "drafter llama.cpp f16", "drafter onnxruntime fp32"
ONE = {"heads": 2, "kv_heads": 1, "layers": 1}


def export(model: Path, folder: Path) -> Path:
    """`model` in both formats, and the tokenizer as a bundle has it."""
    export_onnx(model, folder / "onnx-fp32", "fp32")
    export_gguf(model, folder / "f16.gguf", "f16")
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (model / name).exists():
            shutil.copyfile(model / name, folder / "tokenizer" / name)
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("byte-level")
    return export(make_model_folder(root / "model", **ONE), root / "export").parent


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a SentencePiece-like tokenizer of fewer tokens than it has rows, and a class that splits otherwise."""
    root = tmp_path_factory.mktemp("pieces")
    model = make_model_folder(root / "model", **ONE)
    sentencepiece_like("normalizer").save(str(model / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", **tokens}
    write_json(model / "tokenizer_config.json", settings)
    (model / "chat_template.jinja").write_text(LLAMA_2)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    for name in ("config.json", "generation_config.json"):
        write_json(model / name, read_json(model / name) | ids)
    return export(model, root / "export").parent


def check(root: Path, export_folder: Path, *, whole: bool = True) -> list[TokenizerCheck]:
    model, tokenizer = root / "model", export_folder / "tokenizer"
    source = Source(model, read_json(model / "config.json"), True)
    if not whole:
        source = Source(tokenizer, {"vocab_size": 512}, False)
    files = [
        ExportedFile("drafter", "onnxruntime", "fp32", export_folder / "onnx-fp32"),
        ExportedFile("drafter", "llama.cpp", "f16", export_folder / "f16.gguf"),
    ]
    return check_tokenizers(files, {"target": source, "drafter": source}, False, tokenizer)


@pytest.fixture(params=["byte_level", "pieces"])
def root(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.llamacpp
def test_good_ones_pass(root: Path, whole: bool) -> None:
    checks = check(root, root / "export", whole=whole)
    assert [one.where for one in checks] == ["tokenizer", ONNX, GGUF]
    assert [one.broken for one in checks] == [[], [], []]
    assert all(one.comparison is not None and not one.comparison.excused for one in checks)
    table = tokenizer_table([asdict(check) for check in checks])
    assert table.count(" ok") == 3
    assert "BROKEN" not in table


def copied(root: Path, folder: Path) -> Path:
    shutil.copytree(root / "export", folder)
    return folder


def change_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        value = read_json(folder / name)
        change(value)
        write_json(folder / name, value)

    return alter


def add_one(key: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        holder = value.get("model", value)
        holder[key] += 1

    return change


def set_gguf(key: str, value: int) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        with in_place(folder / "f16.gguf", f"tokenizer.{key}") as values:
            assert values[0][0] != value
            values[0][0] = value

    return alter


def swap_gguf(key: str) -> Callable[[Path], None]:
    """Exchange the first two values of a table that are of one size and differ."""

    def alter(folder: Path) -> None:
        with in_place(folder / "f16.gguf", f"tokenizer.ggml.{key}") as values:
            first, second = next(
                (a, b) for a, b in combinations(values, 2) if len(a) == len(b) and not np.array_equal(a, b)
            )
            first[:], second[:] = second.copy(), first.copy()

    return alter


def write_template(place: str) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        file = folder / place / "chat_template.jinja"
        file.write_text(file.read_text().replace("in messages", "in messages[:1]"))

    return alter


def change_gguf_template(folder: Path) -> None:
    with in_place(folder / "f16.gguf", "tokenizer.chat_template") as values:
        values[0][-1] = ord("!")


def swap_merges(value: dict[str, Any]) -> None:
    merges = value["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def swap_tokens(value: dict[str, Any]) -> None:
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


# what is damaged -> (how, the row that must name it, in which words)
DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "GGUF: eos off by one": (set_gguf("ggml.eos_token_id", 3), GGUF, "eos_token_id is 3 instead of 2"),
    "GGUF: bos off by one": (set_gguf("ggml.bos_token_id", 4), GGUF, "bos_token_id is 4 instead of"),
    "GGUF: a special token as text": (set_gguf("ggml.token_type", 1), GGUF, "token_type[0] is 1 instead of"),
    "GGUF: tokens exchanged": (swap_gguf("tokens"), GGUF, "tokens["),
    "GGUF: chat template": (change_gguf_template, GGUF, "chat template is not that of the"),
    "ONNX: eos off by one": (
        change_json("onnx-fp32/genai_config.json", add_one("eos_token_id")), ONNX, "eos_token_id is 3 instead of [2]",
    ),
    "ONNX: bos off by one": (
        change_json("onnx-fp32/genai_config.json", add_one("bos_token_id")), ONNX, "bos_token_id is",
    ),
    "ONNX: tokens exchanged": (change_json("onnx-fp32/tokenizer.json", swap_tokens), ONNX, "texts get other ids"),
    "ONNX: chat template": (write_template("onnx-fp32"), ONNX, "chat template is not that of the"),
    "bundle: eos off by one": (
        change_json("tokenizer/generation_config.json", add_one("eos_token_id")), "tokenizer", "ids that end a reply are [3]",
    ),
    "bundle: tokens exchanged": (change_json("tokenizer/tokenizer.json", swap_tokens), "tokenizer", "texts get other ids"),
    "bundle: chat template": (write_template("tokenizer"), "tokenizer", "chat template writes"),
    "bundle: unreadable": (
        change_json("tokenizer/tokenizer.json", dict.clear), "tokenizer", "not a readable tokenizer",
    ),
}  # fmt: skip


def only_row(checks: list[TokenizerCheck], where: str, words: str) -> None:
    broken = {one.where: one.broken for one in checks if one.broken}
    assert list(broken) == [where]
    assert any(words in text for text in broken[where]), broken
    table = tokenizer_table([asdict(check) for check in checks])
    assert table.count("BROKEN") == 1
    assert any(line.startswith(where) and line.endswith("BROKEN") for line in table.splitlines())
    assert words in table


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(root: Path, tmp_path: Path, name: str) -> None:
    damage, where, words = DAMAGES[name]
    folder = copied(root, tmp_path / "export")
    damage(folder)
    only_row(check(root, folder), where, words)


@pytest.mark.llamacpp
def test_an_added_token_without_a_row_is_in_no_gguf(byte_level: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_level, tmp_path / "copy")

    def add(value: dict[str, Any]) -> None:
        value["added_tokens"].append({**value["added_tokens"][0], "id": 512, "content": "<image>"})

    for name in ("model", "export/tokenizer", "export/onnx-fp32"):
        change_json("tokenizer.json", add)(tmp_path / "copy" / name)
    checks = check(tmp_path / "copy", tmp_path / "copy" / "export")
    assert [one.broken for one in checks] == [[], [], []]


@pytest.mark.parametrize("place", ["onnx-fp32", "tokenizer"])
def test_changed_merges_of_a_tokenizer_json(byte_level: Path, tmp_path: Path, place: str) -> None:
    folder = copied(byte_level, tmp_path / "export")
    change_json(f"{place}/tokenizer.json", swap_merges)(folder)
    only_row(check(byte_level, folder), ONNX if place == "onnx-fp32" else "tokenizer", "texts get other ids")


@pytest.mark.parametrize("llama_cpp", [True, False])
def test_changed_merges_and_scores_of_a_gguf(
    byte_level: Path, pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_cpp: bool
) -> None:
    """Tables are read value by value, so they are found without llama.cpp too."""
    if not llama_cpp:
        monkeypatch.setattr(verify_tokenizers, "is_available", lambda: False)
    for root, table in ((byte_level, "merges"), (pieces, "scores")):
        folder = copied(root, tmp_path / table)
        swap_gguf(table)(folder)
        only_row(check(root, folder), GGUF, f"{table}[")
    if not llama_cpp:
        assert any(
            "llama.cpp is not installed" in note for one in check(pieces, folder) for note in one.notes
        )


def test_without_the_model_the_places_are_held_against_each_other(byte_level: Path, tmp_path: Path) -> None:
    """The bundle's own ids that end a reply are held against what its template writes at the end of a turn."""
    folder = copied(byte_level, tmp_path / "a")
    change_json("tokenizer/generation_config.json", add_one("eos_token_id"))(folder)
    only_row(
        check(byte_level, folder, whole=False)[:1],
        "tokenizer",
        "the template ends a turn with id 2, and [3] end a reply",
    )
    damages = (
        "GGUF: tokens exchanged",
        "GGUF: chat template",
        "GGUF: eos off by one",
        "ONNX: eos off by one",
    )
    for number, name in enumerate(damages):
        folder = copied(byte_level, tmp_path / str(number))
        damage, where, words = DAMAGES[name]
        damage(folder)
        only_row(check(byte_level, folder, whole=False), where, words)


def test_a_model_whose_stop_ids_do_not_close_its_turns_is_told(byte_level: Path, tmp_path: Path) -> None:
    """The export is true to the model there, so no bound is broken."""
    shutil.copytree(byte_level, tmp_path / "copy")
    folders = [tmp_path / "copy" / name for name in ("model", "export/tokenizer")]
    for folder in folders:
        change_json("generation_config.json", add_one("eos_token_id"))(folder)
    told, _ = check(tmp_path / "copy", tmp_path / "copy" / "export")[0].broken
    assert told == "ids that end a reply are [3] instead of [2, 3]"  # the tokenizer's end token counts too
    for folder in folders:
        change_json("tokenizer_config.json", lambda settings: settings.update(eos_token="<|pad|>"))(folder)
    first = check(tmp_path / "copy", tmp_path / "copy" / "export")[0]
    assert first.broken == []
    assert first.notes == ["the template ends a turn with id 2, and [3] end a reply"]


def test_a_template_that_refuses_a_role_is_the_same_refused(pieces: Path, tmp_path: Path) -> None:
    folder = copied(pieces, tmp_path / "export")
    file = folder / "tokenizer" / "chat_template.jinja"
    file.write_text(file.read_text().replace("raise_exception('no system role')", "''"))
    only_row(check(pieces, folder), "tokenizer", "for system, user instead of None")


def test_a_drafter_with_token_numbers_of_its_own_is_not_split(byte_level: Path) -> None:
    source = Source(byte_level / "export" / "tokenizer", {"vocab_size": 512}, False)
    file = ExportedFile("drafter", "llama.cpp", "f16", byte_level / "export" / "f16.gguf")
    _, one = check_tokenizers([file], {"target": source, "drafter": source}, True, source.folder)
    assert (one.broken, one.comparison) == ([], None)
    assert "token numbers of its own" in one.notes[0]
    assert json.dumps(asdict(one))


def test_names_of_a_stranger_write_no_escape_codes(byte_level: Path, tmp_path: Path) -> None:
    """Such as those of chat templates beside a graph, of which none is the default."""
    folder = copied(byte_level, tmp_path / "export")
    (folder / "onnx-fp32" / "chat_template.jinja").unlink()
    named = [{"name": "\x1b[2J", "template": "x"}]
    change_json("tokenizer_config.json", lambda value: value.update(chat_template=named))(
        folder / "onnx-fp32"
    )
    table = tokenizer_table([asdict(one) for one in check(byte_level, folder)])
    assert "has the chat templates \ufffd[2J and none called 'default'" in table
    assert "\x1b" not in table


def test_a_model_folder_whose_tokenizer_would_never_end(byte_level: Path, tmp_path: Path) -> None:
    """It is refused before transformers reads it, in native code that Ctrl-C does not stop."""
    model = Path(shutil.copytree(byte_level / "model", tmp_path / "model"))
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}
    change_json("tokenizer.json", lambda value: value.update(normalizer=longer))(model)
    with pytest.raises(
        InputError, match=r"tokenizer\.json has a normalizer of 1 steps that can make a text very long"
    ):
        FolderTokenizer(model)
