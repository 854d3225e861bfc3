"""Integer activations: near the float graphs, one function in all three, ranges from the text that was read, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime
import pytest
from edgespec_export.bits.texts import written_rows
from edgespec_export.npu import qdq
from edgespec_export.npu.qdq import BITS, FLOOR, Calibration, calibrate, export_qdq
from edgespec_export.npu.to_npu import export_npu, export_static
from edgespec_export.verify.readback import static_weights
from edgespec_runtime.engines.static import StaticEngine, read_static_settings

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_jsonl
from edgespec.planning.devices_fit import STATIC_GRAPHS
from edgespec.recipe.devices import ONNXRUNTIME, OPENVINO
from edgespec.recipe.schema import ExportOptions

LENGTHS = ExportOptions(npu_length=128, npu_prefill=32, npu_gamma=3)
TOKENS = np.random.default_rng(99).integers(4, 512, 90).tolist()
ROWS = [np.random.default_rng(seed).integers(4, 512, 100).tolist() for seed in range(6)]
KINDS = {"qdq8": onnx.TensorProto.UINT8, "qdq16": onnx.TensorProto.UINT16}


@pytest.fixture(scope="module")
def floats(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Static float folders of a tied and of an untied model. Read-only."""
    root = tmp_path_factory.mktemp("floats")
    for family in ("qwen2", "qwen3"):
        export_npu(families[family], root / family, LENGTHS)
    return {family: root / family for family in ("qwen2", "qwen3")}


@pytest.fixture(scope="module")
def calibration(floats: dict[str, Path]) -> dict[str, Calibration]:
    return {family: calibrate(folder, ROWS) for family, folder in floats.items()}


@pytest.fixture(scope="module")
def quantised(
    floats: dict[str, Path], calibration: dict[str, Calibration], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Both models at both precisions. Read-only."""
    root = tmp_path_factory.mktemp("quantised")
    found = {}
    for family, folder in floats.items():
        for precision in BITS:
            found[family, precision] = root / f"{family}-{precision}"
            export_qdq(folder, found[family, precision], precision, calibration[family])
    return found


def test_copies_of_graphs_lie_beside_what_is_written(
    floats: dict[str, Path],
    calibration: dict[str, Calibration],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/tmp may be small; and of three graphs one copy at a time."""
    seen: list[Path] = []
    copied = qdq._quantised

    def watched(path: Path, scratch: Path, *rest: Any) -> Any:
        seen.append(scratch)
        assert list(scratch.iterdir()) == []
        return copied(path, scratch, *rest)

    monkeypatch.setattr(qdq, "_quantised", watched)
    export_qdq(floats["qwen2"], tmp_path / "out", "qdq8", calibration["qwen2"])
    assert [place.parent for place in seen] == [tmp_path] * 3
    assert [place.name for place in tmp_path.iterdir()] == ["out"]


def fed(folder: Path, count: int, backend: str = ONNXRUNTIME) -> np.ndarray:
    engine = StaticEngine(folder, threads=1, backend=backend)
    pieces = [np.array(engine.forward(TOKENS[at : at + count])) for at in range(0, len(TOKENS), count)]
    engine.close()
    return np.concatenate(pieces)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.square(a - b).mean() / np.square(b).mean()))


@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_are_near_the_float_graphs_and_nearer_with_16_bits(
    floats: dict[str, Path], quantised: dict[tuple[str, str], Path], family: str, backend: str
) -> None:
    reference = fed(floats[family], 4)
    eight, sixteen = (
        relative(fed(quantised[family, one], 4, backend), reference) for one in ("qdq8", "qdq16")
    )
    # of random weights; measured 0.02 to 0.034, of which the int8 weights are the most
    assert 1e-3 < sixteen < 0.06
    assert sixteen < eight < 0.15


