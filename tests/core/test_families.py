"""The records of model families: which formats know which, and what a config.json means where it is silent."""

from __future__ import annotations

from dataclasses import replace
from runpy import run_path

import pytest
from edgespec_runtime.untrusted import gguf_config

from edgespec.core.errors import InputError
from edgespec.core.families import FAMILIES, family_for, family_named, having, with_architecture
from edgespec.core.shapes import ModelShape

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 100,
}


def test_which_format_knows_which_family() -> None:
    exported = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "phi3"}
    assert set(having("gguf")) == set(having("onnx_tables")) == exported
    assert having("npu") == having("alike_layers") == ["llama", "mistral", "qwen2", "qwen3"]
    assert having("subcloning") == ["llama", "mistral"]
    assert having("read_as_target") == ["llama", "qwen2", "qwen3", "smollm3"]
    assert with_architecture("llama") is FAMILIES["llama"]
    assert family_named("ministral") is FAMILIES["mistral"]


def test_a_second_family_of_an_architecture_takes_no_files_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "my_model", replace(FAMILIES["qwen3"], model_type="my_model"))
    assert run_path(str(gguf_config.__file__))["READABLE"]["qwen3"] is FAMILIES["qwen3"]


@pytest.mark.parametrize("kind", ["gemma", "gemma3", "mamba", ""])
def test_an_unknown_family_is_refused_with_its_name(kind: str) -> None:
    with pytest.raises(InputError, match=f"model is a '{kind}' model; GGUF export knows llama, mistral"):
        family_for("gguf", "GGUF export", {"model_type": kind}, "model")


def test_a_model_that_reads_pictures_too_is_refused_with_its_way_out() -> None:
    config = {"model_type": "gemma3", "text_config": SIZES}
    with pytest.raises(InputError, match=r"\(gemma3\) has no 'hidden_size'; .*\(such as Gemma3ForCausalLM\)"):
        ModelShape.from_config(config)
    with pytest.raises(InputError, match="has no 'hidden_size'; a Llama-style decoder config is needed"):
        ModelShape.from_config({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("kind", "head_dim", "theta", "tied", "bias", "head_norms"),
    [
        ("llama", 128, 1e4, False, True, False),  # bias as config.json says
        ("mistral", 128, 1e4, False, False, False),
        ("qwen2", 128, 1e4, False, True, False),
        ("qwen3", 128, 1e4, False, True, True),
        ("smollm3", 128, 2e6, True, True, False),
        ("gemma3_text", 256, 1e6, True, True, False),
        ("phi3", 128, 1e4, False, False, False),
        ("another", 128, 1e4, False, True, False),
    ],
)
def test_what_a_config_leaves_out(
    kind: str, head_dim: int, theta: float, tied: bool, bias: bool, head_norms: bool
) -> None:
    shape = ModelShape.from_config({"model_type": kind, "attention_bias": True, **SIZES})
    found = (shape.head_dim, shape.rope_theta, shape.tied, shape.attention_bias, shape.head_norms)
    assert found == (head_dim, theta, tied, bias, head_norms)


@pytest.mark.parametrize(
    ("kind", "epsilon"), [("llama", 1e-6), ("qwen3", 1e-6), ("gemma2", 1e-6), ("phi3", 1e-5)]
)
def test_norms_divide_by_what_torch_divides_by(kind: str, epsilon: float) -> None:
    """Files hold the number, and transformers has another one for Phi-3 than for the rest."""
    assert ModelShape.from_config({"model_type": kind, **SIZES}).rms_norm_eps == epsilon
    assert ModelShape.from_config({"model_type": kind, "rms_norm_eps": 1e-3, **SIZES}).rms_norm_eps == 1e-3
