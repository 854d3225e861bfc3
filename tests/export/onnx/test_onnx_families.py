"""Every family of the ONNX table in ONNX Runtime against torch, fp32: RoPE scalings, windows, soft caps, Gemma's embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.onnx import families as onnx_families
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from family_cases import CASES, SLIDING
from tiny_models import make_model_folder, torch_logits

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.families import having
from edgespec.core.files import read_json, write_json

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()
BOUND = 1e-4  # largest difference of a logit; measured 2e-6 to 1e-5, logits have a standard deviation of 1


def made(case: str, folder: Path) -> Path:
    family, settings = CASES[case]
    return make_model_folder(folder, family, seed=len(case), **settings)


def difference(model: Path, onnx_folder: Path, tokens: list[int]) -> float:
    """Largest difference of a logit between ONNX Runtime, fed in two blocks, and torch."""
    engine = OnnxRuntimeEngine(onnx_folder, threads=1)
    logits = [np.array(engine.forward(tokens[at : at + 60])) for at in range(0, len(tokens), 60)]
    engine.close()
    return float(np.abs(np.concatenate(logits) - torch_logits(model, tokens).numpy()).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_torch(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "model")
    export_onnx(model, tmp_path / "onnx", "fp32")
    assert difference(model, tmp_path / "onnx", TOKENS) < BOUND


def test_every_family_of_the_table_is_tried() -> None:
    assert {family for family, _ in CASES.values()} == set(having("onnx_tables"))


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "phi3"])
def test_int4_keeps_its_blocks_exact(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "model")
    size = export_onnx(model, tmp_path / "onnx", "int4")["bytes"]
    file = ExportedFile("target", "onnxruntime", "int4", tmp_path / "onnx")
    assert size / 4 < streamed_bytes(file) < size
    engine = OnnxRuntimeEngine(tmp_path / "onnx", threads=1)

    def fed(step: int) -> np.ndarray:
        engine.rewind(0)
        return np.concatenate([np.array(engine.forward(TOKENS[at : at + step])) for at in range(0, 60, step)])

    single = fed(1)
    assert np.abs(fed(4) - single).max() < BOUND
    correlation = np.corrcoef(single.ravel(), torch_logits(model, TOKENS[:60]).numpy().ravel())[0, 1]
    assert correlation > 0.7  # random weights in 4 bits
    engine.close()


@pytest.mark.parametrize(
    "told", [{"no_rope_layers": None, "no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 0]}]
)
def test_a_config_may_say_otherwise_which_layers_have_no_rope(told: dict[str, Any], tmp_path: Path) -> None:
    """By their period, or of more layers than there are."""
    model = make_model_folder(tmp_path / "model", "smollm3", layers=3, head_dim=16, no_rope_layers=[1, 0, 1])
    write_json(model / "config.json", read_json(model / "config.json") | told)
    export_onnx(model, tmp_path / "onnx", "fp32")
    assert difference(model, tmp_path / "onnx", TOKENS) < BOUND


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
def test_a_mistral_model_may_list_the_kinds_of_its_layers(kind: str, tmp_path: Path) -> None:
    """transformers takes it for another family, whose name a model has that was tuned."""
    kinds = ["full_attention", "sliding_attention"]
    model = make_model_folder(tmp_path / "model", "ministral", tied=False, layer_types=kinds, **SLIDING)
    config = read_json(model / "config.json")
    write_json(model / "config.json", config | {"model_type": kind, "architectures": ["MistralForCausalLM"]})
    export_onnx(model, tmp_path / "onnx", "fp32")
    assert difference(model, tmp_path / "onnx", TOKENS) < BOUND


@pytest.mark.parametrize("named", [None, ["LlamaModel"]])
def test_a_config_need_not_name_its_class(tmp_path: Path, named: list[str] | None) -> None:
    """torch goes by the model_type."""
    model = made("qwen3", tmp_path / "model")
    write_json(model / "config.json", read_json(model / "config.json") | {"architectures": named})
    export_onnx(model, tmp_path / "onnx", "fp32")
    assert difference(model, tmp_path / "onnx", TOKENS) < BOUND


@pytest.mark.parametrize("case", ["llama linear", "gemma3 untied", "gemma2 odd", "mistral window"])
def test_what_the_builder_alone_gets_wrong(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `finish` (and, for Mistral, the layers' kinds) the graph is not the model's."""
    model = made(case, tmp_path / "model")
    if case == "mistral window":
        prepare = onnx_families.prepare

        def forgetful(config: Any) -> None:
            prepare(config)
            config.layer_types = ["full_attention"] * config.num_hidden_layers

        monkeypatch.setattr("edgespec_export.onnx.to_onnx.prepare", forgetful)
    else:
        monkeypatch.setattr("edgespec_export.onnx.to_onnx.finish", lambda *_: None)
    export_onnx(model, tmp_path / "onnx", "fp32")
    assert difference(model, tmp_path / "onnx", TOKENS) > (2e-4 if case == "gemma2 odd" else 0.1)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", {"model_type": "gemma3"}, "'gemma3' model; ONNX export knows llama"),
        ("llama", {"model_type": "granite"}, "'granite' model; ONNX export knows llama"),
        ("phi3", {"partial_rotary_factor": 0.5}, "rotates 8 of 16 values of a head"),
    ],
)
def test_what_is_refused(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "model")
    config = read_json(model / "config.json") | change
    if "partial_rotary_factor" in change:
        config["rope_parameters"] = config["rope_parameters"] | change
    write_json(model / "config.json", config)
    with pytest.raises(InputError, match=message):
        export_onnx(model, tmp_path / "onnx", "fp32")
    assert not (tmp_path / "onnx").exists()


def test_a_graph_of_another_builder_is_refused(tmp_path: Path) -> None:
    model = made("gemma2", tmp_path / "model")
    export_onnx(model, tmp_path / "onnx", "fp32")
    path, config = tmp_path / "onnx" / "model.onnx", read_json(model / "config.json")
    graph = onnx.load(path, load_external_data=False)
    embedded = next(node for node in graph.graph.node if node.name == "/model/embed_tokens/Mul")
    embedded.name = "/another/Mul"
    onnx.save(graph, path)
    with pytest.raises(EdgespecError, match="does not scale its embeddings"):
        onnx_families.finish(tmp_path / "onnx", model, config)
    write_json(model / "config.json", config | {"max_position_embeddings": 128})
    with pytest.raises(EdgespecError, match=r"cos_cache is \[256, 16\]; torch's table is \[128, 16\]"):
        onnx_families.finish(tmp_path / "onnx", model, config)
    table = next(tensor for tensor in graph.graph.initializer if tensor.name == "cos_cache")
    table.name = "cosines"
    onnx.save(graph, path)
    with pytest.raises(EdgespecError, match="has no cos_cache"):
        onnx_families.finish(tmp_path / "onnx", model, config)
