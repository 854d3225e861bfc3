"""Weights that are whole and fit their config: what every target passes before it is read."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from edgespec_recipes.models.loading import check_model_folder
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.check import check_weights
from edgespec.model_folder.head import target_embedding
from edgespec.model_folder.weights_files import INDEX, read_header


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target") / "model", tied=False)


def copied(target: Path, place: Path, shards: int = 1) -> Path:
    """A copy of a model folder, its weights in `shards` files with an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, place)
    if shards > 1:
        weights = load_file(place / "model.safetensors")
        (place / "model.safetensors").unlink()
        names = sorted(weights)
        where = {
            name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
        }
        for file in set(where.values()):
            save_file({name: weights[name] for name in names if where[name] == file}, place / file)
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return place


def problem(folder: Path) -> str:
    """What `check_model_folder`, which every target passes, says of a folder."""
    with pytest.raises(InputError) as seen:
        check_model_folder(folder)
    return str(seen.value)


def with_config(folder: Path, **changes: Any) -> Path:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_whole_folders_pass(families: dict[str, Path], family: str) -> None:
    check_model_folder(families[family])


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_pass(target: Path, tmp_path: Path, shards: int) -> None:
    check_model_folder(copied(target, tmp_path / "model", shards))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(target: Path, tmp_path: Path, indexed: bool) -> None:
    folder = copied(target, tmp_path / "model", 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    if not indexed:
        (folder / INDEX).unlink()
    assert "lacks 1 of its 3 weight files: model-00002-of-00003.safetensors" in problem(folder)


def test_a_shard_that_is_cut_short_is_named(target: Path, tmp_path: Path) -> None:
    folder = copied(target, tmp_path / "model", 3)
    file = folder / "model-00003-of-00003.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2):
        file.write_bytes(whole[:size])
        text = problem(folder)
        assert f"{file} is cut short: it has {size:,} bytes and its header names {len(whole):,}" in text
    file.write_bytes(whole + b"x")
    assert "is longer than it should be" in problem(folder)
    for size in (0, 7, 8, 100):
        file.write_bytes(whole[:size])
        assert f"{file} has {size:,} bytes and is no whole safetensors file" in problem(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "is [512, 64], and the config's sizes make it [512, 128]"),
        (
            {"intermediate_size": 96},
            "mlp.down_proj.weight in model.safetensors is [64, 160], and the config's sizes make it [64, 96]",
        ),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight in model.safetensors is [64, 64]"),
        ({"vocab_size": 640}, "is [512, 64], and the config's sizes make it [640, 64]"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and the files have 2 layers"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and the files have 2 layers"),
    ],
)
def test_a_config_of_another_model(target: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    text = problem(with_config(copied(target, tmp_path / "model"), **changes))
    assert "config.json and weights disagree" in text
    assert words in text


@pytest.mark.parametrize("changes", [{"intermediate_size": 96}, {"num_hidden_layers": 3}, {}])
def test_a_family_that_is_not_known_may_have_another_form(
    target: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Gates beside the queries, further layers, one table in the place of two: no file is damaged then."""
    folder = copied(target, tmp_path / "model") if changes else make_model_folder(tmp_path / "model")
    text = problem(with_config(folder, **changes, model_type="cohere2", tie_word_embeddings=False))
    assert "a 'cohere2' model may be of another form than Llama's: give one of llama, mistral" in text
    assert "same model" not in text
    assert "fetch" not in text


def test_a_config_of_very_many_layers_takes_no_memory(target: Path, tmp_path: Path) -> None:
    folder = with_config(copied(target, tmp_path / "model"), num_hidden_layers=10**7)
    tracemalloc.start()
    try:
        assert "num_hidden_layers is 10000000, and the files have 2 layers" in problem(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()


def rewritten(folder: Path, change: Any) -> Path:
    """The folder with its safetensors header changed by `change`."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lm_head.weight", "have no lm_head.weight"),
        ("model.layers.1.mlp.up_proj.weight", "have no model.layers.1.mlp.up_proj.weight"),
        ("model.norm.weight", "have no model.norm.weight"),
    ],
)
def test_a_tensor_that_is_not_there(target: Path, tmp_path: Path, name: str, words: str) -> None:
    def renamed(header: dict[str, Any]) -> None:
        header["another"] = header.pop(name)

    assert words in problem(rewritten(copied(target, tmp_path / "model"), renamed))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"dtype": "F32", "shape": [2, 2]},
        {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": 5, "shape": [2, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2.5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 16]},
        {"dtype": "X", "shape": [2] * 65, "data_offsets": [0, 16]},  # 100,000 large ones multiply for minutes
    ],
)
def test_headers_that_lie(target: Path, tmp_path: Path, entry: Any) -> None:
    folder = rewritten(copied(target, tmp_path / "model"), lambda header: header.update(liar=entry))
    with pytest.raises(InputError, match="liar"):
        read_header(folder / "model.safetensors")


def test_a_tokenizer_that_would_never_end_does_not_reach_transformers(target: Path, tmp_path: Path) -> None:
    folder = copied(target, tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [step] * 16}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert "has a normalizer of 17 steps that can make a text very long" in problem(folder)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{tmp_path} cannot be read: .*; make it readable"):
        read_header(tmp_path)


def test_a_layer_of_very_many_digits_is_none(target: Path, tmp_path: Path) -> None:
    def numbered(header: dict[str, Any]) -> None:
        header[f"model.layers.{'1' * 5000}.more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    folder = rewritten(copied(target, tmp_path / "model"), numbered)
    check_weights(folder, ModelShape.from_config(read_json(folder / "config.json")))


def test_an_index_that_lies(target: Path, tmp_path: Path) -> None:
    folder = copied(target, tmp_path / "model", 2)
    index = json.loads((folder / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = next(one for one in index["weight_map"].values() if one != file)
    for place, words in (
        (other, f"{name}, and it is in {file}"),
        ("../../etc/passwd", "a .safetensors file of the folder"),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: place}}))
        assert words in problem(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"extra": file}}))
    assert "the tensor extra, and no file has it" in problem(folder)
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert "has no weight_map" in problem(folder)


def foreign(header: dict[str, Any]) -> None:
    for name in set(header) - {"__metadata__"}:
        header[f"transformer.{name}"] = header.pop(name)


def test_other_names_are_left_alone(target: Path, tmp_path: Path) -> None:
    folder = with_config(copied(target, tmp_path / "foreign"), hidden_size=128)
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    check_weights(rewritten(folder, foreign), shape)


def test_other_names_of_very_many_layers(target: Path, tmp_path: Path) -> None:
    """The class would be made with all of them, which no memory holds."""
    folder = with_config(copied(target, tmp_path / "foreign"), num_hidden_layers=10**7)
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    with pytest.raises(InputError, match=r"num_hidden_layers is 10000000, and the files have \d\d tensors"):
        check_weights(rewritten(folder, foreign), shape)


def test_what_a_mac_puts_beside_a_file_is_no_weights_file(target: Path, tmp_path: Path) -> None:
    """On disks with another file system than its own."""
    folder = copied(target, tmp_path / "model")
    (folder / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        ")
    assert target_embedding(folder).shape == (512, 64)
