"""Static graphs: plain operators, fixed lengths, torch's logits on both engines, blocks against single steps, refusals."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgespec_export.npu.to_npu import export_npu
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.static import StaticEngine
from tiny_bundle import disturbed
from tiny_models import make_model_folder, torch_logits

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import RawCounts
from edgespec.planning.costs import file_bytes
from edgespec.recipe.devices import ONNXRUNTIME, OPENVINO, STATIC
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import shape_of_target

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()
LENGTHS = ExportOptions(npu_length=128, npu_prefill=32, npu_gamma=3)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OPERATORS = {
    *("Add", "Concat", "Div", "Gather", "Identity", "MatMul", "Mul", "ReduceMean", "Reshape", "Sigmoid"),
    *("Softmax", "Split", "Sqrt", "Sub", "Transpose"),
}


@pytest.fixture(scope="module")
def static(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The static folder of every family. Read-only."""
    root = tmp_path_factory.mktemp("static")
    for family in FAMILIES:
        export_npu(families[family], root / family, LENGTHS)
    return {family: root / family for family in FAMILIES}


def fed(engine: StaticEngine, tokens: list[int], count: int) -> np.ndarray:
    engine.rewind(0)
    pieces = [np.array(engine.forward(tokens[at : at + count])) for at in range(0, len(tokens), count)]
    return np.concatenate(pieces)


@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_torch_in_every_graph(
    families: dict[str, Path], static: dict[str, Path], family: str, backend: str
) -> None:
    """90 tokens: two full prompt blocks and a padded one; verification blocks, the last padded; single steps."""
    reference = torch_logits(families[family], TOKENS).numpy()
    engine = StaticEngine(static[family], threads=1, backend=backend)
    found = {count: fed(engine, TOKENS, count) for count in (32, 4, 1)}
    engine.close()
    for count, logits in found.items():
        assert np.abs(logits - reference).max() < 1e-4, count
    assert np.abs(found[4] - found[1]).max() < 1e-4
    assert (found[4].argmax(1) == found[1].argmax(1)).all()


def test_openvino_is_there_to_be_tested() -> None:
    """It comes with the test extra; its parity must not be skipped unnoticed."""
    assert "CPU" in import_module("openvino").Core().available_devices


def test_a_graph_has_plain_operators_and_no_free_dimension(static: dict[str, Path]) -> None:
    for family, folder in static.items():
        for name, tokens in (("prefill", 32), ("verify", 4), ("step", 1)):
            model = onnx.load(folder / f"{name}.onnx", load_external_data=False)
            onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
            assert {node.op_type for node in model.graph.node} == OPERATORS, family
            assert {one.domain for one in model.opset_import} == {""}
            inner = {output for node in model.graph.node for output in node.output}
            described = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
            assert inner <= set(described)  # a shape is known for all that is computed
            values = (*model.graph.input, *described.values())
            dims = [dim for value in values for dim in value.type.tensor_type.shape.dim]
            assert all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in dims)
            shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
            assert shapes["input_ids"] == [1, tokens]
            assert shapes["attention_mask"] == [1, 1, tokens, 128 + tokens]
            assert shapes["past.1.key"][2:] == [128, 16 if family == "qwen2" else 32]
            assert shapes["logits"] == [1, tokens, 512]
            assert shapes["new.1.value"][2] == tokens


