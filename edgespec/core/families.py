"""Model families: one record each, with what every format and every stage needs to know of it. Facts only, no code of a format.

A family is a Hugging Face model_type. To add one, add a record here; a format that a record does not name refuses the family.
The rooms read the records: core/shapes (what config.json leaves out), export/gguf, export/onnx, export/npu, export/verify
(tensor names), runtime/untrusted/gguf_config (GGUF files as targets) and recipes/models/subcloning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = ("longrope", "su")  # one scaling with two names
_GELU = "gelu_pytorch_tanh"
_ROPE = ("default", "linear", "dynamic")
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})

# A layer's tensors: llama.cpp's name -> Hugging Face's.
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PARTS = _PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What we know of one Hugging Face model_type. The defaults are those of a plain decoder that no format knows."""

    model_type: str

    # What a config.json means where it is silent.
    tied: bool = False
    head_dim: int | None = None  # None: hidden size / heads
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    query_scalar: int | None = None  # scores are divided by its root; None: by that of the head size
    original_context: int | None = None  # tokens read with LongRoPE's short factors
    attention_bias: bool | None = None  # None: as config.json says; else so, whatever it says
    hidden_activation: str | None = None  # None: the activation is called hidden_act

    # What the layers compute.
    head_norms: bool = False  # q and k are normalised head by head
    partial_rotary: bool = False  # a part of a head is rotated where the config says so
    soft_caps: bool = False  # logits are capped by a tanh
    norm_offset: float = 0.0  # added to the weights of norms: Gemma stores them around 0
    scaled_embedding: bool = False  # embeddings are multiplied by √hidden
    nope_period: int = 0  # every period-th layer has no RoPE; 0: all have it
    window: bool = False  # all layers slide where the config has a window and says nothing of single layers
    alike_layers: bool = False  # a layer needs only the layer before: exports and checks go layer by layer
    npu: bool = False  # the static graph computes it
    subcloning: bool = False  # a drafter can be cut out of its weights

    # GGUF: what llama.cpp has a place for.
    gguf: str = ""  # llama.cpp's architecture; "": GGUF export does not know the family
    gguf_rope: tuple[str, ...] = _ROPE
    gguf_biases: frozenset[str] = frozenset()  # matrices whose bias llama.cpp reads
    gguf_parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)
    permute_qk: bool = False  # llama.cpp rotates neighbouring rows of q and k, Hugging Face rotates halves
    window_period: int = 0  # 0: llama.cpp attends in full; else each period-th layer does, the others slide
    window_theta: bool = False  # the sliding layers have a RoPE base of their own
    untied: bool = True  # llama.cpp has a place for an output head of its own
    full_width_heads: bool = False  # heads * head_dim must be the hidden size
    large_scale_layers: int = 0  # with as many layers the attention's scale is that of hidden / heads
    read_as_target: str = ""  # transformers' class of a GGUF file's model; "": they are not read as targets

    # ONNX: the model builder's names for the tables of cosines and sines, "cos_" and "sin_" left out, by kind of layer.
    # "": all layers share one; empty: not known to ONNX export.
    onnx_tables: Mapping[str, str] = field(default_factory=dict)
    onnx_longrope: bool = False  # the graph has two sets of tables and a choice between them
    optimum_head_dim: bool = False  # optimum-onnx 0.1.0 reads head_dim

    def activation(self, config: Mapping[str, Any]) -> str:
        """The activation that a config.json names, or the family's own."""
        own = config.get("hidden_activation", self.hidden_activation)
        return str(own or config.get("hidden_act") or "silu")

    def behind_norms(self) -> dict[str, tuple[str, ...]]:
        """Of a layer, by Hugging Face's names: the matrices that read what a norm gives, {norm: matrices}."""
        parts = self.gguf_parts
        attention = ("attn_qkv",) if "attn_qkv" in parts else ("attn_q", "attn_k", "attn_v")
        joined = parts["ffn_up"] == "mlp.gate_up_proj"
        readers = {"attn_norm": attention, "ffn_norm": ("ffn_up",) if joined else ("ffn_gate", "ffn_up")}
        return {parts[norm]: tuple(parts[name] for name in names) for norm, names in readers.items()}


