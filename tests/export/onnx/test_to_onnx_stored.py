"""fp16 and int8: small in the file, float32 in the arithmetic; exact, and near the float model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_export.verify.pair import Reference
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from safetensors.torch import load_file, save_file

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json
from edgespec.planning.costs import file_bytes
from edgespec.recipe.targets import shape_of_target

PROMPTS = [np.random.default_rng(seed).integers(4, 512, 40).tolist() for seed in range(2)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # tied, untied, tied with biases, untied with head norms


@pytest.fixture(scope="module")
def stored(
    families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("stored")
    folders = {
        (family, one): root / f"{family}-{one}" for family in FAMILIES for one in ("fp32", "fp16", "int8")
    }
    for (family, precision), folder in folders.items():
        export_onnx(families[family], folder, precision)
    return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_that_of_the_weights_alone(
    families: dict[str, Path], stored: dict[tuple[str, str], Path], family: str
) -> None:
    reference = Reference(families[family], PROMPTS)
    for precision, low, high in (("fp16", 1e-4, 3e-4), ("int8", 3e-3, 8e-3)):
        file = ExportedFile("target", "onnxruntime", precision, stored[family, precision])
        check = reference.check(file)
        assert check.broken == []
        assert low < check.weights_relative < high
        assert (check.engine_relative or 0.0) < 1e-5
        assert check.block_flips == 0
        assert check.top1 > 0.9
        assert (check.fast is not None) == (precision == "int8")
        if check.fast is not None:
            assert 1e-3 < (check.fast.engine_relative or 0.0) < 0.1
        floats = ExportedFile("target", "onnxruntime", "fp32", stored[family, "fp32"])
        # what is read is what was widened
        assert abs(streamed_bytes(file) / streamed_bytes(floats) - 1) < 0.05


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_files_are_a_half_and_a_quarter(
    families: dict[str, Path], stored: dict[tuple[str, str], Path], family: str
) -> None:
    size = {one: (stored[family, one] / "model.onnx.data").stat().st_size for one in ("fp32", "fp16", "int8")}
    assert size["fp16"] < 0.56 * size["fp32"]  # RoPE tables stay
    # an untied embedding stays in floats
    assert size["int8"] < (0.35 if family == "llama" else 0.5) * size["fp32"]
    shape = shape_of_target(str(families[family]))
    counted = {one: file_bytes(shape, "onnxruntime", one) for one in size}
    assert counted == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_widening_is_done_once_when_the_graph_is_loaded(
    stored: dict[tuple[str, str], Path], tmp_path: Path, precision: str
) -> None:
    folder = stored["llama", precision]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    settings = read_json(folder / "genai_config.json")["model"]["decoder"]["session_options"]
    for name, value in settings.items():  # as onnxruntime-genai does
        if "." in name:
            options.add_session_config_entry(name, value)
    ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph.node
    left = {node.op_type for node in nodes if "MatMul.weight" in node.name}
    assert left <= {"MatMul", "FusedMatMul"}  # int8 widens the rows of a tied embedding as they are looked up
    assert len([node for node in nodes if node.op_type in ("MatMul", "FusedMatMul")]) == 2 * 5 + 1


def test_int8_matrices_have_one_scale_a_block_and_say_how_they_multiply(
    stored: dict[tuple[str, str], Path],
) -> None:
    for family, block in (("llama", 32), ("qwen2", 64), ("qwen3", 32)):  # rows of 160 have blocks of 32
        exact = onnx.load(stored[family, "int8"] / "model.onnx", load_external_data=False).graph
        fast = onnx.load(stored[family, "int8"] / FAST_GRAPH, load_external_data=False).graph
        nodes = [node for node in fast.node if node.op_type == "MatMulNBits"]
        settings = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
        assert len(nodes) == 2 * 5 + 1
        assert {(one["bits"], one["block_size"], one["accuracy_level"]) for one in settings} == {
            (8, block, 4)
        }
        assert not [node for node in exact.node if node.op_type == "MatMulNBits"]
        names = {tensor.name for tensor in fast.initializer if tensor.external_data}
        assert names == {tensor.name for tensor in exact.initializer if tensor.external_data}
        assert ("model.embed_tokens.weight" in names) == (family == "qwen3")


def test_a_weight_beyond_float16_is_refused(families: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(families["llama"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EdgespecError, match=r"up_proj.*70000.*export fp32"):
        export_onnx(folder, tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


def test_the_engine_runs_both_graphs_of_int8(stored: dict[tuple[str, str], Path]) -> None:
    folder = stored["qwen2", "int8"]
    exact, fast = (OnnxRuntimeEngine(folder, threads=1, graph=graph) for graph in (None, folder / FAST_GRAPH))
    difference = np.abs(exact.forward(PROMPTS[0]) - fast.forward(PROMPTS[0])).max()
    exact.close()
    fast.close()
    assert 1e-3 < difference < 0.5
