"""A feature drafter's head before training: its shape and vocabulary by rule, its weights from the target where they fit.

The head's output rows and its last norm are the target's own, cut down to the head's vocabulary. What joins token and feature
is the best linear guess of the next feature, by least squares on what the target wrote; it alone is accepted often
(docs/findings.md). The layers start as the target's last ones with nothing to say: the matrices that write into the residual
stream are zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec_recipes.models.feature_head import FeatureHead
from edgespec_recipes.models.target_weights import TargetWeights
from edgespec_recipes.models.vocabulary import choose_vocabulary, covering

RIDGE = 0.01  # of the mean square: what little text does not tell stays small
SMALLEST = 1e-3  # a norm's weight below that gives nothing to divide by
WRITES = ("o_proj.weight", "down_proj.weight")  # into the residual stream


def start_head(
    target: TargetWeights,
    options: DrafterOptions,
    counts: np.ndarray,
    special: Collection[int],
    seen: Iterable[tuple[Tensor, Tensor, Tensor]],
    early: Sequence[int] = (),
) -> FeatureHead:
    """The head that training starts from.

    Args:
        target: the target's weights (Llama's layout: q_proj, gate_proj ...); of its layers only the last ones are read.
        options: layers (default 1) and vocabulary (default: what covers COVERAGE of `counts`).
        counts: [V] how often the target wrote each token.
        special: ids that every vocabulary has.
        seen: tokens [n], what the target gave [n, G] before them and at them, of texts that it wrote.
        early: the layers whose states are given before the last one's. They start without a say.

    Raises InputError where the target's layers are not of Llama's form, and as `derive` does.
    """
    shape, family = target.shape, target.family
    size = options.vocabulary or covering(counts, special)
    vocabulary = choose_vocabulary(counts, special, size)
    head = FeatureHead(derive(shape, replace(options, vocabulary=size)), vocabulary, tuple(early))
    first = shape.layers - len(head.layers)
    own = {"post_attention_layernorm.weight": f"{family.gguf_parts['ffn_norm']}.weight"}  # what the FFN reads
    for number, layer in enumerate(head.layers):
        for name, value in layer.state_dict().items():
            found = _of_layer(target.tensors, f"model.layers.{first + number}.", own.get(name, name))
            if name.endswith("norm.weight"):
                found = found + family.norm_offset
            if found.shape != value.shape:
                raise InputError(
                    f"layers.{number}.{name} of the head is {list(value.shape)} and the target's is {list(found.shape)}"
                )
            value.copy_(torch.zeros_like(found) if name in WRITES else found)
    head.norm.weight.data.copy_(target.tensors["model.norm.weight"].float() + family.norm_offset)
    head.lm_head.weight.data.copy_(target.output[head.lm_head.ids])
    if early:
        nothing = torch.zeros(shape.hidden, len(early) * shape.hidden)
        head.reduce.load_state_dict({"weight": torch.cat([nothing, torch.eye(shape.hidden)], 1)})
    head.fc.weight.data.copy_(best_guess(head, target.embedding, seen))
    return head


@torch.no_grad()
def with_vocabulary(
    head: FeatureHead, table: Tensor, counts: np.ndarray, special: Iterable[int], size: int
) -> FeatureHead:
    """A trained head that drafts over other tokens: rows that it has stay as trained, new ones are those of the target's `table`.

    table: [V, H], the target's output rows. counts, special: as for `start_head`; size: of the vocabulary.
    """
    vocabulary = choose_vocabulary(counts, special, size)
    made = FeatureHead(replace(head.shape, vocab_size=size), vocabulary, head.early)
    weights, own, other = head.state_dict(), made.lm_head.ids, head.lm_head.ids
    rows = table[own].float()
    rows[torch.isin(own, other)] = weights["lm_head.weight"][torch.isin(other, own)]  # both ascend
    made.load_state_dict({**weights, "lm_head.weight": rows})
    return made


@torch.no_grad()
def best_guess(head: FeatureHead, embedding: Tensor, seen: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """[H, 2H]: the matrix M with least Σ |M [norm(e(x_s)); norm(f_{s−1})] − f_s / w|², w the last norm's weight.

    `embedding` [V, H] is of any float type. f is the last hidden state, whose numbers are the last ones given. The norm gives f_s
    back from its argument. The ridge is RIDGE of the mean square.
    """
    size = head.shape.hidden
    width = 2 * size
    square, product = torch.zeros(width, width), torch.zeros(width, size)
    scale = torch.where(head.norm.weight.abs() > SMALLEST, head.norm.weight, 1.0)
    for tokens, *given in seen:
        before, at = (values[:, -size:] for values in given)
        joined = torch.cat([head.embedding_norm(embedding[tokens].float()), head.feature_norm(before)], -1)
        square += joined.T @ joined
        product += joined.T @ (at / scale)
    ridge = RIDGE * square.diagonal().mean().clamp_min(1e-6)
    found: Tensor = torch.linalg.solve(square + ridge * torch.eye(width), product).T
    return found


def _of_layer(weights: Mapping[str, Tensor], layer: str, name: str) -> Tensor:
    for part in ("", "self_attn.", "mlp."):
        if f"{layer}{part}{name}" in weights:
            return weights[f"{layer}{part}{name}"].float()
    raise InputError(
        f"a head starts from layers of Llama's form, and the target has no {layer}*{name}; give drafter.kind model"
    )
