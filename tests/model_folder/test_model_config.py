"""A config.json that says other than the folder's other files: token ids beyond the vocabulary, and the type of the weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_export.gguf.vocabulary import read_vocabulary
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.readback import onnx_weights
from edgespec_recipes.models import loading
from edgespec_recipes.models.vocabulary import special_tokens
from edgespec_runtime.text.tokenizer import ChatTokenizer
from safetensors.torch import load_file, save_file
from small_files import files_of_at_most
from tiny_models import torch_logits

from edgespec.core.errors import InputError, NoRoom
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import (
    corrected_folder,
    known_ids,
    read_config,
    read_generation_config,
    stop_ids,
)
from edgespec.model_folder.head import shape_of_drafter

TOKENS = [5, 6, 7, 300, 2, 17]
BEYOND = {"pad_token_id": 32000, "bos_token_id": -1, "eos_token_id": [2, 99999]}


def changed(source: Path, folder: Path, **change: Any) -> Path:
    """A copy of a model folder with other settings."""
    shutil.copytree(source, folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    return folder


def test_settings_of_another_form_are_refused(tmp_path: Path) -> None:
    for name, read in (("config.json", read_config), ("generation_config.json", read_generation_config)):
        (tmp_path / name).write_text("[]")
        with pytest.raises(InputError, match=rf"{name} holds list; a JSON object is wanted"):
            read(tmp_path)


def test_ids_beyond_the_vocabulary_are_no_tokens() -> None:
    assert known_ids(BEYOND, 512) == {"pad_token_id": None, "bos_token_id": None, "eos_token_id": [2]}
    assert known_ids({"pad_token_id": 511, "eos_token_id": [0, 2], "bos_token_id": None}, 512) == {}
    assert known_ids({"eos_token_id": [512, "2"]}, 512) == {"eos_token_id": None}
    assert known_ids(BEYOND, None) == {}


@pytest.mark.parametrize(
    ("generation", "config", "eos", "ends"),
    [
        (None, [7, 8, 9], 7, [7, 8, 9]),
        (None, 7, None, [7]),
        ({"eos_token_id": 2}, 7, 5, [2, 5]),  # an old generation config beside a new end token
        ({"eos_token_id": [9, 600]}, 7, 9, [9]),
        ({"temperature": 0.6}, 7, 5, [5, 7]),
        (None, None, None, []),
    ],
)
def test_a_reply_ends_where_one_of_the_files_says(
    tmp_path: Path, generation: dict[str, Any] | None, config: Any, eos: int | None, ends: list[int]
) -> None:
    write_json(tmp_path / "config.json", {"vocab_size": 512, "eos_token_id": config})
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert stop_ids(tmp_path, eos) == ends


@pytest.fixture(scope="module")
def beyond(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = changed(families["llama"], tmp_path_factory.mktemp("beyond") / "model", **BEYOND)
    write_json(folder / "generation_config.json", {**BEYOND, "max_length": 50})
    return folder


def test_every_reader_goes_without_them(beyond: Path, families: dict[str, Path], tmp_path: Path) -> None:
    """Left alone, transformers ends with an AssertionError at such a padding id."""
    loading.check_model_folder(beyond)
    model, tokenizer = loading.load_model(beyond), loading.load_tokenizer(beyond)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0]
    assert torch.equal(logits, torch_logits(families["llama"], TOKENS))
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, None, [2])
    assert loading.stop_ids_of(beyond, tokenizer) == [2]
    assert max(special_tokens(tokenizer, beyond)) < 512
    assert ChatTokenizer(beyond).stop_ids == {2}
    assert read_vocabulary(beyond, read_config(beyond)).keys["padding_token_id"] == 3  # the tokenizer's own
    loading.save_model(model, beyond, tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json").get("pad_token_id") is None
    assert read_generation_config(tmp_path / "saved").get("pad_token_id") is None


def test_an_export_goes_without_them(beyond: Path, tmp_path: Path) -> None:
    export_onnx(beyond, tmp_path / "onnx", "fp32")
    written = read_json(tmp_path / "onnx" / "genai_config.json")["model"]
    assert all(0 <= written[f"{role}_token_id"] < 512 for role in ("pad", "bos"))
    assert written["eos_token_id"] == [2]


def test_a_model_without_any_end_is_refused(families: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(families["llama"], tmp_path / "model", eos_token_id=512)
    (folder / "generation_config.json").unlink()
    assert loading.stop_ids_of(folder, loading.load_tokenizer(folder)) == [2]  # the tokenizer's
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match="has no end-of-sequence token"):
        loading.check_model_folder(folder)


def stored_as(source: Path, folder: Path, said: str | None, kinds: dict[str, torch.dtype]) -> Path:
    """A copy with weights of other types: `kinds` by the end of a tensor's name; config.json says `said`."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for ending, kind in kinds.items():
        weights |= {name: value.to(kind) for name, value in weights.items() if name.endswith(ending)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        name: value
        for name, value in read_json(folder / "config.json").items()
        if name not in ("dtype", "torch_dtype")
    }
    write_json(folder / "config.json", config if said is None else config | {"dtype": said})
    return folder


