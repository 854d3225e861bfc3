"""Bundles from strangers: a real bundle is built, one thing in it is made to harm, its hashes are made to fit, and it is refused.

The manifest of every altered bundle is honest about the altered file, so the checksum is not what refuses it.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from altered_bundle import HELLO, LLAMACPP, ONNX, OPTIONS, change, change_manifest, refused, secret
from edgespec_runtime.pair.bundle import open_pair

from edgespec.cli import main
from edgespec.core import manifest as manifests
from edgespec.core.errors import BundleError, InputError
from edgespec.core.manifest import ROLES, read_manifest


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.mark.llamacpp
def test_the_untouched_bundles_open(copy: Path, both: Path) -> None:
    for folder, options in ((copy, OPTIONS), (both, OPTIONS), (both, LLAMACPP)):
        pair = open_pair(folder, options)
        assert pair.target.engine.forward(pair.tokenizer.encode_chat(HELLO)).shape[1] == 512
        pair.close()


# every byte counts


@pytest.mark.parametrize(
    "name", ["target/onnx-fp32/model.onnx", "drafter/onnx-fp32/model.onnx.data", "tokenizer/tokenizer.json"]
)
def test_opening_a_pair_checks_every_file(copy: Path, name: str) -> None:
    flip_a_bit(copy / name)
    refused(copy, "was altered")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.llamacpp
def test_models_of_other_engines_and_precisions_are_not_read(both: Path, tmp_path: Path) -> None:
    """They may be gigabytes. Whoever opens one checks it."""
    copy = Path(shutil.copytree(both, tmp_path / "bundle"))
    (file,) = read_manifest(copy).target.files[LLAMACPP.engine].values()
    flip_a_bit(copy / file)
    open_pair(copy, OPTIONS).close()
    refused(copy, "was altered", LLAMACPP)


def test_sizes_that_lie(copy: Path) -> None:
    for seen in (0, 3, 10**9, 2**50):
        change_manifest(copy, lambda value, seen=seen: value["files"]["prompts.jsonl"].update(bytes=seen))
        refused(copy, rf"prompts\.jsonl has \d+ bytes, the manifest wants {seen}")
    change_manifest(copy, lambda value: value["files"]["prompts.jsonl"].update(bytes=10**300))
    refused(copy, "which cannot be")


# places


def test_links_of_files_and_folders_out_of_the_bundle(copy: Path) -> None:
    folder = secret(copy)
    shutil.move(copy / "tokenizer", folder / "tokenizer")
    (copy / "tokenizer").symlink_to(folder / "tokenizer")
    refused(copy, "is a link to .*outside the bundle")
    (copy / "tokenizer").unlink()
    shutil.move(folder / "tokenizer", copy / "tokenizer")
    (copy / "tokenizer" / "generation_config.json").unlink(missing_ok=True)
    (copy / "tokenizer" / "generation_config.json").symlink_to(folder / "secret")
    refused(copy, "outside the bundle|not among the manifest's files")


def test_a_manifest_that_is_a_link_and_links_that_form_a_loop(copy: Path) -> None:
    file = copy / "prompts.jsonl"
    file.unlink()
    file.symlink_to(file.name)
    refused(copy, "cannot be read")
    shutil.move(copy / "manifest.json", copy.parent / "manifest.json")
    (copy / "manifest.json").symlink_to(copy.parent / "manifest.json")
    refused(copy, "outside the bundle")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["manifest.json", "prompts.jsonl", "tokenizer/tokenizer.json"])
def test_pipes_and_devices_are_not_waited_for(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    refused(copy, "is a named pipe; a regular file is wanted")
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    refused(copy, "outside the bundle")


def test_a_file_that_is_not_listed_is_refused_where_a_loader_could_open_it(copy: Path) -> None:
    more = "tokenizer/additional_chat_templates"
    (copy / more).mkdir()
    change(copy, f"{more}/listed.jinja", "")
    for name in ("tokenizer/added.json", f"{more}/default.jinja", f"{ONNX}/model.onnx.more"):
        (copy / name).write_text("{}")
        refused(copy, "is not among the manifest's files; delete it")
        (copy / name).unlink()
    (copy / "tokenizer" / ".DS_Store").write_text("")
    (copy / "notes.txt").write_text("of the user's own")
    open_pair(copy, OPTIONS).close()


def test_prompts_that_are_not_listed_are_not_opened(copy: Path) -> None:
    change_manifest(copy, lambda value: value["files"].pop("prompts.jsonl"))
    unlisted = pytest.raises(BundleError, match=r"prompts\.jsonl is not among the manifest's files")
    with closing(open_pair(copy, OPTIONS)) as pair, unlisted:
        pair.prompts()


def test_a_vocabulary_and_a_manifest_that_tell_of_another_target_take_no_memory(copy: Path) -> None:
    """The loaded target has 512 tokens, whatever both say."""
    change(copy, "vocabulary.json", json.dumps({"target_vocab_size": 600, "ids": [*range(511)]}))
    change_manifest(copy, lambda value: value["pair"].update(vocab_size=600))
    change_manifest(copy, lambda value: value["drafter"].update(vocabulary="vocabulary.json"))
    refused(copy, r"vocabulary\.json is of a target with 600 tokens, this pair's has 512")


# JSON


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            '"schema_version": 1',
            '"schema_version": 1, "schema_version": 1',
            "'schema_version' is there twice",
        ),
        ('"parameters":', '"parameters": NaN, "x":', "NaN is no number of JSON"),
        ('"metrics": {', '"metrics": {"a": -Infinity', "-Infinity is no number"),
        ('"metrics": {', '"metrics": {"a": 1e400', "1e400 is beyond what a float holds"),
        ('"metrics": {', f'"metrics": {{"a": {"9" * 5000}', "Exceeds the limit"),
        ('"metrics": {', f'"metrics": {{"a": {"[" * 70}{"]" * 70}', "nests deeper than 64"),
        ('"metrics": {', f'"metrics": {{"a": {"[" * 100_000}', "nests deeper than 64"),
        ('"reason": "', '"reason": "' + "x" * 5000, "'reason' has 50.. characters; at most 4096"),
        ('"vocab_size": 512', '"vocab_size": 99999999999', "'vocab_size' is '99999999999'; 1 to"),
        ('"vocab_size": 512', '"vocab_size": -1', "'vocab_size' is '-1'; 1 to"),
    ],
)
def test_manifests_that_readers_would_read_in_two_ways(
    copy: Path, before: str, after: str, words: str
) -> None:
    text = (copy / "manifest.json").read_text()
    assert before in text
    (copy / "manifest.json").write_text(text.replace(before, after, 1))
    refused(copy, words)


def test_unknown_fields_are_left_alone(copy: Path) -> None:
    """A later edgespec may add some."""
    change_manifest(copy, lambda value: value.update(novel={"a": [1]}) or value["target"].update(novel=None))
    open_pair(copy, OPTIONS).close()


def test_an_engine_that_nobody_knows_runs_on_no_other(copy: Path) -> None:
    def rename(value: dict[str, Any]) -> None:
        for role in ROLES:
            value[role]["files"] = {"tvm": value[role]["files"]["onnxruntime"]}
            value[role].pop("fast", None)
        value["default"]["engine"] = "tvm"
        value["cost_ratio"]["bytes"]["tvm/fp32"] = 0.1

    change_manifest(copy, rename)
    with pytest.raises(InputError, match=r"no engine is called 'tvm'; known: llama.cpp, onnxruntime"):
        open_pair(copy, OPTIONS)


def test_too_many_files_models_and_wrong_ratios(copy: Path) -> None:
    before = (copy / "manifest.json").read_bytes()
    entry = {"bytes": 1, "sha256": "0" * 64}
    change_manifest(copy, lambda value: value["files"].update({f"f{n}": entry for n in range(10_001)}))
    refused(copy, "lists 100.. files; at most 10000")
    for alter, words in (
        (lambda value: value["target"]["files"].update({f"e{n}": {} for n in range(70)}), "at most 64"),
        (
            lambda value: value.update(cost_ratio={}),
            "the cost ratio by parameters of onnxruntime fp32 is 'None'",
        ),
        (lambda value: value["cost_ratio"].update(bytes=[1]), "the cost ratio by bytes"),
        (lambda value: value["cost_ratio"].update(parameters=-1), "a number above 0"),
    ):
        (copy / "manifest.json").write_bytes(before)
        change_manifest(copy, alter)
        refused(copy, words)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenizer/tokenizer.json", " " * (64 * 2**20 + 1), "has 67108865 bytes; at most 67108864 are read"),
        ("tokenizer/tokenizer.json", "[" * 100_000, "is not a readable tokenizer"),
        ("tokenizer/tokenizer.json", b"\xff\xfe", "is not a readable tokenizer"),
        ("tokenizer/tokenizer_config.json", "[1]", "holds list; a JSON object is wanted"),
        ("tokenizer/tokenizer_config.json", '{"a": 1, "a": 2}', "there twice"),
        (
            "tokenizer/generation_config.json",
            '{"eos_token_id": ["x"]}',
            "eos_token_id 'x'; a token id is wanted",
        ),
        ("tokenizer/generation_config.json", '{"eos_token_id": -1}', "eos_token_id '-1'"),
        ("tokenizer/chat_template.jinja", b"\xff", "is not UTF-8"),
        (f"{ONNX}/genai_config.json", "[]", "no usable 'model'"),
    ],
)
def test_small_files_that_are_huge_or_of_another_form(
    copy: Path, name: str, data: bytes | str, words: str
) -> None:
    change(copy, name, data)
    refused(copy, words)


@pytest.mark.parametrize("verb", ["chat", "generate", "bench"])
def test_the_manifest_is_read_once_and_every_hash_is_checked(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    prompts = copy / "prompts.jsonl"
    prompts.write_bytes(prompts.read_bytes().swapcase())  # of the same size
    read, real = [], manifests.read_manifest
    monkeypatch.setattr(manifests, "read_manifest", lambda folder: read.append(folder) or real(folder))
    assert main([verb, str(copy), *(["hello"] if verb == "generate" else [])]) == 2
    assert "prompts.jsonl was altered" in capsys.readouterr().err
    assert len(read) == 1
