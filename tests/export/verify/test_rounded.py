"""A target with the weights of one of its files: the file's logits, in torch; and a build that distils against it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.rounded import write_rounded
from edgespec_runtime.pair.bundle import load_engine
from safetensors.numpy import load_file, save_file
from small_build import command, write_data
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.read import resolve

IDS = np.random.default_rng(0).integers(4, 512, 24).tolist()


def in_torch(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("precision", ["int4", "q4_0"])
def test_its_logits_in_torch_are_those_of_the_file(
    families: dict[str, Path], tmp_path: Path, family: str, precision: str
) -> None:
    """The engine differs by its arithmetic alone, the float model by rounding: ten times as much at least."""
    target, rounded = families[family], tmp_path / "rounded"
    write_rounded(target, rounded, precision)
    if precision == "int4":
        export_onnx(target, tmp_path / "file", precision)
        engine = load_engine(ONNXRUNTIME, tmp_path / "file", 64, 1)
    else:
        export_gguf(target, tmp_path / "file.gguf", precision)
        engine = load_engine(LLAMACPP, tmp_path / "file.gguf", 64, 1, True)
    seen, wanted = engine.forward(IDS), in_torch(rounded)
    off, rounding = np.abs(seen - wanted).max(), np.abs(wanted - in_torch(target)).max()
    assert off < rounding / (10 if precision == "int4" else 2)  # llama.cpp rounds activations too
    assert {file.name for file in rounded.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("precision", ["int4", "fp16", "q4_0"])
def test_tensors_that_no_file_has(families: dict[str, Path], tmp_path: Path, precision: str) -> None:
    """Old checkpoints store RoPE's rates, tied ones an output table; ONNX files go without biases that are zero."""
    target = tmp_path / "target"
    shutil.copytree(families["qwen2"], target)
    weights = load_file(target / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    biases = [name for name in weights if name.endswith("layers.1.self_attn.k_proj.bias")]
    surplus = {
        "lm_head.weight": table.copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    for name in biases:
        weights[name][:] = 0
    save_file(weights | surplus, target / "model.safetensors", metadata={"format": "pt"})
    write_rounded(target, tmp_path / "rounded", precision)
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert read_json(target / "config.json")["tie_word_embeddings"]
    assert biases
    assert rounded.keys() == weights.keys()
    for name in biases:
        np.testing.assert_array_equal(rounded[name], 0)


@pytest.mark.training
def test_a_build_distils_against_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stage is there, and the drafter learns something else than without it."""
    make_model_folder(tmp_path / "target")
    write_data(tmp_path)
    losses = {}
    for against in ("int4", ""):
        out = tmp_path / f"build{against}"
        assert main([*command(tmp_path), "--distill.against", against, "--out", str(out)]) == 0
        losses[against] = read_json(out / "distill" / "stage.json")["counts"]["loss_last"]
        assert (out / "rounded-target" / "model" / "model.safetensors").exists() == bool(against)
    assert losses["int4"] != losses[""]


def test_a_target_that_is_not_in_torch_is_refused() -> None:
    with pytest.raises(InputError, match=r"distill\.against is 'int4' and inference.source is 'server'"):
        resolve(
            {
                "target": "x",
                "inference": {"source": "server", "url": "http://127.0.0.1:1"},
                "distill": {"against": "int4"},
            },
            {},
        )
    with pytest.raises(InputError, match="int5"):
        resolve({"target": "x", "distill": {"against": "int5"}}, {})