@pytest.mark.parametrize(
    ("said", "kinds", "read_as"),
    [
        ("float16", {}, "float32"),
        ("bfloat16", {"": torch.float16}, "float16"),
        ("bfloat16", {"": torch.bfloat16, "norm.weight": torch.float32}, "float32"),
        (None, {"": torch.bfloat16, "down_proj.weight": torch.float16}, "float32"),
        ("float32", {"": torch.bfloat16}, "bfloat16"),
    ],
)
def test_the_weights_count_and_not_what_the_config_says_of_them(
    families: dict[str, Path], tmp_path: Path, said: str | None, kinds: dict[str, torch.dtype], read_as: str
) -> None:
    folder = stored_as(families["mistral"], tmp_path / "model", said, kinds)
    with corrected_folder(folder) as readable:
        assert read_json(readable / "config.json")["dtype"] == read_as
        assert (readable / "model.safetensors").samefile(folder / "model.safetensors")
    assert not readable.exists()
    export_onnx(folder, tmp_path / "onnx", "fp32")
    shape = ModelShape.from_config(read_config(folder))
    stored = load_file(folder / "model.safetensors")
    found = dict(onnx_weights(tmp_path / "onnx", shape))
    assert found.keys() == stored.keys()
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, stored[name].float().numpy(), name)


def test_a_full_disk_of_temporary_files_is_named(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system gives no links, the weights are copied there."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    folder = stored_as(families["mistral"], tmp_path / "model", "float16", {})
    for link in ("symlink", "link"):
        monkeypatch.setattr(os, link, refused)
    words = r"^cannot write \S*/edgespec-\S*: the file would exceed the size limit"
    with pytest.raises(NoRoom, match=words), files_of_at_most(1000), corrected_folder(folder):
        pytest.fail("all of it was copied")


def test_a_folder_that_is_right_is_read_as_it_is(families: dict[str, Path]) -> None:
    with corrected_folder(families["qwen3"]) as readable:
        assert readable == families["qwen3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers": "2"},
            r"head\.json gives the layers 2; a value of the kind int between 0 and 16777216 is",
        ),
        ({"heads": -1}, r"head\.json gives the heads -1"),
        (
            {"hidden_size": 2**24 + 1},
            r"head\.json gives the hidden 16777217",
        ),  # a plan would try widths for hours
        ({"layers": None}, r"head\.json gives the layers None"),
    ],
)
def test_a_heads_sizes_are_numbers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    sizes = ("hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "draft_vocab_size")
    shape = {**dict.fromkeys(sizes, 8), "layers": 1, "context_length": 64, "rope_theta": 1e4}
    write_json(tmp_path / "head.json", {"shape": {**shape, "rms_norm_eps": 1e-5}})
    assert shape_of_drafter(tmp_path).layers == 1
    write_json(tmp_path / "head.json", {"shape": {**shape, "rms_norm_eps": 1e-5, **change}})
    with pytest.raises(InputError, match=message):
        shape_of_drafter(tmp_path)
