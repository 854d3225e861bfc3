"""Small models of the families that GGUF files hold, and llama.cpp's logits of a file in F32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CASES as ONNX_CASES
from family_cases import GEMMA3, LOCAL
from float_cache import float_engine

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()
BOUND = 1e-4  # largest difference of a logit; logits have a standard deviation of 1 to 8
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SHARED = (
    *("llama", "llama untied", "llama linear", "llama dynamic", "llama llama3", "qwen2", "qwen3"),
    *("qwen3 untied", "smollm3", "gemma2", "phi3", "phi3 longrope"),
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ONNX_CASES[name] for name in SHARED},
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn scaled": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5, "beta_fast": 8.0}}),
    "qwen2 yarn": (
        "qwen2",
        {"head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "smollm3 untied": ("smollm3", {"layers": 4, "tied": False, "rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral untied": ("mistral", {"tied": False}),
    "qwen2 untied": ("qwen2", {"theta": 1e6, "head_dim": 16, "tied": False}),
    **GEMMA3,
    "phi3 tied": ("phi3", {"head_dim": 16, "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5}}),
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
