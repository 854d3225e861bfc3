"""RoPE in a GGUF file: base, dimensions and scaling as llama.cpp reads them. Knows config.json's spellings, not weights.

A scaling that llama.cpp would compute otherwise than torch is refused, or a note says where the two part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from edgespec_runtime.engines.llamacpp import CONTEXT_STEP
from edgespec_runtime.untrusted.gguf_config import ROPE_FACTORS, llama3_divisors
from gguf import GGUFWriter
from gguf.constants import RopeScalingType

from edgespec.core.errors import InputError
from edgespec.core.families import Family
from edgespec.core.shapes import ModelShape

Vector = np.ndarray[Any, np.dtype[np.float32]]
_OLD_NAMES = {"su": "longrope"}


def write_rope(
    writer: GGUFWriter, family: Family, shape: ModelShape, config: Mapping[str, Any], notes: list[str]
) -> dict[str, Vector]:
    """Write the keys; return the tensors that belong to them, by name. Raises InputError for what llama.cpp has no place for."""
    rope, local = _rope_parameters(config, shape)
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and not family.partial_rotary:
        raise InputError(
            f"the model has partial_rotary_factor {partial}; llama.cpp's {family.gguf!r} needs 1.0"
        )
    rotated = int(shape.head_dim * partial)
    theta = float(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(theta)
    if family.window_theta:
        writer.add_rope_freq_base_swa(float(local.get("rope_theta") or 10000.0))
    kind = rope["rope_type"]
    if kind not in family.gguf_rope:
        raise InputError(
            f"RoPE scaling {kind!r} has no counterpart in llama.cpp's {family.gguf!r}; known: {', '.join(family.gguf_rope)}"
        )
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        _write_yarn(writer, rope, shape)
    if kind == "dynamic":
        notes.append(
            f"the RoPE base grows beyond {shape.context_length} tokens in torch and not in llama.cpp: the context ends there"
        )
    if kind == "llama3":
        return {ROPE_FACTORS: np.array([*llama3_divisors(rope, theta, rotated)], np.float32)}
    return _write_longrope(writer, rope, shape, rotated, notes) if kind == "longrope" else {}


def _rope_parameters(
    config: Mapping[str, Any], shape: ModelShape
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """RoPE of the layers that attend in full, with rope_type and rope_theta, and of those that slide; old and new spellings."""
    spelled = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = config.get("rope_parameters") or {}
    local: Mapping[str, Any] = {"rope_theta": config.get("rope_local_base_freq")}
    theta = shape.rope_theta
    if isinstance(nested.get("full_attention"), Mapping):  # one table for each kind of layer
        spelled, local = nested["full_attention"], nested.get("sliding_attention") or local
        theta = float(spelled.get("rope_theta") or theta)
    if local.get("rope_type", "default") != "default":
        raise InputError(
            f"RoPE scaling {local['rope_type']!r} of sliding layers is not known; known: default"
        )
    kind = spelled.get("rope_type") or spelled.get("type") or "default"
    return {**spelled, "rope_theta": theta, "rope_type": _OLD_NAMES.get(kind, kind)}, local


def _write_yarn(writer: GGUFWriter, rope: Mapping[str, Any], shape: ModelShape) -> None:
    """YaRN (Peng et al. 2023): llama.cpp has torch's ramp between kept and stretched frequencies, and its factor on cos and sin.

    That factor is 1 + 0.1 ln(factor) in llama.cpp; what a config says instead is written relative to it.
    """
    factor = float(rope["factor"])
    if not rope.get("truncate", True):
        raise InputError(
            "the model has YaRN with truncate false; llama.cpp rounds the ends of its ramp: leave GGUF out"
        )

    def stretched(share: float = 1.0) -> float:
        return 1.0 + 0.1 * share * math.log(factor) if factor > 1 else 1.0

    scale, shares = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if scale is None:
        scale = stretched(shares[0]) / stretched(shares[1]) if shares[0] and shares[1] else stretched()
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(
        int(rope.get("original_max_position_embeddings") or shape.context_length)
    )
    writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32.0))
    writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1.0))
    if not math.isclose(float(scale), stretched()):
        writer.add_rope_scaling_attn_factors(float(scale) / stretched())


def _write_longrope(
    writer: GGUFWriter,
    rope: Mapping[str, Any],
    shape: ModelShape,
    rotated: int,
    notes: list[str],
) -> dict[str, Vector]:
    """Phi-3's two lists of divisors, and the factor on cos and sin, √(1 + ln(factor) / ln(original context)) (LongRoPE).

    Raises InputError for a border that no context of llama.cpp ends at: there it has no short factors.
    """
    original = shape.rope_border or shape.context_length
    if original < 2:
        raise InputError(
            f"original_max_position_embeddings is {original} in config.json, and longrope needs 2 or more; correct config.json"
        )
    if original % CONTEXT_STEP:
        raise InputError(
            f"the model changes its RoPE factors at {original} tokens, and llama.cpp makes contexts of multiples of "
            f"{CONTEXT_STEP}, so it would give short texts the long factors: leave GGUF out with --export.gguf ''"
        )
    factor = float(rope.get("factor") or shape.context_length / original)
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(float(scale))
    if shape.rope_border:
        notes.append(
            f"a text of more than {original} tokens takes the long RoPE factors: edgespec reads it again there, as transformers "
            f"does; llama.cpp by itself gives them to every text in a context above {original} tokens"
        )
    tensors = {}
    for length in ("long", "short"):
        factors = np.asarray(rope[f"{length}_factor"], dtype=np.float32)
        if factors.shape != (rotated // 2,):
            raise InputError(
                f"{length}_factor has {factors.size} values instead of {rotated // 2}; correct config.json"
            )
        tensors[f"rope_factors_{length}.weight"] = factors
    return tensors
