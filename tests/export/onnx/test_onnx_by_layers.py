"""An export of two layers at a time is the export of the whole model; and a file is checked one layer at a time."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx import by_layers
from edgespec_export.onnx.by_layers import export_by_layers
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.file_check import FileCheck, Passage
from edgespec_export.verify.readback import gguf_weights, onnx_weights
from edgespec_export.verify.streamed_check import Streamed, streamed_logits
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from onnx_ir import Graph
from safetensors.numpy import load_file, save_file
from tiny_models import make_model_folder, torch_logits

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape

PROMPTS = [[5, 6, 7, 300, 2, 17], [9, 8, 7]]
PASSAGES = [Passage(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "layers", "tied", "hidden_states"),
    [
        ("llama", 5, False, True),
        ("qwen3", 4, True, False),
        ("qwen2", 3, True, False),
        ("mistral", 2, False, False),
    ],
)
def test_by_layers_is_the_same_as_whole(
    tmp_path: Path, family: str, layers: int, tied: bool, hidden_states: bool
) -> None:
    head_dim = 16 if family == "qwen2" else 32
    model = make_model_folder(tmp_path / "model", family, layers=layers, tied=tied, head_dim=head_dim)
    export_onnx(model, tmp_path / "whole", "int4", hidden_states=hidden_states)
    export_by_layers(model, tmp_path / "slices", hidden_states=hidden_states)
    names = [sorted(file.name for file in (tmp_path / one).iterdir()) for one in ("whole", "slices")]
    assert names[0] == names[1]
    whole, slices = (dict(onnx_weights(tmp_path / one, shape_of(model))) for one in ("whole", "slices"))
    assert whole.keys() == slices.keys()
    for name, weight in whole.items():
        np.testing.assert_array_equal(weight, slices[name], name)
    for graph in ("model.onnx", "model-fast.onnx"):
        engines = [
            OnnxRuntimeEngine(tmp_path / one, graph=tmp_path / one / graph) for one in ("whole", "slices")
        ]
        ours, theirs = (engine.forward(PROMPTS[0]) for engine in engines)
        np.testing.assert_array_equal(ours, theirs)
        assert all((engine.features is not None) == hidden_states for engine in engines)
        if hidden_states:
            np.testing.assert_array_equal(engines[0].features, engines[1].features)


def test_a_slice_is_freed_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder's graph and its weights are in reference cycles, which may wait long for Python's collector."""
    plain, left = by_layers.export_onnx, []

    def watched(*given: Any, **named: Any) -> dict[str, Any]:
        left.append(sum(issubclass(type(each), Graph) for each in gc.get_objects()))
        return plain(*given, **named)

    monkeypatch.setattr(by_layers, "export_onnx", watched)
    model = make_model_folder(tmp_path / "model", layers=6)
    gc.collect()
    gc.disable()
    try:
        export_by_layers(model, tmp_path / "out")
    finally:
        gc.enable()
    assert len(left) == 3
    assert left[0] == left[1] == left[2]


def test_large_models_go_by_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And families whose layers differ go whole."""
    monkeypatch.setattr(by_layers, "WHOLE", 0)
    model = make_model_folder(tmp_path / "llama", layers=3)
    assert by_layers.export_int4(model, tmp_path / "slices")["notes"] == ["exported two layers at a time"]
    model = make_model_folder(tmp_path / "gemma2", "gemma2", layers=3)
    assert by_layers.export_int4(model, tmp_path / "whole")["notes"] == []


def test_families_with_unlike_layers_are_refused(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "gemma2", layers=4)
    with pytest.raises(InputError, match=r"'gemma2' model; an export by layers knows llama"):
        export_by_layers(model, tmp_path / "out")
    with pytest.raises(InputError, match=r"'gemma2' model; the check by layers knows llama"):
        streamed_logits(iter(()), model, PASSAGES)


def test_layers_with_and_without_a_window_are_not_taken_for_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, the file attends where torch does; layers copied from each other would not."""
    monkeypatch.setattr(by_layers, "WHOLE", 0)
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = make_model_folder(tmp_path / "model", "qwen2", layers=4, head_dim=16, **window)
    assert by_layers.export_int4(model, tmp_path / "out")["notes"] == []
    attention = [
        node for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node if "Attention" in node.op_type
    ]
    windows = [
        int(field.i) for node in attention for field in node.attribute if field.name == "local_window_size"
    ]
    assert windows == [-1, -1, 8, 8]
    for refuse in (
        lambda: export_by_layers(model, tmp_path / "slices"),
        lambda: streamed_logits(iter(()), model, PASSAGES),
    ):
        with pytest.raises(InputError, match="of several kinds, full_attention, sliding_attention"):
            refuse()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("streamed")
    model = make_model_folder(root / "model", layers=4, tied=False)
    export_gguf(model, root / "f32.gguf", "f32")
    export_gguf(model, root / "q4_0.gguf", "q4_0")
    export_by_layers(model, root / "int4")
    return {"model": model, "f32": root / "f32.gguf", "q4_0": root / "q4_0.gguf", "int4": root / "int4"}