def test_the_graphs_share_one_data_file(families: dict[str, Path], static: dict[str, Path]) -> None:
    names = {file.name for file in static["llama"].iterdir()}
    assert names == {
        "prefill.onnx", "verify.onnx", "step.onnx", "weights.data", "static.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    places = []
    for name in ("prefill", "verify", "step"):
        graph = onnx.load(static["llama"] / f"{name}.onnx", load_external_data=False).graph
        entries = {
            tensor.name: {entry.key: entry.value for entry in tensor.external_data}
            for tensor in graph.initializer
            if tensor.external_data
        }
        assert {entry["location"] for entry in entries.values()} == {"weights.data"}
        places.append({name: entry["offset"] for name, entry in entries.items()})
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == 2 * 9 + 3 + 2  # of two layers; embedding, last norm, head; RoPE's tables
    # what a plan counts has neither these tables nor the room between tensors
    held = sum(int(entry["length"]) for name, entry in entries.items() if not name.startswith("rope."))
    counted = file_bytes(shape_of_target(str(families["llama"])), STATIC, "fp32")
    assert counted == pytest.approx(held, rel=1e-3)


def test_rollback_leaves_nothing_behind(static: dict[str, Path]) -> None:
    """After rejected tokens the logits are those of an engine that never saw them."""
    engine, clean = (StaticEngine(static["qwen3"], threads=1) for _ in range(2))
    for at in range(0, 40, 32):
        engine.forward(TOKENS[at : min(at + 32, 40)])
        clean.forward(TOKENS[at : min(at + 32, 40)])
    engine.forward([7, 8, 9, 10])
    engine.forward([11])
    engine.rewind(41)
    engine.rewind(40)
    assert np.array_equal(engine.forward(TOKENS[40:44]), clean.forward(TOKENS[40:44]))
    engine.close()
    clean.close()


def test_the_context_can_be_filled_to_its_last_token(families: dict[str, Path], tmp_path: Path) -> None:
    """A padded block at the end would reach beyond the cache and the tables."""
    export_npu(families["llama"], tmp_path / "short", ExportOptions(npu_length=38, npu_prefill=16))
    engine = StaticEngine(tmp_path / "short", threads=1)
    logits = fed(engine, TOKENS[:38], 5)
    assert engine.n_past == engine.context_length == 38
    assert np.abs(logits - torch_logits(families["llama"], TOKENS[:38]).numpy()).max() < 1e-4
    with pytest.raises(InputError, match=r"38 tokens \+ 1 more exceed the context of 38"):
        engine.forward([5])
    engine.close()


@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO])
def test_speculation_is_lossless_through_the_graphs(
    families: dict[str, Path], static: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    """Greedy replies are torch's own, with a drafter that is right sometimes, at draft lengths within the graph's and beyond."""
    import torch
    from transformers import AutoModelForCausalLM

    export_npu(disturbed(families["llama"], tmp_path / "model", 0.07), tmp_path / "drafter", LENGTHS)
    target, draft = (
        CachedEngine(StaticEngine(folder, threads=1, backend=backend))
        for folder in (static["llama"], tmp_path / "drafter")
    )
    prompt = TOKENS[:37]
    model = AutoModelForCausalLM.from_pretrained(families["llama"], dtype=torch.float32)
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=3,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
    )[0, len(prompt) :].tolist()  # fmt: skip
    for gamma in (1, 3, 4):
        counts, reply = RawCounts(), []
        options = DecodingOptions(max_new_tokens=40, draft_length=gamma, temperature=0.0)
        for block in decode(target, draft, prompt, options, (), counts):
            reply += block.tokens
        assert reply == wanted
        assert 0 < sum(counts.accepted) < sum(counts.tested)
    target.engine.close()
    draft.engine.close()


def test_rope_scaling_is_torchs_own(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    folder = make_model_folder(tmp_path / "model", rope_parameters=rope)
    export_npu(folder, tmp_path / "static", LENGTHS)
    engine = StaticEngine(tmp_path / "static", threads=1)
    assert np.abs(fed(engine, TOKENS, 32) - torch_logits(folder, TOKENS).numpy()).max() < 1e-4
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2' model"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        (
            {"model_type": "mistral", "sliding_window": 64},
            "last 64 tokens only.*hold 128; give 64 or less: build-drafter --export.npu-length",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type 'dynamic'",
        ),
        ({"num_hidden_layers": 3}, r"no tensor for layers\.2"),
        ({"num_hidden_layers": 2, "tie_word_embeddings": False}, "no tensor for lm_head"),
    ],
)
def test_what_the_graph_would_compute_wrongly_is_refused(
    families: dict[str, Path], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(families["llama"], tmp_path / "model")
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    with pytest.raises(InputError, match=message):
        export_npu(folder, tmp_path / "out", LENGTHS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 1"),
        ({"length": 129}, "cannot run"),
        ({"length": 2**40}, "'length'"),
        ({"layers": True}, "'layers'"),
        ({"vocab_size": 511}, "cannot run"),
        ({"masked": 0.0}, "'masked'"),
        ({"blocks": {"prefill": 32, "verify": 4}}, "'blocks'"),
        ({"blocks": {"prefill": 32, "verify": 4, "step": 129}}, "'step'"),
        ({"precision": ""}, "'precision'"),
    ],
)
def test_settings_that_lie_are_refused(
    static: dict[str, Path], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(static["llama"], tmp_path / "model")
    write_json(folder / "static.json", read_json(folder / "static.json") | change)
    with pytest.raises(BundleError, match=message):
        StaticEngine(folder, threads=1)


def test_an_engine_is_chosen_by_name(static: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="did you mean 'openvino'"):
        StaticEngine(static["llama"], backend="openvin")
    with pytest.raises(InputError, match=r"no device 'NPU9'.*CPU"):
        StaticEngine(static["llama"], backend=OPENVINO, device="NPU9")
