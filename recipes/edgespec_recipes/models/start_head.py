"""A feature drafter's head before training: its shape and vocabulary by rule, its weights from the target where they fit.

The head's layers start as the target's last ones, which made the features it reads; its output rows and its norm are the target's
own, cut down to the head's vocabulary. What joins token and feature starts as their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import DrafterOptions
from edgespec_recipes.models.feature_head import FeatureHead, HeadShape
from edgespec_recipes.models.vocabulary import choose_vocabulary

COVERAGE = 0.98  # of the tokens that the target wrote: what is outside is always rejected
STEP = 256  # rows: the vocabulary is a multiple, which the products like


def covering(counts: np.ndarray, share: float = COVERAGE) -> int:
    """How many tokens, a multiple of STEP, hold `share` of all that were counted [V]; at most V − 1."""
    falling = np.sort(counts)[::-1].cumsum()
    size = int(np.searchsorted(falling, share * falling[-1])) + 1
    return min(-(-size // STEP) * STEP, len(counts) - 1)


def start_head(
    target: Any, options: DrafterOptions, counts: np.ndarray, special: Iterable[int], seed: int
) -> FeatureHead:
    """The head that training starts from.

    Args:
        target: the target in torch (Llama's layout: q_proj, gate_proj ...).
        options: layers (default 1) and vocabulary (default: what covers COVERAGE of `counts`).
        counts: [V] how often the target wrote each token.
        special: ids that every vocabulary has.
        seed: of the weights that the target does not give.

    Raises InputError where the target's layers are not of Llama's form.
    """
    shape = ModelShape.from_config(target.config.to_dict())
    size = options.vocabulary or covering(counts)
    vocabulary = choose_vocabulary(counts, special, size)
    layers = options.layers or 1
    if layers > shape.layers:
        raise InputError(
            f"drafter.layers is {layers}; the target has {shape.layers}: a head of 1 or 2 is usual"
        )
    torch.manual_seed(seed)
    head = FeatureHead(
        HeadShape(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            layers=layers,
            feature_size=shape.hidden,
            draft_vocab_size=size,
            rope_theta=shape.rope_theta,
            rms_norm_eps=shape.rms_norm_eps,
            context_length=shape.context_length,
        ),
        vocabulary,
    )
    weights = {name: value.float() for name, value in target.state_dict().items()}
    first = shape.layers - layers
    given = {f"layers.{number}.": f"model.layers.{first + number}." for number in range(layers)}
    for name, value in head.state_dict().items():
        found = _from_target(name, weights, given)
        if found is not None and found.shape != value.shape:
            raise InputError(
                f"{name} of the head is {list(value.shape)} and the target's is {list(found.shape)}"
            )
        if found is not None:
            value.copy_(found)
    head.norm.weight.data.copy_(weights["model.norm.weight"])
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight.detach().float()[head.lm_head.ids])
    width = shape.hidden
    head.fc.weight.data.mul_(0.1)
    for part in range(2):
        head.fc.weight.data[:, part * width : (part + 1) * width] += torch.eye(width)
    return head


_PARTS = ("self_attn", "mlp")


def _from_target(name: str, weights: dict[str, Tensor], given: dict[str, str]) -> Tensor | None:
    """The target's tensor of the same layer and name, if the head's is one of a layer."""
    for own, theirs in given.items():
        if name.startswith(own):
            rest = name.removeprefix(own)
            for place in ("", *(f"{part}." for part in _PARTS)):
                if f"{theirs}{place}{rest}" in weights:
                    return weights[f"{theirs}{place}{rest}"]
            raise InputError(
                f"a head starts from layers of Llama's form, and the target has no {theirs}*{rest}; give drafter.kind model"
            )
    return None