_ONE_TABLE = {"": "cache"}
_LLAMA = Family(
    model_type="llama",  # also TinyLlama and SmolLM
    alike_layers=True,
    npu=True,
    subcloning=True,
    gguf="llama",
    gguf_rope=(*_ROPE, "llama3", "yarn"),
    gguf_biases=_QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"},
    permute_qk=True,
    read_as_target="LlamaForCausalLM",
    onnx_tables=_ONE_TABLE,
)
_QWEN3 = Family(
    model_type="qwen3",
    head_dim=128,
    head_norms=True,
    alike_layers=True,
    npu=True,
    gguf="qwen3",
    gguf_rope=(*_ROPE, "yarn"),
    read_as_target="Qwen3ForCausalLM",
    onnx_tables=_ONE_TABLE,
)
_GEMMA = Family(model_type="gemma", tied=True, head_dim=256, norm_offset=1.0, optimum_head_dim=True)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    query_scalar=256,
    hidden_activation=_GELU,
    soft_caps=True,
    scaled_embedding=True,
    gguf="gemma2",
    gguf_parts=_GEMMA_PARTS,
    window_period=2,
    untied=False,
    large_scale_layers=46,
    onnx_tables=_ONE_TABLE,
    optimum_head_dim=False,
)
FAMILIES = {
    family.model_type: family
    for family in (
        _LLAMA,
        replace(
            _LLAMA,
            model_type="mistral",
            sliding_window=4096,
            attention_bias=False,
            window=True,
            read_as_target="",
        ),
        replace(
            _QWEN3,
            model_type="qwen2",
            head_dim=None,
            attention_bias=True,
            head_norms=False,
            gguf="qwen2",
            gguf_biases=_QKV,
            read_as_target="Qwen2ForCausalLM",
        ),
        _QWEN3,
        Family(
            model_type="smollm3",
            tied=True,
            rope_theta=2e6,
            nope_period=4,
            gguf="smollm3",
            gguf_rope=(*_ROPE, "yarn"),
            permute_qk=True,
            read_as_target="SmolLM3ForCausalLM",
            onnx_tables=_ONE_TABLE,
        ),
        _GEMMA,
        _GEMMA2,
        replace(
            _GEMMA2,
            model_type="gemma3_text",
            rope_theta=1e6,
            soft_caps=False,
            gguf="gemma3",
            window_period=6,
            window_theta=True,
            untied=True,
            large_scale_layers=62,
            onnx_tables={FULL: "cache_global", SLIDING: "cache_local"},
            optimum_head_dim=True,
        ),
        Family(
            model_type="phi3",
            rms_norm_eps=1e-5,
            original_context=4096,
            attention_bias=False,
            partial_rotary=True,
            window=True,
            gguf="phi3",
            gguf_rope=("default", "longrope"),
            gguf_parts=_PARTS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            full_width_heads=True,
            onnx_tables=_ONE_TABLE,
            onnx_longrope=True,
        ),
    )
}


def family_named(model_type: str) -> Family:
    """The record of a model_type; of one that is not known, a record that no format knows.

    transformers takes a Mistral model whose config.json lists the kinds of its layers for a "ministral" one, and saves it so.
    """
    known = FAMILIES.get("mistral" if model_type == "ministral" else model_type)
    return known or Family(model_type=model_type)


def with_architecture(gguf: str) -> Family:
    """The first record of a llama.cpp architecture; of one that is not known, a record that no format knows."""
    return next((one for one in FAMILIES.values() if one.gguf == gguf), Family(model_type=gguf))


def having(fact: str) -> list[str]:
    """The model_types whose records say something at the field `fact`."""
    return [name for name, family in FAMILIES.items() if getattr(family, fact)]


def family_for(fact: str, reader: str, config: Mapping[str, Any], where: Path | str) -> Family:
    """The record of a config.json, which must say something at the field `fact`.

    Raises InputError naming the model_type and those that `reader`, in words, knows.
    """
    family = family_named(str(config.get("model_type", "")))
    if not getattr(family, fact):
        raise InputError(
            f"{where} is a {family.model_type!r} model; {reader} knows {', '.join(having(fact))}"
        )
    return family


def leave_out(name: str) -> str:
    """How a person leaves out a format (onnx or gguf) that a model cannot have, for a message."""
    other = "onnx" if name == "gguf" else "gguf"
    return f"leave {name.upper()} out: --export.{name} '' of a build, --formats {other} of export"