@pytest.mark.parametrize("precision", list(BITS))
def test_a_token_has_the_same_logits_in_every_graph(
    quantised: dict[tuple[str, str], Path], precision: str
) -> None:
    """The ranges are fixed and shared: what a block computes does not depend on the tokens beside it, but for rounding."""
    found = {count: fed(quantised["qwen3", precision], count) for count in (32, 4, 1)}
    for count in (32, 4):
        assert relative(found[count], found[1]) < 1e-2
        assert (found[count].argmax(1) == found[1].argmax(1)).mean() > 0.97
    folder = quantised["qwen3", precision]
    engine = StaticEngine(folder, threads=1)  # a token that will be rejected moves nothing before it
    both = []
    for last in (5, 400):
        engine.rewind(0)
        both.append(np.array(engine.forward([*TOKENS[:3], last]))[:3])
    engine.close()
    assert np.array_equal(both[0], both[1])


@pytest.mark.parametrize("precision", list(BITS))
def test_matrices_are_int8_by_column_and_activations_unsigned(
    quantised: dict[tuple[str, str], Path], floats: dict[str, Path], precision: str
) -> None:
    folder = quantised["qwen3", precision]
    scales = []
    for name in ("prefill", "verify", "step"):
        onnx.checker.check_model(str(folder / f"{name}.onnx"))
        graph = onnx.load(folder / f"{name}.onnx").graph
        assert {node.domain for node in graph.node} == {""}
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        producer = {node.output[0]: node for node in graph.node}
        products = [node for node in graph.node if node.op_type == "MatMul"]
        assert len(products) == 2 * (7 + 2) + 1
        for node in products:
            kinds = [producer[value].op_type for value in node.input]
            assert kinds == ["DequantizeLinear"] * 2, node.name
            weight = tensors.get(producer[node.input[1]].input[0])
            if weight is not None:
                assert weight.data_type == onnx.TensorProto.INT8
                scale = tensors[producer[node.input[1]].input[1]]
                assert list(scale.dims) == [weight.dims[1]]
        rounded = [node for node in graph.node if node.op_type == "QuantizeLinear"]
        kinds = [tensors[node.input[2]].data_type for node in rounded]
        assert set(kinds) == {KINDS[precision], onnx.TensorProto.UINT16}  # the logits have 16 bits in both
        numbers = {name: onnx.numpy_helper.to_array(t).tolist() for name, t in tensors.items() if not t.dims}
        scales.append({name: value for name, value in numbers.items() if name.endswith("_scale")})
    assert scales[0] == scales[1] == scales[2]
    weights, floating = ((one / "weights.data").stat().st_size for one in (folder, floats["qwen3"]))
    assert weights < 0.5 * floating  # the embedding stays in floats


def test_weights_read_back_are_the_models(
    families: dict[str, Path], floats: dict[str, Path], quantised: dict[tuple[str, str], Path]
) -> None:
    from safetensors.numpy import load_file

    for family, tied in (("qwen2", True), ("qwen3", False)):
        model = load_file(families[family] / "model.safetensors")
        wanted = set(model) | ({"lm_head.weight"} if tied else set())
        for folder, bound in ((floats[family], 0.0), (quantised[family, "qdq8"], 0.02)):
            found = dict(static_weights(folder))
            assert set(found) == wanted
            for name, value in found.items():
                own = model["model.embed_tokens.weight" if tied and name == "lm_head.weight" else name]
                assert relative(value, own) <= bound, name


def test_ranges_hold_what_was_read_and_no_masked_score(calibration: dict[str, Calibration]) -> None:
    seen = calibration["qwen3"]
    # two prompt blocks of 32 and seven turns of 4 + 1; the last token fills none
    assert (seen.rows, seen.tokens) == (6, 6 * 99)
    for layer in range(2):
        low, high = seen.ranges[f"layers.{layer}.self_attn.scores.masked"]
        assert -FLOOR - 100 < low < -FLOOR
        assert high < 100
        for kind, joined in (("key", "keys"), ("value", "values")):
            names = (f"past.{layer}.{kind}", f"new.{layer}.{kind}", f"layers.{layer}.self_attn.{joined}")
            assert len({seen.ranges[name] for name in names}) == 1
    assert seen.ranges["attention_mask"] == (-1e4, 0.0)
    assert all(math.isfinite(bound) for pair in seen.ranges.values() for bound in pair)


