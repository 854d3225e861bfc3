"""The hyperparameters that llama.cpp reads for each family (core/families.py), RoPE among them. Knows no weights.

A setting llama.cpp would compute otherwise than torch is refused, or, where a shorter context makes both alike, the context is
cut and a note says so.
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
from edgespec.core.families import LONGROPE, Family, leave_out
from edgespec.core.shapes import ModelShape, rope_of

Vector = np.ndarray[Any, np.dtype[np.float32]]


def write_hyperparameters(
    writer: GGUFWriter, family: Family, shape: ModelShape, config: Mapping[str, Any], notes: list[str]
) -> dict[str, Vector]:
    """Write what llama.cpp reads beside the weights; return the tensors that belong to it (RoPE factors), by name.

    Raises InputError for a setting llama.cpp has no place for.
    """
    _check(family, shape, config)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    if family.soft_caps:
        writer.add_attn_logit_softcapping(float(config["attn_logit_softcapping"]))
        writer.add_final_logit_softcapping(float(config["final_logit_softcapping"]))
    writer.add_context_length(_write_window(writer, family, shape, config, notes))
    return _write_rope(writer, family, shape, config, notes)


def _refused(family: Family, what: str, wanted: str) -> InputError:
    return InputError(
        f"the model has {what}, and llama.cpp's {family.gguf!r} needs {wanted}; {leave_out('gguf')}"
    )


def _check(family: Family, shape: ModelShape, config: Mapping[str, Any]) -> None:
    activation, wanted_activation = family.activation(config), family.hidden_activation or "silu"
    if activation != wanted_activation:
        raise _refused(family, f"the activation {activation!r}", repr(wanted_activation))
    if not shape.tied and not family.untied:
        raise _refused(family, "an output head of its own", "one tied to the embedding")
    if family.full_width_heads and shape.heads * shape.head_dim != shape.hidden:
        seen = f"{shape.heads} heads of {shape.head_dim}"
        raise _refused(family, seen, f"heads that make up the hidden size {shape.hidden}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if bool(value := config.get(name)) != family.soft_caps:
            seen, needed = (f"{name} {value}", "none") if value else (f"no {name}", "one")
            raise _refused(family, seen, needed)
    scalar = config.get("query_pre_attn_scalar") or family.query_scalar
    wide = family.large_scale_layers == shape.layers
    wanted = shape.hidden // shape.heads if wide else shape.head_dim
    if scalar is not None and scalar != wanted:
        raise _refused(family, f"query_pre_attn_scalar {scalar}", f"{wanted}")
    if rotated_layers(family, config, shape.layers) != rotated_layers(family, {}, shape.layers):
        told = next(name for name in ("no_rope_layers", "no_rope_layer_interval") if config.get(name))
        every = f"every layer but each {family.nope_period}th" if family.nope_period else "every layer"
        raise _refused(family, f"{told} {config[told]}", f"RoPE in {every}")
    if config.get("use_bidirectional_attention"):
        raise _refused(family, "attention in both directions", "causal attention")


def rotated_layers(family: Family, config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has RoPE: as config.json lists them and perhaps more, else by its period or the family's own."""
    if listed := config.get("no_rope_layers"):
        return [bool(rotated) for rotated in listed[:layers]]
    period = family.nope_period and int(config.get("no_rope_layer_interval") or family.nope_period)
    return [not period or (layer + 1) % period != 0 for layer in range(layers)]


