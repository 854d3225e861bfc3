"""What the loss of one position takes from the whole optimiser step: its weight, the token selection, TVD++'s mean reward.

A step may come in micro-batches and in several processes. A first look at all of them gives two numbers for each position
(Survey); `settle` makes of them what the gradient needs (Terms). Nothing here depends on how the step is split. Knows
numbers, not models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec_recipes.losses.mean_loss import mean_weights
from edgespec_recipes.losses.positions import Positions
from edgespec_recipes.losses.selection import select
from edgespec_recipes.parallel import processes


@dataclass(frozen=True)
class Survey:
    """What a first look at the n positions of a micro-batch found, without gradient. None: nobody asks for it.

    excess [n]: AdaSPEC's Δ (selection.py). rewarded [n]: how many tokens of the vocabulary have TVD++'s reward.
    """

    excess: Tensor | None = None
    rewarded: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """For the n positions of a micro-batch: weight in the mean (float32), whether the selection kept it, TVD++'s μ (float64)."""

    weights: Tensor
    kept: Tensor
    reward_mean: Tensor | None


def settle(
    places: Sequence[Positions],
    surveys: Sequence[Survey],
    *,
    scope: str,
    fraction: float,
    mean: str,
    vocabulary: int,
) -> list[Terms]:
    """The terms of every micro-batch of this process, from all positions of the step. Every process must call it.

    scope: over what TVD++ takes its μ: "token" (no μ from here), "sequence" or "batch"; only kept positions count.
    fraction: AdaSPEC's k. mean: see `mean_weights`. vocabulary: how many tokens the drafter gives logits for.
    """
    own = [each.place for each in places]
    if fraction < 1:
        kept = select([survey.excess for survey in surveys if survey.excess is not None], own, fraction)
    else:
        kept = [torch.ones_like(place, dtype=torch.bool) for place in own]
    sequences = [each.sequence for each in places]
    weights = mean_weights(kept, sequences if mean == "sequences" else None)
    means: Sequence[Tensor | None] = [None] * len(own)
    if scope != "token":
        rewarded = [survey.rewarded for survey in surveys if survey.rewarded is not None]
        means = _reward_means(rewarded, kept, sequences if scope == "sequence" else None, vocabulary)
    return [Terms(*each) for each in zip(weights, kept, means, strict=True)]


def _reward_means(
    rewarded: Sequence[Tensor], kept: Sequence[Tensor], sequences: Sequence[Tensor] | None, vocabulary: int
) -> list[Tensor]:
    """μ [n] float64 of TVD++ for each micro-batch: the share of (kept position, token) pairs that have the reward.

    Over the positions of the same sequence, or without `sequences` over those of all processes.
    """
    counts = [torch.where(own, each, 0).double() for each, own in zip(rewarded, kept, strict=True)]
    if sequences is not None:
        sums = [
            (torch.bincount(sequence, each), torch.bincount(sequence, own.double()))
            for each, own, sequence in zip(counts, kept, sequences, strict=True)
        ]
        shares = [each / (seen * vocabulary).clamp_min(1.0) for each, seen in sums]
        return [share[sequence] for share, sequence in zip(shares, sequences, strict=True)]
    both = [torch.stack([each.sum(), own.sum().double()]) for each, own in zip(counts, kept, strict=True)]
    all_rewarded, seen = processes.total(torch.stack(both).sum(0)).unbind()
    return [(all_rewarded / (seen * vocabulary).clamp_min(1.0)).expand(len(each)) for each in counts]
