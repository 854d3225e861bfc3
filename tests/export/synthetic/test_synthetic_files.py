"""Files of random weights of a real shape: both engines run them, a repeated layer is a layer, sizes are known beforehand."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.folder import DATA
from edgespec_export.onnx.repeat import repeat_layers
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.synthetic import gguf_file as synthetic_gguf
from edgespec_export.synthetic import pair as synthetic
from edgespec_export.synthetic.gguf_file import planned_bytes, write_gguf
from edgespec_export.synthetic.onnx_folder import write_onnx
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from synthetic_shape import SMALL_SHAPE
from tiny_models import make_model_folder

from edgespec.core.errors import EdgespecError, InputError, MissingExtra
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.recipe.targets import TARGETS, find_shape

TOKENS = np.random.default_rng(0).integers(4, 512, 40).tolist()


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.from_config(read_json(folder / "config.json"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_tensors_of_a_real_export(
    families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Names, shapes and types, and so the bytes that a token reads, are those of the exporter's file of the same model."""
    export_gguf(families[family], tmp_path / "real.gguf", "q8_0")
    write_gguf(shape_of(families[family]), tmp_path / "random.gguf", "q8_0")
    tensors = {
        name: {
            (tensor.name, tuple(tensor.shape), tensor.tensor_type)
            for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors
        }
        for name in ("real", "random")
    }
    assert tensors["random"] == tensors["real"]


