"""A drafter cut out of its target: the target's own weights at the widths and depth of the drafter (Samragh et al. 2023).

    residual dimensions  the same ones in every layer, ranked over all layers by mean |x| / rms(x), what the matrices read
    FFN neurons, heads   ranked layer by layer by their mean magnitude; a key/value head stays with the query heads that read it
    layers               the first ones and the last ones; middle layers change the residual stream least

Every sum keeps its kept terms as they are; nothing is random. RMS norms divide by the root mean square of the kept dimensions
instead of all, so their weights are multiplied by the measured quotient of the two. What contributed nothing in the target is
then cut without a trace. The paper also multiplies what reads a narrower input by sqrt(width / kept), which gives each sum its
variance back: that lowers the loss at step 0 and raises it after training (by 0.1 after 100 steps;
benchmarks/training/subcloning.py), so it is left out. Which dimensions are kept matters at step 0; taken at random they are
behind by 0.00 to 0.06 after 100 steps.

Where the drafter's heads are smaller, the rotary pairs are kept whose frequencies are the smaller head's own, and the drafter has
the target's RoPE scaling (`scaling_of`), which leaves the meaning of positions as it was. Knows Llama-style weights (no biases,
no norms inside the heads), nothing of training or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.families import LONGROPE, family_named, having
from edgespec.core.shapes import ModelShape, rope_of
from edgespec_recipes.models.loading import shape_of
from edgespec_recipes.models.vocabulary import Blocks

SAMPLE_TOKENS = 4096
PASS_TOKENS = 1024  # tokens of one forward pass of the target


@dataclass
class Activations:
    """Means over the sample's positions. x is the residual stream before a norm.

    residual: [H] |x| / rms(x), summed over all norms. energy: by norm, [H] x² / mean(x²). heads: by layer, [heads, head_dim]
    |attention output|. neurons: by layer, [FFN] |activation|.
    """

    residual: Tensor
    energy: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    neurons: dict[int, Tensor] = field(default_factory=dict)

    def norm_ratio(self, name: str, dims: Tensor) -> float:
        """Root mean square over `dims` divided by that over all dimensions, before one norm; 1 where all are kept."""
        energy = self.energy[name]
        return 1.0 if len(dims) == len(energy) else float(energy[dims].mean().sqrt())


def measure(target: Any, blocks: Blocks) -> Activations:
    """Run the target over rows of `blocks` at equal distances, about `SAMPLE_TOKENS` tokens."""
    context = len(blocks[0])
    count = min(len(blocks), max(1, SAMPLE_TOKENS // context))
    sample = [blocks[index * len(blocks) // count] for index in range(count)]
    rows = torch.from_numpy(np.stack(sample).astype(np.int64))
    shape, decoder = shape_of(target), target.model
    found = Activations(torch.zeros(shape.hidden))

    def mean(table: dict[Any, Tensor], key: Any, values: Tensor) -> None:
        summed = values.flatten(0, -2).sum(0).cpu() / rows.numel()
        table[key] = table[key] + summed if key in table else summed

    def norm(name: str) -> Callable[..., None]:
        def see(_: Any, given: tuple[Tensor, ...]) -> None:
            x = given[0].float()
            x = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
            mean(found.energy, name, x.square())
            found.residual += x.abs().flatten(0, -2).sum(0).cpu() / rows.numel()

        return see

    def inputs(table: dict[int, Tensor], layer: int) -> Callable[..., None]:
        return lambda _, given: mean(table, layer, given[0].float().abs())

    hooks = [decoder.norm.register_forward_pre_hook(norm("norm"))]
    for index, layer in enumerate(decoder.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            hooks.append(getattr(layer, name).register_forward_pre_hook(norm(f"layers.{index}.{name}")))
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(inputs(found.heads, index)))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(inputs(found.neurons, index)))
    try:
        with torch.inference_mode():
            for piece in torch.split(rows, max(1, PASS_TOKENS // context)):
                decoder(piece.to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found.heads = {index: values.view(shape.heads, -1) for index, values in found.heads.items()}
    return found


def kept_layers(total: int, count: int) -> list[int]:
    """The first half of `count` layers from the beginning (the larger half), the others from the end."""
    first = math.ceil(count / 2)
    return [*range(first), *range(total - (count - first), total)]


def kept_pairs(head_dim: int, kept: int) -> Tensor:
    """[kept] dimensions of a head of `head_dim`: rotary pairs (i, i + d/2) whose frequency is nearest to the small head's own.

    Pair i turns by theta^(-2i/d), so pair j of the small head is pair j·d/d' of the large one, exactly where that is whole.
    """
    pairs = torch.tensor([round(j * head_dim / kept) for j in range(kept // 2)])
    return torch.cat([pairs, pairs + head_dim // 2])


def subclone(target: Any, shape: ModelShape, blocks: Blocks) -> dict[str, Tensor]:
    """State dict of a Llama of `shape`, float32 on the CPU, from the target's weights. `blocks` [n, context] is sample text.

    Its tables have all of the target's tokens. Raises InputError where the target is of another kind or smaller somewhere.
    """
    full = shape_of(target)
    check_cut(target.config.to_dict(), full, shape)
    seen = measure(target, blocks)
    weights = target.state_dict()
    dims = _largest(seen.residual, shape.hidden)
    tables = ("model.embed_tokens", "lm_head") if not shape.tied else ("model.embed_tokens",)
    found = {f"{name}.weight": weights[f"{name}.weight"].cpu()[:, dims].float() for name in tables}
    found["model.norm.weight"] = weights["model.norm.weight"].cpu()[dims].float() * seen.norm_ratio(
        "norm", dims
    )
    for index, source in enumerate(kept_layers(full.layers, shape.layers)):
        prefix = f"model.layers.{source}."
        own = [name for name in weights if name.startswith(prefix)]
        layer = {name.removeprefix(prefix): weights[name].float().cpu() for name in own}
        cut = _attention(layer, full, shape, dims, seen.heads[source])
        cut |= _ffn(layer, dims, _largest(seen.neurons[source], shape.intermediate))
        for name in ("input_layernorm", "post_attention_layernorm"):
            ratio = seen.norm_ratio(f"layers.{source}.{name}", dims)
            cut[f"{name}.weight"] = layer[f"{name}.weight"][dims] * ratio
        found |= {f"model.layers.{index}.{name}": value for name, value in cut.items()}
    if shape.tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return {name: value.contiguous() for name, value in found.items()}


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """RoPE's scaling in a target's config.json, which its drafter needs too; None where there is none."""
    rope, _ = rope_of(config)
    if rope["rope_type"] == "default":
        return None
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def check_cut(config: Mapping[str, Any], full: ModelShape, shape: ModelShape) -> None:
    """Raises InputError for a target whose weights a plain Llama cannot hold, or that has less of something.

    `config` is the target's config.json; `shape` has all of the target's tokens.
    """
    again, family = "give --drafter.init random", str(config.get("model_type", ""))
    biased = full.attention_bias or config.get("mlp_bias", False)
    if not family_named(family).subcloning or biased or full.head_norms:
        what = (
            "with biases" if biased else "with norms in its heads" if full.head_norms else "of another build"
        )
        raise InputError(
            f"the target is a {family!r} model {what}; weight subcloning makes a plain Llama from "
            f"{' or '.join(having('subcloning'))} without biases: {again}"
        )
    scaling = scaling_of(config)
    if scaling is not None and scaling["rope_type"] in LONGROPE:
        raise InputError(
            f"the target's RoPE scaling is {scaling['rope_type']!r}, whose factors are made for the target's heads and fit no "
            f"smaller ones; {again}"
        )
    if shape.vocab_size != full.vocab_size or (shape.tied and not full.tied):
        raise InputError(
            f"the drafter's tables ({shape.vocab_size} tokens, tied: {shape.tied}) cannot come from the target's "
            f"({full.vocab_size} tokens, tied: {full.tied}); {again}"
        )
    for name in ("layers", "hidden", "intermediate", "heads", "head_dim"):
        if getattr(shape, name) > getattr(full, name):
            raise InputError(
                f"the drafter has {name} {getattr(shape, name)} and the target {getattr(full, name)}; weight subcloning only "
                f"takes away: give a smaller drafter, or {again}"
            )
    if shape.heads // shape.kv_heads > full.heads // full.kv_heads:
        raise InputError(
            f"{shape.heads // shape.kv_heads} of the drafter's heads share a key/value head and "
            f"{full.heads // full.kv_heads} of the target's; {again}"
        )


def _largest(importance: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` largest values; of equal ones the first."""
    return importance.sort(descending=True, stable=True).indices[:count].sort().values


