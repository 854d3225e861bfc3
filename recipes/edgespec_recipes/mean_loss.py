"""The mean of a divergence over the positions that count, over all processes: the one place that knows masks and means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgespec_recipes import processes
from edgespec_recipes.head_loss import TargetRows, head_loss, in_head
from edgespec_recipes.losses import Divergence, nll
from edgespec_recipes.target_rows import label_rows

LABELS = Divergence(nll)


def mean_loss(
    divergence: Divergence, hidden: Tensor, head: Any, target_rows: TargetRows, kept: Tensor | None = None
) -> Tensor:
    """The mean over the rows of `hidden` [n, H], or over those `kept` [n] (bool): a scalar.

    In several processes it is each one's share, scaled so that the average over the processes is the mean over all rows. Where no
    row is left the loss is 0 and still has a gradient path.
    """
    own = torch.tensor(len(hidden), device=hidden.device) if kept is None else kept.sum()
    scale = processes.world() / processes.total(own).clamp_min(1)
    weights = torch.ones(len(hidden), device=hidden.device) if kept is None else kept.float()
    return head_loss(divergence, hidden, head, target_rows, weights * scale)


def label_loss(model: Any, keep: Tensor, labels: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the labels [n] at the n positions of `keep` [B, T].

    A drafter with a vocabulary of its own does not learn labels outside it.
    """

    def mean(hidden: Tensor, head: Any) -> Tensor:
        rows, known = label_rows(labels, getattr(head, "ids", None))
        return mean_loss(LABELS, hidden, head, rows, known)

    return in_head(model, keep, inputs, mean)
