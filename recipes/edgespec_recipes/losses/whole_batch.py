"""What the loss of one position takes from the whole optimiser step: its weight, the token selection, TVD++'s mean reward.

A step may come in micro-batches and in several processes. A first look at all of them gives two numbers for each position;
`loss_terms` makes of them what the gradient needs (Terms). Nothing here depends on how the step is split. Knows no models.

A row has a slot of its own in the order of the whole run (mixing.py). What is derived from slot and column does not change with
micro-batches or processes, and a run that was killed and started again finds it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec_recipes.parallel import processes

WRITING, LOSS = range(2)
"""What random numbers are for: tokens of the drafter's own responses, tokens drawn by TVD++."""


@dataclass
class Positions:
    """The n compared positions of a micro-batch, in row order.

    place [n] int64: slot · T + column; no two positions of a run have the same. sequence [n] int64: the number, from 0, of its
    sequence in the micro-batch: of a conversation, or of a block of text. No sequence goes beyond its row.

    What a first look found, without gradient, where the loss needs it. excess [n]: AdaSPEC's Δ = KL(p‖q) − KL(p‖q_ref), how much
    worse the drafter is than a copy that was distilled on everything. rewarded [n]: how many tokens have TVD++'s reward.
    """

    place: Tensor
    sequence: Tensor
    excess: Tensor | None = None
    rewarded: Tensor | None = None


def positions_of(batch: Mapping[str, Tensor]) -> Positions:
    """Of rows with slot [B], document_ids [B, T] (-1 is padding) and compared [B, T]."""
    compared, documents = batch["compared"], batch["document_ids"]
    rows, columns = compared.nonzero().unbind(1)
    length = compared.shape[1]
    owners = rows * (length + 1) + documents[compared] + 1
    return Positions(batch["slot"][rows] * length + columns, torch.unique(owners, return_inverse=True)[1])


def noise(seed: int, slots: Tensor, length: int, purpose: int) -> Tensor:
    """[B, length] float64, uniform from 0 to below 1: a number for each column of the rows in these slots [B]."""
    rows = [np.random.default_rng((seed, purpose, slot)).random(length) for slot in slots.tolist()]
    return torch.from_numpy(np.stack(rows)).to(slots.device)


@dataclass(frozen=True)
class Terms:
    """For the n positions of a micro-batch: weight in the mean (float32), whether the selection kept it, TVD++'s μ (float64)."""

    weights: Tensor
    kept: Tensor
    reward_mean: Tensor | None


def loss_terms(
    step: Sequence[Positions], *, scope: str, fraction: float, mean: str, vocabulary: int
) -> list[Terms]:
    """The terms of every micro-batch of this process, from all positions of the step. Every process must call it.

    scope: over what TVD++ takes its μ: "token" (no μ from here), "sequence" or "batch"; only kept positions count.
    fraction: AdaSPEC's k. mean: "tokens" or "sequences" (`mean_weights`). vocabulary: how many tokens the drafter has logits for.
    """
    places = [each.place for each in step]
    if fraction < 1:
        kept = select([each.excess for each in step if each.excess is not None], places, fraction)
    else:
        kept = [torch.ones_like(place, dtype=torch.bool) for place in places]
    sequences = [each.sequence for each in step]
    weights = mean_weights(kept, sequences if mean == "sequences" else None)
    means: Sequence[Tensor | None] = [None] * len(step)
    if scope != "token":
        rewarded = [each.rewarded for each in step if each.rewarded is not None]
        means = _reward_means(rewarded, kept, sequences if scope == "sequence" else None, vocabulary)
    return [Terms(*each) for each in zip(weights, kept, means, strict=True)]


def select(excess: Sequence[Tensor], places: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """bool [n] for each micro-batch: the positions among the `fraction` of the step's with the largest excess.

    excess, places: [n] of each micro-batch of this process (Positions). round(k · N) of the N positions of all micro-batches and
    processes are kept, at least one; of equal ones those that come first in the run (AdaSPEC, section 3, Eq. 7-10). A position
    whose excess is NaN is kept besides, so that its loss stops the training. Every process must call it.
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


def mean_weights(kept: Sequence[Tensor], sequences: Sequence[Tensor] | None = None) -> list[Tensor]:
    """What every position weighs in the mean over a step: [n] float32 for each micro-batch of this process.

    kept: bool [n] of each micro-batch. All kept positions weigh alike, unless `sequences` are given, int64 [n], each
    position's sequence in its micro-batch (Positions). Then it is the mean over the kept positions of each sequence, and over
    the sequences that have any (DistillSpec, Eq. 2 and Algorithm A.2). Where nothing is kept, all is 0.

    The weights of all micro-batches of all processes sum to the number of processes: backward passes add up over
    micro-batches, and their average over the processes is the gradient. Every process must call it.
    """
    if sequences is None:
        shares = [own.double() for own in kept]
    else:
        counts = [torch.bincount(each, own.double()) for own, each in zip(kept, sequences, strict=True)]
        shares = [
            own / count[each].clamp_min(1.0) for own, count, each in zip(kept, counts, sequences, strict=True)
        ]
    total = processes.total(torch.stack([share.sum() for share in shares]).sum())
    scale = processes.world() / total.clamp_min(1.0)
    return [(share * scale).float() for share in shares]


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