def _heads(importance: Tensor, full: ModelShape, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """(query heads [heads'], key/value heads [kv_heads']) to keep, by the importance of query heads [heads].

    Each of the target's groups (a key/value head and the query heads that read it) is cut into pieces as large as the drafter's
    groups, its most important heads first, and the best pieces stay. With equal groups they are whole groups; else a key/value
    head may stay twice.
    """
    size, wanted = full.heads // full.kv_heads, shape.heads // shape.kv_heads
    ordered, order = importance.view(full.kv_heads, size).sort(dim=1, descending=True, stable=True)
    pieces = size // wanted
    value = ordered[:, : pieces * wanted].reshape(-1, wanted).sum(1)
    if len(value) < shape.kv_heads:
        raise InputError(
            f"the target's {full.heads} heads give {len(value)} groups of {wanted}; the drafter wants {shape.kv_heads}: "
            "give --drafter.init random"
        )
    best = _largest(value, shape.kv_heads)
    groups = best // pieces
    inside = order[:, : pieces * wanted].reshape(-1, wanted)[best].sort(1).values
    return (groups[:, None] * size + inside).flatten(), groups


def _attention(
    layer: dict[str, Tensor], full: ModelShape, shape: ModelShape, dims: Tensor, importance: Tensor
) -> dict[str, Tensor]:
    """q, k, v, o at the kept heads and residual dimensions; `importance` [heads, head_dim] of the attention output."""
    queries, groups = _heads(importance.sum(1), full, shape)
    size, kept = full.head_dim, shape.head_dim

    def rows(heads: Tensor, inside: Tensor) -> Tensor:
        """Rows of the target's matrix, [len(heads) · kept]; `inside` [kept] or [len(heads), kept]."""
        return (heads[:, None] * size + inside).flatten()

    pairs = kept_pairs(size, kept)
    # of the values, which the heads of a group share
    spread = importance.view(full.kv_heads, -1, size).sum(1)
    values = torch.stack([_largest(one, kept) for one in spread[groups]])
    # scores are divided by sqrt(kept) now: so the kept pairs' share of them stays as it was
    scale = (kept / size) ** 0.25
    repeat = shape.heads // shape.kv_heads
    columns = rows(queries, values.repeat_interleave(repeat, 0))
    return {
        "self_attn.q_proj.weight": layer["self_attn.q_proj.weight"][rows(queries, pairs)][:, dims] * scale,
        "self_attn.k_proj.weight": layer["self_attn.k_proj.weight"][rows(groups, pairs)][:, dims] * scale,
        "self_attn.v_proj.weight": layer["self_attn.v_proj.weight"][rows(groups, values)][:, dims],
        "self_attn.o_proj.weight": layer["self_attn.o_proj.weight"][dims][:, columns],
    }


def _ffn(layer: dict[str, Tensor], dims: Tensor, neurons: Tensor) -> dict[str, Tensor]:
    return {
        "mlp.gate_proj.weight": layer["mlp.gate_proj.weight"][neurons][:, dims],
        "mlp.up_proj.weight": layer["mlp.up_proj.weight"][neurons][:, dims],
        "mlp.down_proj.weight": layer["mlp.down_proj.weight"][dims][:, neurons],
    }