def _write_window(
    writer: GGUFWriter, family: Family, shape: ModelShape, config: Mapping[str, Any], notes: list[str]
) -> int:
    """Write the sliding window; return the context length in which llama.cpp attends as torch does."""
    window = config.get("sliding_window", family.sliding_window)
    if not config.get("use_sliding_window", True):
        window = None
    if not family.window_period:
        if not window or window >= shape.context_length:
            return shape.context_length
        if shape.rope_border is not None:
            seen = f"a sliding window of {window} and RoPE factors that change at {shape.rope_border} tokens"
            raise _refused(family, seen, "full attention")
        notes.append(
            f"the context is cut from {shape.context_length} to the sliding window of {window}: llama.cpp attends in full"
        )
        return int(window)
    period = _period(family, shape, config)
    if not window or not period:
        seen = f"sliding_window {window} and layer_types {config.get('layer_types')}"
        raise _refused(family, seen, "a sliding window in all layers but every n-th")
    writer.add_sliding_window(int(window))
    if period != family.window_period:
        writer.add_sliding_window_pattern(period)
    return shape.context_length


def _period(family: Family, shape: ModelShape, config: Mapping[str, Any]) -> int:
    """p where exactly the layers p-1, 2p-1 ... attend in full; 0 where no p does."""
    kinds = config.get("layer_types")
    if kinds is None:
        return int(config.get("sliding_window_pattern") or family.window_period)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    period = full[0] + 1 if full else shape.layers + 1
    return period if full == list(range(period - 1, shape.layers, period)) and period > 1 else 0


def _write_rope(
    writer: GGUFWriter, family: Family, shape: ModelShape, config: Mapping[str, Any], notes: list[str]
) -> dict[str, Vector]:
    """Write the keys; return the tensors that belong to them, by name. Raises InputError for what llama.cpp has no place for."""
    rope, sliding = rope_of(config)
    local = sliding or {"rope_theta": config.get("rope_local_base_freq"), "rope_type": "default"}
    if local["rope_type"] != "default":
        raise _refused(family, f"RoPE scaling {local['rope_type']!r} of sliding layers", "'default'")
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and not family.partial_rotary:
        raise _refused(family, f"partial_rotary_factor {partial}", "1.0")
    rotated = int(shape.head_dim * partial)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(shape.rope_theta)
    if family.window_theta:
        writer.add_rope_freq_base_swa(float(local.get("rope_theta") or 10000.0))
    kind = "longrope" if rope["rope_type"] in LONGROPE else rope["rope_type"]
    if kind not in family.gguf_rope:
        raise _refused(family, f"RoPE scaling {kind!r}", f"one of {', '.join(family.gguf_rope)}")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        _write_yarn(writer, family, rope)
    if kind == "dynamic":
        notes.append(
            f"the RoPE base grows beyond {shape.context_length} tokens in torch and not in llama.cpp: the context ends there"
        )
    if kind == "llama3":
        divisors = [*llama3_divisors(rope, shape.rope_theta, rotated)]
        return {ROPE_FACTORS: np.array(divisors, np.float32)}
    return _write_longrope(writer, rope, shape, rotated, notes) if kind == "longrope" else {}


def _write_yarn(writer: GGUFWriter, family: Family, rope: Mapping[str, Any]) -> None:
    """YaRN (Peng et al. 2023): llama.cpp has torch's ramp between kept and stretched frequencies, and its factor on cos and sin.

    That factor is 1 + 0.1 ln(factor) in llama.cpp; what a config says instead is written relative to it.
    """
    factor = float(rope["factor"])
    if not rope.get("truncate", True):
        raise _refused(family, "YaRN with truncate false", "the ends of its ramp rounded")

    def stretched(share: float = 1.0) -> float:
        return 1.0 + 0.1 * share * math.log(factor) if factor > 1 else 1.0

    scale, shares = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if scale is None:
        scale = stretched(shares[0]) / stretched(shares[1]) if shares[0] and shares[1] else stretched()
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32.0))
    writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1.0))
    if not math.isclose(float(scale), stretched()):
        writer.add_rope_scaling_attn_factors(float(scale) / stretched())


def _write_longrope(
    writer: GGUFWriter, rope: Mapping[str, Any], shape: ModelShape, rotated: int, notes: list[str]
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
            f"{CONTEXT_STEP}, so it would give short texts the long factors: {leave_out('gguf')}"
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
