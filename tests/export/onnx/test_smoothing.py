"""Inputs without outliers: the model stays the same, its int8 file errs less, and its weights come back."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.joined_states import export_for_head
from edgespec_export.onnx.smoothing import FACTORS, read_factors, smooth
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_export.verify.readback import onnx_weights
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from family_cases import CASES
from safetensors.numpy import save_file
from tiny_models import make_model_folder, torch_logits
from transformers import AutoModelForCausalLM

from edgespec.core.errors import EdgespecError
from edgespec.core.families import family_named
from edgespec.core.files import write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import HEAD_FILE, JOINING, WEIGHTS

TOKENS = np.random.default_rng(0).integers(4, 512, 60).tolist()
LARGE = 40.0  # times the other channels
CHANNELS = slice(3, 6)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of rows of 64 whose norms give a few channels large values, which the matrices take back."""
    folder = make_model_folder(tmp_path_factory.mktemp("outliers"), intermediate=192)
    model = loaded(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[CHANNELS] *= LARGE
                for reader in readers:
                    reader.weight[:, CHANNELS] /= LARGE
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_model_stays_the_same(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    model = loaded(make_model_folder(tmp_path, name, **settings))
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        before = model(ids).logits
    found = smooth(model, family_named(name))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, before, atol=2e-4, rtol=0)
    assert len(found) == 2 * model.config.num_hidden_layers
    assert all(np.ptp(factors) > 0.1 for factors in found.values())


def test_large_channels_are_divided_by_more(with_outliers: Path) -> None:
    """Inputs 40 times as large and weights a 40th: the factor of both is 40."""
    for factors in smooth(loaded(with_outliers), family_named("llama")).values():
        others = np.delete(factors, np.arange(64)[CHANNELS])
        assert LARGE / 2 < np.median(factors[CHANNELS]) / np.median(others) < LARGE * 2


def test_an_int8_file_errs_less(with_outliers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = torch_logits(with_outliers, TOKENS).numpy()

    def error(name: str) -> float:
        export_onnx(with_outliers, tmp_path / name, "int8")
        engine = OnnxRuntimeEngine(tmp_path / name, threads=1, graph=tmp_path / name / FAST_GRAPH)
        seen = np.array(engine.forward(TOKENS))
        engine.close()
        return float(np.sqrt(np.square(seen - wanted).mean()))

    with_factors = error("smoothed")
    assert (tmp_path / "smoothed" / FACTORS).is_file()
    monkeypatch.setattr(to_onnx, "smoothed", lambda family, kept: contextlib.nullcontext())
    assert with_factors < 0.4 * error("as it is")
    assert not (tmp_path / "as it is" / FACTORS).exists()


def test_a_head_gets_the_states_as_they_are(with_outliers: Path, tmp_path: Path) -> None:
    """Of a smoothed target whose head reads three layers: the states of two of them stand behind smoothed norms."""
    head, early = tmp_path / "head", (0, 1)
    head.mkdir()
    matrix = np.random.default_rng(0).normal(size=(64, 3 * 64)).astype(np.float32)
    write_json(head / HEAD_FILE, {"shape": {"target_layers": list(early)}})
    save_file({JOINING: matrix}, head / WEIGHTS)
    (tmp_path / ".onnx.alone.x1").mkdir()  # of a run that was killed
    made = export_for_head(head, tmp_path / "onnx", partial(export_onnx, with_outliers, precision="int8"))
    assert made["bytes"] == sum(file.stat().st_size for file in (tmp_path / "onnx").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "onnx"]
    engine = OnnxRuntimeEngine(tmp_path / "onnx", threads=1)
    engine.forward(TOKENS)
    assert engine.features is not None
    seen = engine.features.copy()
    engine.close()
    model = loaded(with_outliers)
    with torch.inference_mode():
        given = model.model(torch.tensor([TOKENS]), output_hidden_states=True)
        states = [model.model.layers[layer].input_layernorm(given.hidden_states[layer]) for layer in early]
        wanted = torch.cat([*states, given.last_hidden_state], -1)[0].numpy() @ matrix.T
    assert np.linalg.norm(seen - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "phi3", "qwen2"])
def test_the_weights_come_back(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    model = make_model_folder(tmp_path / "model", name, **settings)
    export_onnx(model, tmp_path / "onnx", "int8")
    shape = ModelShape.from_config(read_config(model))
    stored = {key: value.numpy() for key, value in loaded(model).state_dict().items()}
    back = dict(onnx_weights(tmp_path / "onnx", shape))
    assert len(back) > 6 * shape.layers
    for key, value in back.items():
        error = np.linalg.norm(value - stored[key]) / np.linalg.norm(stored[key])
        assert error < (0.01 if value.ndim == 2 else 1e-5), key


def test_factors_that_no_exporter_wrote_are_refused(tmp_path: Path) -> None:
    assert read_factors(tmp_path, 4) == {}
    for factors in (np.ones(3), np.zeros(4), np.full(4, np.nan)):
        save_file({"norm": factors.astype(np.float32)}, tmp_path / FACTORS)
        with pytest.raises(EdgespecError, match=r"of norm; 4 numbers above 0 are wanted"):
            read_factors(tmp_path, 4)
    (tmp_path / FACTORS).write_bytes(b"no such thing")
    with pytest.raises(EdgespecError, match="cannot be read"):
        read_factors(tmp_path, 4)