def test_ranges_hold_those_of_every_text(
    floats: dict[str, Path], calibration: dict[str, Calibration]
) -> None:
    """Of the first one that was read and of the last, each as it is alone."""
    whole = calibration["qwen2"].ranges
    for row in (ROWS[0], ROWS[-1]):
        alone = calibrate(floats["qwen2"], [row]).ranges
        assert alone.keys() == whole.keys()
        for name, (low, high) in alone.items():
            assert whole[name][0] <= low + 1e-4, name
            assert high - 1e-4 <= whole[name][1], name


def test_no_graphs_but_the_watched_ones_are_in_memory(
    floats: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the plan counts."""
    live, most = WeakSet[Any](), 0

    class Counted(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *given: Any, **how: Any) -> None:
            nonlocal most
            super().__init__(*given, **how)
            live.add(self)
            most = max(most, len(live))

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    calibrate(floats["qwen2"], ROWS[:1])
    assert most == STATIC_GRAPHS


def test_rounded_weights_are_beside_their_graph(
    floats: dict[str, Path], calibration: dict[str, Calibration], tmp_path: Path
) -> None:
    """A graph's own file holds 2 GiB at most."""
    whole = qdq._quantised(floats["qwen3"] / "step.onnx", tmp_path, "qdq8", calibration["qwen3"].ranges)
    beside = onnx.load(tmp_path / "step.onnx", load_external_data=False).graph.initializer
    assert max(len(tensor.raw_data) for tensor in beside) < 1024
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in whole.graph.initializer}
    assert held["embed_tokens"].shape == (512, 64)


def test_short_rows_are_read_as_one_and_too_little_text_is_refused(floats: dict[str, Path]) -> None:
    short = [TOKENS[at : at + 10] for at in range(0, 80, 10)]
    seen = calibrate(floats["qwen2"], short)
    assert (seen.rows, seen.tokens) == (2, 2 * 37)
    with pytest.raises(
        InputError, match=r"shorter than the 37 tokens.* or to a build a shorter --export.npu-prefill"
    ):
        calibrate(floats["qwen2"], short[:3])


def test_export_static_goes_the_whole_way(families: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / ".qdq8.float.x1").mkdir()  # of a run that was killed
    made = export_static(families["qwen3"], tmp_path / "qdq8", "qdq8", LENGTHS, lambda: ROWS[:2])
    assert made["notes"] == ["calibrated on 198 tokens of 2 rows"]
    assert made["bytes"] == sum(file.stat().st_size for file in (tmp_path / "qdq8").iterdir())
    assert read_static_settings(tmp_path / "qdq8").precision == "qdq8"
    assert read_json(tmp_path / "qdq8" / "calibration.json")["tokens"] == 198
    assert [file.name for file in tmp_path.iterdir()] == ["qdq8"]  # nothing is left of the float graphs
    with pytest.raises(InputError, match="qdq16 needs text"):
        export_static(families["qwen3"], tmp_path / "none", "qdq16", LENGTHS, None)
    with pytest.raises(InputError, match="did you mean 'qdq8'"):
        export_qdq(tmp_path / "qdq8", tmp_path / "none", "qdq", Calibration(0, 0, {}))


def test_rows_of_a_build_are_spread_over_its_shards(tmp_path: Path) -> None:
    for shard in range(2):
        rows = [{"prompt_ids": [shard, row], "response_ids": [9]} for row in range(10)]
        write_jsonl(tmp_path / f"shard-0000{shard}.jsonl", rows)
    assert written_rows(tmp_path, 4) == [[0, 0, 9], [0, 5, 9], [1, 0, 9], [1, 5, 9]]
    assert written_rows(tmp_path / "absent") == []