def shape_of(model: Path) -> ModelShape:
    return ModelShape.from_config(read_json(model / "config.json"))


def check_streamed(path: Path, precision: str, model: Path) -> FileCheck:
    engine = "llama.cpp" if path.is_file() else "onnxruntime"
    return Streamed(model, PROMPTS).check(ExportedFile("target", engine, precision, path, precision))


def checked(exported: dict[str, Path], name: str, model: Path | None = None) -> FileCheck:
    return check_streamed(exported[name], name, model or exported["model"])


def test_layer_by_layer_is_torch(exported: dict[str, Path]) -> None:
    weights = gguf_weights(exported["f32"], shape_of(exported["model"]))
    found = streamed_logits(weights, exported["model"], PASSAGES)
    for prompt, logits in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(logits, torch_logits(exported["model"], prompt).numpy(), atol=1e-4)


def test_weights_in_any_order(exported: dict[str, Path]) -> None:
    weights = list(gguf_weights(exported["f32"], shape_of(exported["model"])))
    found = streamed_logits(reversed(weights), exported["model"], PASSAGES)
    np.testing.assert_allclose(found[0], torch_logits(exported["model"], PROMPTS[0]).numpy(), atol=1e-4)
    some = [pair for pair in weights if "layers.2.mlp" not in pair[0]]
    with pytest.raises(InputError, match="the file has 2 whole layers of 4"):
        streamed_logits(iter(some), exported["model"], PASSAGES)


@pytest.mark.parametrize("name", ["q4_0", "int4"])
@pytest.mark.llamacpp
def test_whole_files_pass(exported: dict[str, Path], name: str) -> None:
    check = checked(exported, name)
    assert check.broken == []
    assert (check.weights_relative or 0) > 0.01
    assert None not in (check.engine_relative, check.block_relative, check.block_leak, check.top1)
    assert check.positions == 9


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_a_tied_table_is_embedding_and_output_layer(tmp_path: Path, precision: str) -> None:
    """An int4 graph names it after the output layer."""
    model = make_model_folder(tmp_path / "model", layers=3)
    if precision == "int4":
        export_by_layers(model, tmp_path / "onnx")
    else:
        export_onnx(model, tmp_path / "onnx", precision)
    assert check_streamed(tmp_path / "onnx", precision, model).broken == []


def test_a_matrix_of_another_layer_is_noticed(exported: dict[str, Path], tmp_path: Path) -> None:
    """The checkpoint changes instead of the file: which of them is wrong does not matter to the distance."""
    other = shutil.copytree(exported["model"], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    one, two = (f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (1, 2))
    weights[one], weights[two] = weights[two], weights[one]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    check = checked(exported, "int4", other)
    assert (check.weights_relative or 0) > 1
    assert check.worst_weight in (one, two)
    assert check.worst_weight in " ".join(check.broken)


def test_a_wrong_rope_base_is_noticed(exported: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(exported["model"], tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("10000.0", "500.0"))
    check = checked(exported, "int4", other)
    assert (check.engine_relative or 0) > 1e-2
    assert any(line.startswith("engine") for line in check.broken)


@pytest.mark.parametrize("silent", [(0, 1), (2,), (0, 1, 2)])
def test_layers_whose_biases_are_zero(tmp_path: Path, silent: tuple[int, ...]) -> None:
    """The builder leaves such biases out of a slice; the layers of the whole must have all that are not zero."""
    model = make_model_folder(tmp_path / "model", "qwen2", layers=3, head_dim=16, tied=False)
    weights = load_file(model / "model.safetensors")
    for layer in silent:
        for part in "qkv":
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"].fill(0)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    export_by_layers(model, tmp_path / "slices")
    found = dict(onnx_weights(tmp_path / "slices", shape_of(model)))
    biases = {name: value for name, value in weights.items() if name.endswith(".bias")}
    for name, bias in biases.items():
        np.testing.assert_allclose(found[name], bias, atol=1e-36, rtol=1e-7)
    export_onnx(model, tmp_path / "whole", "int4")  # goes without them
    for name in ("slices", "whole"):
        relative = check_streamed(tmp_path / name, "int4", model).engine_relative
        assert relative is not None
        assert relative < 1e-5
