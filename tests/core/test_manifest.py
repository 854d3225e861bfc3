"""manifest.json: what is written is read, and a bundle that was damaged or made to harm is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BundleFile,
    BundleModel,
    Manifest,
    describe_files,
    open_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of small stand-in files; nothing here opens a model."""
    root = tmp_path / "bundle"
    for role in ("target", "drafter"):
        (root / role / "onnx-fp32").mkdir(parents=True)
        (root / role / "onnx-fp32" / "model.onnx").write_bytes(role.encode() * 50)
        (root / role / "gguf").mkdir()
        (root / role / "gguf" / f"{role}-q8_0.gguf").write_bytes(role.encode() * 70)
    (root / "prompts.jsonl").write_text("{}\n")

    def model(role: str) -> BundleModel:
        files = {
            "onnxruntime": {"fp32": f"{role}/onnx-fp32"},
            "llama.cpp": {"q8_0": f"{role}/gguf/{role}-q8_0.gguf"},
        }
        return BundleModel(role, "made", {"hidden": 8}, 1000, files)

    write_manifest(
        root,
        Manifest(
            pair={"tokenizer_sha256": "0" * 64, "vocab_size": 512},
            target=model("target"),
            drafter=model("drafter"),
            default={"engine": "onnxruntime", "precision": "fp32", "reason": "small"},
            cost_ratio={"parameters": 0.1, "bytes": {"onnxruntime/fp32": 0.1}},
            metrics={"tau": 2.0},
            provenance={"seed": 0},
            files=describe_files(root),
        ),
    )
    return root


@contextmanager
def rewritten(folder: Path) -> Iterator[dict[str, Any]]:
    """What the manifest says, to change."""
    value = read_json(folder / "manifest.json")
    yield value
    write_json(folder / "manifest.json", value)


def test_read_gives_what_was_written(folder: Path) -> None:
    manifest = open_manifest(folder)
    assert manifest.metrics == {"tau": 2.0}
    assert manifest.files["prompts.jsonl"] == BundleFile(hashlib.sha256(b"{}\n").hexdigest(), 3)
    assert len(manifest.files) == 5
    assert manifest.pairs() == [("onnxruntime", "fp32"), ("llama.cpp", "q8_0")]
    assert manifest.model_path("drafter", "onnxruntime", "fp32") == folder / "drafter" / "onnx-fp32"
    assert next(iter(read_json(folder / "manifest.json"))) == "schema_version"
    with pytest.raises(InputError, match=r"no .fp16. target for onnxruntime; known: fp32"):
        manifest.model_path("target", "onnxruntime", "fp16")
    with pytest.raises(InputError, match=r"no target for engine 'tvm'; known: llama.cpp, onnxruntime"):
        manifest.model_path("target", "tvm", "fp32")


def test_draft_lengths_that_were_never_used_are_read_as_those_that_were(folder: Path) -> None:
    device = {"name": "intel-npu", "draft_length": 64, "max_draft_length": 64, "context": 512}
    with rewritten(folder) as value:
        value["device"] = device
    assert open_manifest(folder).device == device | {"draft_length": 62, "max_draft_length": 15}


def test_the_command_for_a_model_can_be_copied(tmp_path: Path) -> None:
    model = tmp_path / "my model"
    write_json(model / "config.json", {})
    with pytest.raises(BundleError, match=f"edgespec build-drafter --target '{model}', or export"):
        open_manifest(model)


def test_missing_truncated_and_altered_files_are_named(folder: Path) -> None:
    file = folder / "drafter" / "gguf" / "drafter-q8_0.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(
        BundleError, match=r"drafter-q8_0\.gguf has 489 bytes, the manifest wants 490 \(truncated"
    ):
        open_manifest(folder, hashes=False)
    file.write_bytes(whole[:100] + b"x" + whole[101:])
    with pytest.raises(
        BundleError, match=r"drafter-q8_0\.gguf was altered: sha256 [0-9a-f]{64}, the manifest wants"
    ):
        open_manifest(folder)
    open_manifest(folder, hashes=False)  # sizes alone cannot see it
    file.unlink()
    with pytest.raises(BundleError, match=r"drafter-q8_0\.gguf is missing"):
        open_manifest(folder)


