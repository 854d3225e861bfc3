"""AdaSPEC's token selection: which positions of a batch the drafter can still learn, judged by a reference drafter.

Δ = KL(p‖q) − KL(p‖q_ref): how much worse the drafter is than a copy that was distilled on everything. The k · N positions with
the largest Δ are kept (AdaSPEC, section 3.2, Eq. 8-10). Knows logits, not models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgespec_recipes.losses.head_loss import TargetRows, head_values
from edgespec_recipes.losses.losses import fkl
from edgespec_recipes.parallel import processes


def excess_divergence(
    ours: Tensor, reference_hidden: Tensor, reference_head: Any, target_rows: TargetRows
) -> Tensor:
    """Δ [n] of every position, without gradient: the drafter's KL(p‖q) [n] less that of the reference.

    The reference is given by its hidden states [n, H] and its output layer.
    """
    return ours - head_values([fkl], reference_hidden, reference_head, target_rows)[0]


def select(excess: Sequence[Tensor], places: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """bool [n] for each micro-batch: the positions among the `fraction` of the step's with the largest excess.

    excess: [n] of each micro-batch of this process. places: int64 [n], the same for a position however the step is split
    (Positions). round(k · N) of the N positions of all micro-batches and processes are kept, at least one; of equal ones those
    that come first in the run. A position whose excess is NaN is kept besides, so that its loss stops the training. Every
    process must call it.
    """
    everyone = processes.gathered(torch.cat([*excess]))
    order = processes.gathered(torch.cat([*places])).sort()
    if not len(everyone):
        return [torch.zeros_like(own, dtype=torch.bool) for own in excess]
    count = max(1, round(fraction * len(everyone)))
    ranked = everyone[order.indices].sort(descending=True, stable=True)
    least, last = ranked.values[count - 1], order.values[ranked.indices[count - 1]]
    return [
        ~((own < least) | ((own == least) & (place > last)))
        for own, place in zip(excess, places, strict=True)
    ]


class SelectedTokens:
    """Which tokens the selection favours: counts by token since the last report."""

    def __init__(self, vocab_size: int) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.long)
        self.kept = torch.zeros(vocab_size, dtype=torch.long)

    def add(self, tokens: Tensor, kept: Tensor) -> None:
        """Count the tokens [n] that the positions predict and which of them were kept [n]."""
        size = len(self.seen)
        self.seen += torch.bincount(tokens.cpu(), minlength=size)
        self.kept += torch.bincount(tokens[kept].cpu(), minlength=size)

    def report(self, count: int = 10) -> dict[str, Any]:
        """{"kept": share kept, "selected": [[token id, times kept, times seen], ...]}: the tokens kept most above that share."""
        all_seen, all_kept = processes.total(self.seen), processes.total(self.kept)
        seen, kept = int(all_seen.sum()), int(all_kept.sum())
        if not seen:
            return {}
        surplus = all_kept - all_seen * (kept / seen)
        top = surplus.topk(min(count, len(surplus))).indices.tolist()
        rows = [[token, int(all_kept[token]), int(all_seen[token])] for token in top if all_kept[token]]
        self.seen.zero_()
        self.kept.zero_()
        return {"kept": round(kept / seen, 4), "selected": rows}
