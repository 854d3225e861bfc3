"""The fast int8 graph: a block's logits are those of single steps to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.one_more_row import attend_one_more_row
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_runtime.engines.onnx_runtime import ROPE_BORDER, SPARE_TOKENS, OnnxRuntimeEngine
from edgespec_runtime.untrusted.genai_settings import read_settings
from onnx import TensorProto, helper, numpy_helper

from edgespec.core.errors import BundleError, EdgespecError, InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # tied, untied, biases, head norms
IDS = np.random.default_rng(0).integers(4, 512, 40).tolist()


@pytest.fixture(scope="module")
def folders(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rows")
    for family in FAMILIES:
        export_onnx(families[family], root / family, "int8")
    return {family: root / family for family in FAMILIES}


def engine(folder: Path, context: int | None = 64) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(folder, context, 1, folder / FAST_GRAPH)


def fed(model: OnnxRuntimeEngine, sizes: list[int]) -> np.ndarray:
    """Logits [n, V] of IDS in passes of these sizes."""
    model.rewind(0)
    found, place = [], 0
    for size in sizes:
        found.append(model.forward(IDS[place : place + size]).copy())
        place += size
    return np.concatenate(found)


def products_are_alike(block: int) -> bool:
    """Whether this processor multiplies a row of int8 alone as it does among others, in blocks of so many weights."""
    rng = np.random.default_rng(0)
    rows, columns = 96, 64
    weights = rng.integers(0, 256, (rows, columns // block, block), dtype=np.uint8)
    scales = rng.random(rows * columns // block, dtype=np.float32)
    settings = {"K": columns, "N": rows, "bits": 8, "block_size": block, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **settings)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, rows])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = rng.standard_normal((5, columns), dtype=np.float32)
    single = np.concatenate([session.run(None, {"x": row[None]})[0] for row in x])
    return bool((session.run(None, {"x": x})[0] == single).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_has_the_bits_of_single_steps(folders: dict[str, Path], family: str) -> None:
    if not products_are_alike(64 if family == "qwen2" else 32):
        pytest.skip("on this processor the bits of an int8 product depend on how many rows there are")
    model = engine(folders[family])
    single = fed(model, [1] * len(IDS))
    for sizes in ([2] * 20, [5] * 8, [40], [17, 1, 2, 8, 12], [3] * 13 + [1]):
        np.testing.assert_array_equal(fed(model, sizes), single)


@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_sees_the_row(
    families: dict[str, Path],
    folders: dict[str, Path],
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits are those of the same graph without it, but for floats added in another order before they are rounded to int8."""
    monkeypatch.setattr(to_onnx, "attend_one_more_row", lambda graph: False)
    export_onnx(families[family], tmp_path / "plain", "int8")
    without, model = engine(tmp_path / "plain"), engine(folders[family])
    assert without.context_length == model.context_length == 64
    for sizes in ([1] * len(IDS), [17, 1, 2, 8, 12]):
        wanted = fed(without, sizes)
        fed(model, [40])  # keys of another length lie in the cache, where the row's are written
        assert np.abs(fed(model, sizes) - wanted).max() < 0.02 * np.abs(wanted).max()


def test_a_text_is_one_token_shorter_than_the_model_and_its_last_place_works(
    folders: dict[str, Path],
) -> None:
    whole = OnnxRuntimeEngine(folders["llama"], None, 1)
    model = engine(folders["llama"], None)
    assert model.context_length == whole.context_length - 1
    text = np.random.default_rng(1).integers(4, 512, model.context_length).tolist()
    for place in range(0, len(text), model.block_length):
        logits = model.forward(text[place : place + model.block_length])
    assert np.isfinite(logits).all()
    with pytest.raises(InputError, match="exceed the context"):
        model.forward([5])


@pytest.mark.parametrize("grows", [True, False], ids=["a cache that grows", "a cache as long as the text"])
def test_another_engine_need_not_know_of_the_row(folders: dict[str, Path], grows: bool) -> None:
    """Its cache has no place behind the text: always, or in the last step. There the graph reads the text's rows alone."""
    folder, length = folders["llama"], len(IDS)
    session = ort.InferenceSession(str(folder / FAST_GRAPH), providers=["CPUExecutionProvider"])
    settings = read_settings(folder)
    cache = np.zeros((1, settings.kv_heads, 0 if grows else length, settings.head_size), np.float32)
    names = [value.name for value in session.get_inputs() if value.name.startswith("past_key_values.")]
    fed_in = dict.fromkeys(names, cache)
    found = []
    for place, token in enumerate(IDS):
        tokens = {"input_ids": [[token]], "attention_mask": [[1] * (place + 1)]}
        given = {name: np.array(value, np.int64) for name, value in tokens.items()}
        logits, *after = session.run(None, given | fed_in)
        fed_in = dict(zip(names, after, strict=True))
        assert {each.shape[2] for each in after} == {place + 1 if grows else length}
        found.append(logits[0, 0])
    wanted = fed(engine(folder), [1] * length)
    assert np.abs(np.array(found) - wanted).max() < 0.02 * np.abs(wanted).max()
    if not grows:  # only the last step goes without the row
        np.testing.assert_array_equal(found[:-1], wanted[:-1])


@pytest.mark.parametrize("told", ["-1", "one", "64", "9" * 9])
def test_a_graph_that_wants_too_many_spare_tokens_is_refused(
    folders: dict[str, Path], tmp_path: Path, told: str
) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(folders["llama"], folder)
    graph = onnx.load(folder / FAST_GRAPH, load_external_data=False)
    next(entry for entry in graph.metadata_props if entry.key == SPARE_TOKENS).value = told
    onnx.save(graph, folder / FAST_GRAPH)
    with pytest.raises(BundleError, match="spare_tokens"):
        engine(folder)


@pytest.mark.parametrize("reason", ["two sets of RoPE factors", "a bias"])
def test_graphs_in_which_the_row_has_no_place_stay_as_they_are(
    folders: dict[str, Path], tmp_path: Path, reason: str
) -> None:
    model = onnx.load(folders["llama"] / "model.onnx", load_external_data=False)
    if reason == "a bias":
        for node in (node for node in model.graph.node if node.op_type == "GroupQueryAttention"):
            node.input[:] = [*(*node.input, *[""] * 10)[:10], "attention_mask"]
    else:
        model.metadata_props.add(key=ROPE_BORDER, value="32")
    file = tmp_path / "model.onnx"
    onnx.save(model, file)
    before = file.read_bytes()
    assert attend_one_more_row(file) is False
    assert file.read_bytes() == before
    del model.graph.node[:]
    onnx.save(model, file)
    with pytest.raises(EdgespecError, match="has no GroupQueryAttention"):
        attend_one_more_row(file)
