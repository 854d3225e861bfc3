"""Settings of small models of the families, for tests of both exports. Knows no model classes and no files."""

from __future__ import annotations

from typing import Any

import numpy as np

SLIDING = {"sliding_window": 24}  # shorter than the tokens, so that a wrong window shows
GEMMA = {**SLIDING, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
FULL = {"rope_type": "default", "rope_theta": 1e6}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": np.linspace(1, 1.5, 8).tolist(),
    "long_factor": np.linspace(1, 6, 8).tolist(),
}
SOFT = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
GEMMA3: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "layers": 7, "rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL}},
    ),
    "gemma3 untied": (
        "gemma3_text",
        {
            **GEMMA,
            "layers": 4,
            "tied": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": LOCAL,
            },
        },
    ),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"theta": 50000.0}),
    "llama untied": ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"tied": False}),
    "mistral window": ("mistral", SLIDING),
    "qwen2": ("qwen2", {"theta": 1e6, "head_dim": 16}),
    "qwen2 yarn": ("qwen2", {"head_dim": 16, "tied": False, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"theta": 1e6}),
    "qwen3 untied": ("qwen3", {"theta": 1e6, "tied": False}),
    "smollm3": ("smollm3", {"layers": 5, "theta": 5e6, "head_dim": 16}),
    "smollm3 untied": (
        "smollm3",
        {"layers": 3, "head_dim": 16, "tied": False, "rope_parameters": YARN, "no_rope_layers": [1, 0, 1]},
    ),
    "gemma2": ("gemma2", {**GEMMA, **SOFT}),
    "gemma2 odd": ("gemma2", {**GEMMA, **SOFT, "hidden": 80}),  # √80 has more than the builder's two decimals
    **GEMMA3,
    "phi3": ("phi3", {"head_dim": 16, "tied": False}),
    "phi3 tied": ("phi3", {"hidden": 128, "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5}}),
    "phi3 longrope": (
        "phi3",
        {
            "head_dim": 16,
            "context": 512,
            "tied": False,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 256,
        },
    ),
}
