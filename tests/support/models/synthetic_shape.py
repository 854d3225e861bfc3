"""The shape of a small target for tests of random weights: nothing but what its config.json says."""

from __future__ import annotations

from typing import Any

from edgespec.core.shapes import ModelShape

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
SMALL_SHAPE = ModelShape.from_config(SMALL)