@pytest.mark.parametrize("precision", ["q4_0", "q8_0", "f16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.llamacpp
def test_llama_cpp_runs_a_file_of_random_weights(
    families: dict[str, Path], tmp_path: Path, family: str, precision: str
) -> None:
    shape, file = shape_of(families[family]), tmp_path / "model.gguf"
    write_gguf(shape, file, precision)
    tensors = GGUFReader(file).tensors
    assert sum(int(tensor.n_bytes) for tensor in tensors) == planned_bytes(shape, precision)
    engine = LlamaCppEngine(file, threads=1)
    logits = np.array(engine.forward(TOKENS))
    engine.close()
    assert logits.shape == (len(TOKENS), shape.vocab_size)
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5.0
    assert len(set(logits.argmax(axis=1).tolist())) > 5


def test_rows_that_are_no_multiple_of_a_block_are_refused(tmp_path: Path) -> None:
    shape = ModelShape(72, 1, 2, 2, 32, 128, 64, tied=True, context_length=64)
    with pytest.raises(InputError, match=r"rows of 72, and q4_0 needs a multiple of 32; choose .* f16"):
        write_gguf(shape, tmp_path / "model.gguf", "q4_0")
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, drawn, calls = SMALL_SHAPE, synthetic_gguf._drawn, []

    def dies(*tensor: Any) -> Any:
        calls.append(tensor)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return drawn(*tensor)

    monkeypatch.setattr(synthetic_gguf, "_drawn", dies)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(shape, tmp_path / "model.gguf", "q4_0")
    assert list(tmp_path.iterdir()) == []


def with_equal_layers(folder: Path) -> Path:
    """Every layer after the first one gets the second one's weights."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        number = name.split(".")[2] if name.startswith("model.layers.") else "0"
        if int(number) > 1:
            weights[name] = weights[name.replace(f"layers.{number}.", "layers.1.")].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_layers(folder: Path, out: Path, layers: int) -> Path:
    """The same model with its first layers only."""
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    kept = {
        name: weight
        for name, weight in weights.items()
        if not (name.startswith("model.layers.") and int(name.split(".")[2]) >= layers)
    }
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = read_json(out / "config.json")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("family", "tied", "precision"),
    [("llama", False, "int4"), ("llama", True, "fp32"), ("qwen2", True, "int4"), ("qwen3", False, "int4")],
)
def test_a_repeated_layer_is_a_layer(tmp_path: Path, family: str, tied: bool, precision: str) -> None:
    """Two layers, the second repeated to five, against an ordinary export of five layers with the same weights."""
    five = with_equal_layers(make_model_folder(tmp_path / "five", family, layers=5, tied=tied))
    two = without_layers(five, tmp_path / "two", 2)
    export_onnx(five, tmp_path / "ordinary", precision)
    export_onnx(two, tmp_path / "exported", precision)
    repeat_layers(tmp_path / "exported", tmp_path / "repeated", 5, turn=0)

    logits = {}
    for name in ("ordinary", "repeated", "exported"):
        engine = OnnxRuntimeEngine(tmp_path / name, threads=1)
        blocks = [np.array(engine.forward(TOKENS[start : start + 10])) for start in range(0, 40, 10)]
        logits[name] = np.concatenate(blocks)  # in four passes, so that every layer's cache counts
        engine.close()
    assert np.abs(logits["repeated"] - logits["ordinary"]).max() < 1e-4
    assert np.abs(logits["exported"] - logits["ordinary"]).max() > 0.1  # the layers do something

    graphs = [
        onnx.load(tmp_path / name / "model.onnx", load_external_data=False).graph
        for name in ("ordinary", "repeated")
    ]
    names = [{node.name for node in graph.node} for graph in graphs]
    assert names[0] == names[1]
    assert {value.name for value in graphs[0].output} == {value.name for value in graphs[1].output}
    assert {value.name for value in graphs[0].input} == {value.name for value in graphs[1].input}
    sizes = [
        streamed_bytes(ExportedFile("target", "onnxruntime", precision, tmp_path / name))
        for name in ("ordinary", "repeated")
    ]
    assert sizes[0] == sizes[1]
    # what is planned before a file is made; vectors stay floats and are counted as if they were packed
    written = (tmp_path / "ordinary" / DATA).stat().st_size
    assert costs.file_bytes(shape_of(five), "onnxruntime", precision) == pytest.approx(written, rel=0.03)


def test_a_failed_export_keeps_its_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        print("what the builder said")
        raise NotImplementedError("no such RoPE")

    monkeypatch.setattr(to_onnx._builder(), "create_model", fail)
    (tmp_path / ".model.template.old").mkdir()  # of a run that was killed
    with pytest.raises(EdgespecError, match=r"no such RoPE; its output is in .*model\.log$"):
        write_onnx(SMALL_SHAPE, tmp_path / "model", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model.log"]
    assert "what the builder said" in (tmp_path / "model.log").read_text()
    narrow = ModelShape(64, 1, 8, 8, 8, 128, 64, tied=True, context_length=64)
    with pytest.raises(InputError, match=r"heads of 8; .* multiple of 16: choose --engine llama.cpp"):
        synthetic._plan(narrow, "onnxruntime", "int4")


def test_a_missing_exporter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_onnx._builder.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime_genai.models", None)
    with pytest.raises(MissingExtra, match=r'pip install "edgespec\[export\]"'):
        write_onnx(SMALL_SHAPE, tmp_path / "model", "int4")
    assert list(tmp_path.iterdir()) == []


def test_every_copy_of_a_layer_has_bytes_of_its_own(tmp_path: Path) -> None:
    """Copies with one region of the file, or with equal content, would share memory and run from the processor's cache."""
    write_onnx(SMALL_SHAPE, tmp_path / "model", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # a log tells of a failure
    tensors = onnx.load(tmp_path / "model" / "model.onnx", load_external_data=False).graph.initializer
    places = sorted(
        (int(entries["offset"]), int(entries["length"]))
        for entries in ({entry.key: entry.value for entry in tensor.external_data} for tensor in tensors)
        if entries
    )
    assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(places))
    size = (tmp_path / "model" / "model.onnx.data").stat().st_size
    assert places[-1][0] + places[-1][1] == size
    finished, _, _ = synthetic._plan(SMALL_SHAPE, "onnxruntime", "int4")
    assert abs(finished - size) < 0.02 * size
    data = (tmp_path / "model" / "model.onnx.data").read_bytes()
    named = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in tensors}
    one, other = (named[f"model.layers.{layer}.mlp.down_proj.MatMul.weight_Q4"] for layer in (1, 4))
    first, second = (data[int(at["offset"]) :][: int(at["length"])] for at in (one, other))
    assert sorted(first) == sorted(second)  # turned, and else alike
    differing = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
    assert differing.mean() > 0.9


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama-2-7b", "llama-2-7b-chat"),
        ("smollm3-3b", "smollm3-3b"),
        ("qwen2.5-7b", "qwen2.5-7b-instruct"),
        ("llama-2", "llama-2"),
    ],
)
def test_the_beginning_of_an_alias_is_enough_where_it_is_clear(name: str, full: str) -> None:
    assert synthetic.full_name(name) == full


def test_too_little_disk_or_memory_is_said_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(synthetic, "free_disk", lambda _: 2**30)
    with pytest.raises(
        InputError, match=r"llama-2-7b-chat on llama.cpp in q4_0 take 3\.6 GiB .* 1\.0 GiB are free"
    ):
        synthetic.build("llama-2-7b", "llama.cpp", "q4_0")
    monkeypatch.setattr(synthetic, "free_memory", lambda: 3 * 2**30)
    with pytest.raises(InputError, match=r"takes about [4-5]\.\d GiB of memory and 3\.0 GiB are free"):
        synthetic.build("llama-2-7b", "llama.cpp", "q4_0")
    assert not (tmp_path / "home").exists()


def test_every_alias_with_a_published_shape_has_a_plan() -> None:
    """17 aliases: sizes follow from the shapes alone. Llama-2-7B in Q4_0 is the 3.8 GB that llama.cpp's users know."""
    for alias in TARGETS:
        shape = find_shape(alias)
        assert shape is not None
        for engine, precision in (("llama.cpp", "q8_0"), ("onnxruntime", "int4")):
            assert synthetic._plan(shape, engine, precision)[0] > 0.5 * shape.parameters
    llama = find_shape("llama-2-7b-chat")
    assert llama is not None
    assert planned_bytes(llama, "q4_0") == pytest.approx(3.79e9, rel=0.01)
