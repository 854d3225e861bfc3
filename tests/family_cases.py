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