def test_a_flipped_bit_is_noticed_in_every_file_at_both_ends_and_in_the_middle(folder: Path) -> None:
    names = sorted(open_manifest(folder).files)
    assert len(names) == 5
    for file in (folder / name for name in names):
        whole = file.read_bytes()
        for position in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:position] + bytes((whole[position] ^ 1,)) + whole[position + 1 :])
            with pytest.raises(BundleError, match=r"was altered"):
                open_manifest(folder)
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../secret", "a/../../secret", "..", ".", "", "a//b", "./a", "a/", "a\\b", "C:/x"),
        *("a\nb", "a\rb", "a\tb", "a\x1b[2Jb", "a\0b", "a\u202eb", "a\u2028b", "a\ud800b", "a.", "a ", "*"),
        *("NUL", "a/con.json", "com1", "LPT³.json", "a/conout$.json", "\\\\host\\share", "C:x", "a:b"),
        *("x" * 300, "x" * 2000, "y/" * 600 + "z"),
    ],
)
@pytest.mark.parametrize("place", ["files", "model"])
def test_paths_that_leave_the_bundle_or_harm_a_terminal(folder: Path, path: str, place: str) -> None:
    (folder.parent / "secret").write_text("{}\n")
    value = read_json(folder / "manifest.json")
    if place == "files":
        value["files"][path] = value["files"]["prompts.jsonl"]
    else:
        value["target"]["files"]["onnxruntime"]["fp32"] = path
    # in ASCII: a lone surrogate cannot be written otherwise
    (folder / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(BundleError, match=r"leaves the bundle|is no file name") as error:
        open_manifest(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "key",
    ["/tmp/x/evil", "int8/../../../y/evil", "..", ".hidden", "", "a b", "é", "a\x1b[2J", "x" * 65, "a\n"],
)
@pytest.mark.parametrize("place", ["engine", "precision", "fast"])
def test_an_engine_and_a_precision_have_plain_names(folder: Path, key: str, place: str) -> None:
    """They become parts of the names of files."""
    with rewritten(folder) as value:
        target = value["target"]
        model = "target/onnx-fp32"
        if place == "engine":
            target["files"][key] = {"fp32": model}
        elif place == "precision":
            target["files"]["onnxruntime"][key] = model
        else:
            target["fast"] = {key: {"fp32": f"{model}/model.onnx"}}
    with pytest.raises(BundleError, match=r"has the key '.*'; a plain name is wanted") as error:
        open_manifest(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["name", "source"])
def test_a_name_that_a_terminal_would_obey_is_refused(folder: Path, name: str) -> None:
    for text in ("a\x1b]0;owned\x07", "a\nserving", "a\x9b2J", "a\x7f"):
        with rewritten(folder) as value:
            value["drafter"][name] = text
        with pytest.raises(BundleError, match=rf"'{name}' has \d+ characters; .* no control characters"):
            open_manifest(folder)
    with rewritten(folder) as value:
        value["drafter"][name] = "é\u3000γ 日本\xa0x"
    assert getattr(open_manifest(folder).drafter, name).startswith("é")


def test_a_name_with_half_a_character_is_refused(folder: Path) -> None:
    """A server has it in every answer, and none could be written."""
    value = read_json(folder / "manifest.json")
    value["target"]["name"] = "a\ud83d"
    (folder / "manifest.json").write_text(json.dumps(value))  # in ASCII: it cannot be written otherwise
    with pytest.raises(BundleError, match=r"'name' has 2 characters; .* no half ones"):
        open_manifest(folder)


def test_links_out_of_the_bundle_are_refused(folder: Path) -> None:
    file = folder / "prompts.jsonl"
    outside = folder.parent / "outside.jsonl"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(BundleError, match=r"outside the bundle"):
        open_manifest(folder)
    file.unlink()
    (folder / "inside.jsonl").write_bytes(outside.read_bytes())
    file.symlink_to(folder / "inside.jsonl")
    open_manifest(folder)


def test_a_model_must_be_among_the_files(folder: Path) -> None:
    (folder / "extra").mkdir()
    (folder / "extra" / "model.onnx").write_text("not listed")
    with rewritten(folder) as value:
        value["target"]["files"]["onnxruntime"]["fp32"] = "extra"
    with pytest.raises(BundleError, match=r"'extra', which is not among its files"):
        open_manifest(folder)


def test_a_drafters_vocabulary_is_one_of_the_files(folder: Path) -> None:
    assert open_manifest(folder).drafter.vocabulary is None
    # as bundles without one always were
    assert "vocabulary" not in read_json(folder / "manifest.json")["drafter"]
    (folder / "drafter" / "vocabulary.json").write_text("{}")
    with rewritten(folder) as value:
        value["drafter"]["vocabulary"] = "drafter/vocabulary.json"
    with pytest.raises(
        BundleError, match=r"vocabulary is 'drafter/vocabulary\.json', which is not among its files"
    ):
        open_manifest(folder)
    manifest = replace(open_listed(folder), folder=None)
    write_manifest(folder, manifest)
    assert open_manifest(folder) == manifest
    assert open_manifest(folder).drafter.vocabulary == "drafter/vocabulary.json"
    for path in ("../vocabulary.json", "/etc/passwd", None, 3):
        with rewritten(folder) as value:
            value["drafter"]["vocabulary"] = path
        with pytest.raises(BundleError, match=r"leaves the bundle|is no file name"):
            open_manifest(folder)


def test_a_graph_for_the_fast_mode_lies_beside_its_model(folder: Path) -> None:
    """The field is optional, its file is checked like all others, and it shares a folder with the weights it needs."""
    assert open_manifest(folder).fast_graph("target", "onnxruntime", "fp32") is None
    assert "fast" not in read_json(folder / "manifest.json")["target"]  # as bundles without one always were
    name = "target/onnx-fp32/model-fast.onnx"
    (folder / name).write_bytes(b"graph")
    before = read_json(folder / "manifest.json")

    def tell(fast: Any) -> None:
        write_json(folder / "manifest.json", before | {"target": before["target"] | {"fast": fast}})

    tell({"onnxruntime": {"fp32": name}})
    with pytest.raises(
        BundleError, match=r"'target/onnx-fp32/model-fast\.onnx' for its fast mode, which is not"
    ):
        open_manifest(folder)  # it is not listed
    manifest = open_listed(folder)
    write_manifest(folder, replace(manifest, folder=None))
    assert open_manifest(folder) == manifest
    assert manifest.fast_graph("target", "onnxruntime", "fp32") == folder / name
    assert manifest.fast_graph("drafter", "onnxruntime", "fp32") is None
    exact, fast = (manifest.files_of("target", "onnxruntime", "fp32", fast=on) for on in (False, True))
    assert set(exact) == {"target/onnx-fp32/model.onnx"}
    assert set(fast) == {"target/onnx-fp32/model.onnx", name}
    before = read_json(folder / "manifest.json")
    for wrong, message in (
        (
            {"onnxruntime": {"fp32": "drafter/onnx-fp32/model.onnx"}},
            "not among the files in 'target/onnx-fp32'",
        ),
        ({"onnxruntime": {"int4": name}}, "not among the files in None"),
        ({"tvm": {"fp32": name}}, "not among the files in None"),
        ({"onnxruntime": {"fp32": "../model.onnx"}}, "leaves the bundle"),
        ({"onnxruntime": {"fp32": 3}}, "is no file name"),
        ({"onnxruntime": [name]}, "an object is wanted"),
        (None, "dict is wanted"),
        ([name], "dict is wanted"),
    ):
        tell(wrong)
        with pytest.raises(BundleError, match=message):
            open_manifest(folder)


def test_c_of_the_fast_mode_stands_beside_that_of_the_file(folder: Path) -> None:
    """Bundles made before there was one go by the file's."""
    file = ("onnxruntime", "fp32")
    assert open_manifest(folder).cost_ratios(*file, fast=True) == {"parameters": 0.1, "bytes": 0.1}
    with rewritten(folder) as value:
        value["cost_ratio"]["bytes"]["onnxruntime/fp32/fast"] = 0.3
    manifest = open_manifest(folder)
    assert manifest.cost_ratios(*file, fast=True)["bytes"] == 0.3
    assert manifest.cost_ratios(*file)["bytes"] == 0.1
    with rewritten(folder) as value:
        value["cost_ratio"]["bytes"]["onnxruntime/fp32/fast"] = -1
    with pytest.raises(BundleError, match=r"by bytes of onnxruntime fp32 is '-1'"):
        open_manifest(folder).cost_ratios(*file, fast=True)


def open_listed(folder: Path) -> Manifest:
    """The bundle's manifest with the drafter's vocabulary among its files."""
    with rewritten(folder) as value:
        value["files"] = {name: asdict(file) for name, file in describe_files(folder).items()}
    return open_manifest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2; this edgespec reads 1"),
        ({"schema_version": True}, "schema version True"),
        ({"schema_version": None}, "schema version None"),
        ({"files": []}, "'files' is '\\[\\]'; dict is wanted"),
        ({"files": {"prompts.jsonl": {"bytes": "3", "sha256": "0" * 64}}}, "'bytes' is '3'; int is wanted"),
        ({"files": {"prompts.jsonl": {"bytes": -3, "sha256": "0" * 64}}}, "which cannot be"),
        ({"files": {"prompts.jsonl": {"bytes": 3, "sha256": "zz"}}}, "which cannot be"),
        ({"files": {"prompts.jsonl": {"bytes": 3, "sha256": "A" * 64}}}, "which cannot be"),
        # a pull keeps what has arrived under this name
        ({"files": {"prompts.jsonl": {"bytes": 3, "sha256": "0" * 64 + "/../../x"}}}, "which cannot be"),
        ({"files": {"prompts.jsonl": {"bytes": 3, "sha256": "../" + "0" * 64}}}, "which cannot be"),
        ({"files": {"prompts.jsonl": None}}, "an object is wanted"),
        ({"target": "x"}, "'target' is 'x'"),
        ({"default": {"engine": 1}}, "'engine' is '1'; str is wanted"),
        ({"pair": {"tokenizer_sha256": "a"}}, "'vocab_size' is 'None'; int is wanted"),
    ],
)
def test_wrong_content_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    with rewritten(folder) as value:
        value |= change
    with pytest.raises(BundleError, match=message):
        open_manifest(folder)


def test_files_that_are_no_manifest(folder: Path, tmp_path: Path) -> None:
    manifest = folder / "manifest.json"
    for content in ("", "{", "[]", "[" * 200_000, '{"schema_version": NaN}', "\xff\xfe{}"):
        manifest.write_text(content, encoding="latin-1")
        with pytest.raises(BundleError):
            open_manifest(folder)
    manifest.write_text(json.dumps({"schema_version": 1, "pad": "x" * MAX_MANIFEST_BYTES}))
    with pytest.raises(BundleError, match=r"at most 4194304 are read"):
        open_manifest(folder)
    manifest.unlink()
    with pytest.raises(BundleError, match=r"is no bundle"):
        open_manifest(folder)
    with pytest.raises(BundleError, match=r"is no bundle"):
        open_manifest(tmp_path / "nowhere")


def test_the_folder_of_a_build_names_its_bundle(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / MANIFEST).write_text("{}")
    with pytest.raises(BundleError) as error:
        open_manifest(tmp_path)
    assert str(error.value).endswith(f"its bundle is {tmp_path / 'bundle'}: give that one")
