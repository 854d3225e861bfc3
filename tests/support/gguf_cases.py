"""Small models of the families that GGUF files hold, and llama.cpp's logits of a file in F32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import GEMMA, GEMMA3, LOCAL, LONG, SOFT
from float_cache import float_engine

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()
BOUND = 1e-4  # largest difference of a logit; logits have a standard deviation of 1 to 8
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PHI = {"head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"theta": 50000.0}),
    "llama untied": ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn scaled": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5, "beta_fast": 8.0}}),
    "qwen2 yarn": (
        "qwen2",
        {"head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "smollm3": ("smollm3", {"layers": 5, "theta": 5e6, "head_dim": 16}),
    "smollm3 untied": ("smollm3", {"layers": 4, "tied": False, "rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral untied": ("mistral", {"tied": False}),
    "qwen2": ("qwen2", {"theta": 1e6, "head_dim": 16}),
    "qwen2 untied": ("qwen2", {"theta": 1e6, "head_dim": 16, "tied": False}),
    "qwen3": ("qwen3", {"theta": 1e6}),
    "qwen3 untied": ("qwen3", {"theta": 1e6, "tied": False}),
    "gemma2": ("gemma2", {**GEMMA, **SOFT}),
    **GEMMA3,
    "phi3": ("phi3", {**PHI, "tied": False}),
    "phi3 tied": ("phi3", {**PHI, "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5}}),
    "phi3 longrope": (
        "phi3",
        {
            **PHI,
            "context": 512,
            "tied": False,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 256,
        },
    ),
}


def float_logits(
    file: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch, context: int | None = None
) -> np.ndarray:
    """[n, V] logits of llama.cpp in F32."""
    engine = float_engine(file, monkeypatch, context)
    step = engine.block_length
    logits = [np.array(engine.forward(tokens[i : i + step])) for i in range(0, len(tokens), step)]
    engine.close()
    return np.concatenate(logits)
