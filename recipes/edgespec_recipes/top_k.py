"""A distribution as its k most probable tokens and the mass of all others: made from logits, turned back, and how far off it is.

Pure functions of tensors; knows no files and no models.

The remainder is spread over the other tokens in proportion to q (without gradient). Then every f-divergence (KL either way, JSD,
TVD) and its gradient in the draft's logits are those of p and q with one bucket for the rest. Spread evenly instead, it would
pull q towards a flat tail; benchmarks/stored_targets.py measures both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

LEAST = -80.0  # log of the least remainder: exp(−80) is still a normal float32


def compress(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] -> ids [n, k] (int64) of the most probable tokens, their log p [n, k] and the log of the others' mass [n].

    float32. The remainder is summed by itself: one minus the stored mass would keep nothing of it where it is small.
    """
    wide = logits.float()
    normaliser = wide.logsumexp(-1, keepdim=True)
    values, ids = wide.topk(top_k, dim=-1)
    others = wide.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return ids, values - normaliser, (others - normaliser)[:, 0].clamp_min(LEAST)


def expand(
    draft_logits: Tensor, columns: Tensor, log_p: Tensor, log_rest: Tensor, partial: bool = False
) -> Tensor:
    """Target logits [m, C] (float32, log p): `log_p` [m, k] at `columns` [m, k], the remainder R in proportion to q elsewhere.

    log p_v = log R + log q_v − log Q, where Q is the mass of q outside the stored tokens. With `partial` the draft has a column
    for some tokens only, and C stands for a stored token that has none.
    """
    size = draft_logits.shape[-1]
    spread = torch.log_softmax(draft_logits.detach().float(), -1)
    if partial:
        spread = functional.pad(spread, (0, 1))
    spread = spread.scatter(-1, columns, -torch.inf)
    outside = spread[:, :size].logsumexp(-1, keepdim=True)
    outside = outside.masked_fill(outside.isneginf(), 0.0)  # every column is a stored token
    spread += log_rest[:, None] - outside
    return spread.scatter_(-1, columns, log_p)[:, :size]


def divergence_errors(
    functions: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
    draft_logits: Tensor,
    live_logits: Tensor,
    stored_logits: Tensor,
) -> dict[str, dict[str, float]]:
    """What a mean divergence loses when the target comes from a store, all logits [n, V].

    For every function its value with either target (`live`, `stored`), the `relative_error` of the second, and of the gradients
    in the draft's logits the cosine (`gradient_cosine`) and the ratio of the norms, stored to live (`gradient_ratio`).
    """
    errors = {}
    for name, function in functions.items():
        values, gradients = [], []
        for target in (live_logits, stored_logits):
            leaf = draft_logits.detach().float().requires_grad_()
            value = function(leaf, target).mean()
            gradients.append(torch.autograd.grad(value, leaf)[0].flatten().double())
            values.append(float(value.detach()))
        norms = [float(gradient.norm()) for gradient in gradients]
        errors[name] = {
            "live": values[0],
            "stored": values[1],
            "relative_error": abs(values[1] - values[0]) / max(1e-30, abs(values[0])),
            "gradient_cosine": float(gradients[0] @ gradients[1]) / max(1e-30, norms[0] * norms[1]),
            "gradient_ratio": norms[1] / max(1e-30, norms[0]),
        }
    return errors
