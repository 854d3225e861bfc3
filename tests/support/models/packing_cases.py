"""Tiny models of the families that transformers knows, with windows shorter than a packed row. Knows no rows and no tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 64
WINDOW = 6

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that logits spread like a trained model's
}
SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {**MIXED, "use_sliding_window": True, "max_window_layers": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OLD = {"head_dim": None, "num_key_value_heads": None}  # families from before grouped queries

FAMILIES: dict[str, dict[str, Any]] = {
    # what both exports know
    "llama": {},
    "mistral": SLIDING,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": SLIDING,
    "gemma2": {**MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": MIXED,
    # other windows, chunks and sinks
    "starcoder2": SLIDING,
    "mixtral": {**SLIDING, **EXPERTS},
    "qwen3_moe": {**SLIDING, **EXPERTS, "use_sliding_window": True},
    "cohere2": MIXED,
    "olmo3": MIXED,
    "exaone4": MIXED,
    "gpt_oss": {**MIXED, **EXPERTS},
    "llama4_text": {
        **EXPERTS,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "interleave_moe_layer_step": 2,
    },
    # full attention
    "gemma": {},
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
    "glm4": {},
    "olmo2": {},
    "nemotron": {},
    "stablelm": {},
    "persimmon": OLD,
    "phi": {},
    "gpt_neox": OLD,
    # absolute positions, linear biases, finished masks only
    "gpt2": OLD,
    "opt": {**OLD, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "codegen": {**OLD, "n_ctx": 128, "rotary_dim": 4},
    "gptj": {**OLD, "rotary_dim": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, **OLD},
    "falcon alibi": {"alibi": True, **OLD},
    "mpt": {**OLD, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    # not to be packed
    "bloom": OLD,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
UNPACKED = {"falcon alibi", "bloom", "lfm2", "qwen3_next"}


def tiny(family: str, attention: str, seed: int = 0) -> PreTrainedModel | None:
    """A random model, in eval mode, float32; None where the family has no such attention."""
    settings = {name: value for name, value in {**SIZES, **FAMILIES[family]}.items() if value is not None}
    config = AutoConfig.for_model(family.partition(" ")[0], **settings)
    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return None
