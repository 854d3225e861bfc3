"""The hyperparameters that llama.cpp reads for each family (core/families.py). Knows no tensors' contents.

A setting llama.cpp would compute otherwise than torch is refused, or, where a shorter context makes both alike, the context is
cut and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter

from edgespec.core.errors import InputError
from edgespec.core.families import Family
from edgespec.core.shapes import ModelShape
from edgespec_export.gguf.rope import Vector, write_rope


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
    return write_rope(writer, family, shape, config, notes)


def _check(family: Family, shape: ModelShape, config: Mapping[str, Any]) -> None:
    def refuse(what: str, wanted: str) -> None:
        raise InputError(
            f"the model has {what}, and llama.cpp's {family.gguf!r} needs {wanted}; "
            "leave GGUF out with --export.gguf ''"
        )

    activation, wanted_activation = family.activation(config), family.hidden_activation or "silu"
    if activation != wanted_activation:
        refuse(f"the activation {activation!r}", repr(wanted_activation))
    if not shape.tied and not family.untied:
        refuse("an output head of its own", "one tied to the embedding")
    if family.full_width_heads and shape.heads * shape.head_dim != shape.hidden:
        refuse(
            f"{shape.heads} heads of {shape.head_dim}", f"heads that make up the hidden size {shape.hidden}"
        )
    caps = {name: config.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    for name, value in caps.items():
        if family.soft_caps and not value:
            refuse(f"no {name}", "one")
        if not family.soft_caps and value:
            refuse(f"{name} {value}", "none")
    scalar = config.get("query_pre_attn_scalar")
    wide = family.large_scale_layers == shape.layers
    wanted = shape.hidden // shape.heads if wide else shape.head_dim
    if scalar is not None and scalar != wanted:
        refuse(f"query_pre_attn_scalar {scalar}", f"{wanted}")
    with_rope = config.get("no_rope_layers") or [1] * shape.layers
    period = family.nope_period or shape.layers + 1
    if list(map(bool, with_rope)) != [bool((layer + 1) % period) for layer in range(shape.layers)]:
        every = f"every layer but each {period}th" if family.nope_period else "every layer"
        refuse(f"no_rope_layers {with_rope}", f"RoPE in {every}")
    if config.get("use_bidirectional_attention"):
        refuse("attention in both directions", "causal attention")


def _write_window(
    writer: GGUFWriter, family: Family, shape: ModelShape, config: Mapping[str, Any], notes: list[str]
) -> int:
    """Write the sliding window; return the context length in which llama.cpp attends as torch does."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not family.window_period:
        if not window or window >= shape.context_length:
            return shape.context_length
        if shape.rope_border is not None:
            raise InputError(
                f"the model has a sliding window of {window} and RoPE factors that change at {shape.rope_border} tokens; "
                f"llama.cpp's {family.gguf!r} attends in full: leave GGUF out with --export.gguf ''"
            )
        notes.append(
            f"the context is cut from {shape.context_length} to the sliding window of {window}: llama.cpp attends in full"
        )
        return int(window)
    period = _period(family, shape, config)
    if not window or not period:
        raise InputError(
            f"llama.cpp's {family.gguf!r} needs a sliding window in all layers but every n-th; the model has "
            f"sliding_window {window} and layer_types {config.get('layer_types')}; leave GGUF out with --export.gguf ''"
        )
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
