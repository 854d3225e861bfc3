"""Every family's exported files pass verification: weights read back, engine against torch, blocks against single steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.pair import Reference
from family_cases import CASES
from tiny_models import make_model_folder

from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape

PROMPTS = [np.random.default_rng(seed).integers(4, 512, 40).tolist() for seed in range(2)]
BLOCKS_OF_32 = {"intermediate": 192}  # no matrix stays F16
FILES = [
    ("onnxruntime", "fp32"),
    ("onnxruntime", "int8"),
    ("onnxruntime", "int4"),
    ("llama.cpp", "f16"),
    ("llama.cpp", "q8_0"),
]


@pytest.mark.parametrize(
    "case",
    ["gemma2", "gemma3", "gemma3 untied", "phi3", "phi3 tied", "phi3 longrope", "smollm3", "qwen2 yarn"],
)
@pytest.mark.llamacpp
def test_exported_files_pass(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = make_model_folder(tmp_path / "model", family, seed=1, **(BLOCKS_OF_32 | settings))
    reference = Reference(model, PROMPTS)
    for engine, precision in FILES:
        out = tmp_path / (f"{precision}.gguf" if engine == "llama.cpp" else precision)
        (export_gguf if engine == "llama.cpp" else export_onnx)(model, out, precision)
        check = reference.check(ExportedFile("target", engine, precision, out))
        assert check.checked_with == engine
        assert check.broken == [], (engine, precision)
        border = 256 if case == "phi3 longrope" else None
        assert (check.rope_border, check.positions) == (border, 80 if border is None else 88)


def test_a_norm_without_its_one_is_caught(tmp_path: Path) -> None:
    """Gemma's norms are stored around 0 in torch and around 1 in both formats."""
    model = make_model_folder(tmp_path / "model", "gemma2", **CASES["gemma2"][1])
    reference = Reference(model, PROMPTS)
    export_onnx(model, tmp_path / "onnx", "fp32")
    settings = tmp_path / "onnx" / "genai_config.json"
    write_json(settings, read_json(settings) | {"model": read_json(settings)["model"] | {"type": "llama"}})
    check = reference.check(ExportedFile("target", "onnxruntime", "fp32", tmp_path / "onnx"))
    assert any("weights difference" in text and "norm" in text for text in check.broken)


def test_shapes_of_configs_that_leave_things_out() -> None:
    """What transformers fills in by the family's defaults."""
    bare = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }

    def shape(model_type: str, **more: object) -> ModelShape:
        return ModelShape.from_config({**bare, "model_type": model_type, **more})

    assert shape("llama").tied is False
    assert [shape(name).tied for name in ("gemma2", "gemma3_text", "smollm3")] == [True] * 3
    assert shape("gemma2", tie_word_embeddings=False).tied is False
    assert [shape(name).head_dim for name in ("llama", "gemma3_text", "qwen3")] == [16, 256, 128]
    assert [shape(name).rope_theta for name in ("llama", "gemma3_text", "smollm3")] == [1e4, 1e6, 2e6]
    both = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    assert shape("gemma3_text", rope_parameters=both).rope_theta == 5e5
    assert (
        shape("llama", rope_theta=1e4, rope_parameters={"rope_theta": 2e4}).rope_theta == 2e4
    )  # as transformers 5
    assert shape("llama", rope_theta=3e4).rope_theta == 3e4
    old = {"type": "linear", "factor": 2.0, "rope_theta": 4e4}
    assert shape("llama", rope_theta=3e4, rope_scaling=old).rope_theta == 4e4
