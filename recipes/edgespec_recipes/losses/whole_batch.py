"""What the loss of one position takes from the whole optimiser step: its weight, the token selection, TVD++'s mean reward.

A step may come in micro-batches and in several processes. A first look at all of them gives two numbers for each position;
`loss_terms` makes of them what the gradient needs (Terms). Nothing here depends on how the step is split. Knows no models.
Vectors [N] hold the compared positions of all micro-batches of this process, in row order.

A row has a slot of its own in the order of the whole run (mixing.py). What is derived from slot and column does not change with
micro-batches or processes, and a run that was killed and started again finds it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgespec_recipes.parallel import processes

WRITING, LOSS = range(2)
"""What random numbers are for: tokens of the drafter's own responses, tokens drawn by TVD++."""


def positions_of(batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """(place [N], sequence [N]), int64, of rows with slot [B], document_ids [B, T] (-1 is padding) and compared [B, T].

    place: slot · T + column; no two positions of a run have the same. sequence: the number, from 0, of the conversation or the
    block of text that a position is in. No sequence goes beyond its row.
    """
    names = ("compared", "document_ids", "slot")
    compared, documents, slots = (torch.cat([batch[name] for batch in batches]) for name in names)
    rows, columns = compared.nonzero().unbind(1)
    length = compared.shape[1]
    owners = rows * (length + 1) + documents[compared] + 1
    return slots[rows] * length + columns, torch.unique(owners, return_inverse=True)[1]


def noise(seed: int, slots: Tensor, length: int, purpose: int) -> Tensor:
    """[B, length] float64, uniform from 0 to below 1: a number for each column of the rows in these slots [B]."""
    rows = [np.random.default_rng((seed, purpose, slot)).random(length) for slot in slots.tolist()]
    return torch.from_numpy(np.stack(rows)).to(slots.device)


class Terms(NamedTuple):
    """For the n positions of a micro-batch: weight in the mean (float32), whether the selection kept it, TVD++'s μ (float64)."""

    weights: Tensor
    kept: Tensor
    reward_mean: Tensor | None


def loss_terms(
    batches: Sequence[Mapping[str, Tensor]],
    *,
    excess: Tensor | None = None,
    rewarded: Tensor | None = None,
    scope: str,
    fraction: float,
    mean: str,
    vocabulary: int,
) -> list[Terms]:
    """The terms of every micro-batch of this process, from all positions of the step. Every process must call it.

    excess [N]: AdaSPEC's Δ = KL(p‖q) − KL(p‖q_ref), how much worse the drafter is than a copy that was distilled on everything;
    None: all positions are kept. fraction: AdaSPEC's k. rewarded [N]: how many tokens have TVD++'s reward; None: no μ from here.
    scope: over what TVD++ takes its μ, "sequence" or "batch"; only kept positions count. mean: "tokens" or "sequences"
    (`mean_weights`). vocabulary: how many tokens the drafter has logits for.
    """
    places, sequences = positions_of(batches)
    kept = torch.ones_like(places, dtype=torch.bool) if excess is None else select(excess, places, fraction)
    weights = mean_weights(kept, sequences if mean == "sequences" else None)
    sizes = [int(batch["compared"].sum()) for batch in batches]
    means: Sequence[Tensor | None] = [None] * len(sizes)
    if rewarded is not None:
        among = sequences if scope == "sequence" else None
        means = torch.split(_reward_means(rewarded, kept, among, vocabulary), sizes)
    return list(map(Terms, torch.split(weights, sizes), torch.split(kept, sizes), means))


def select(excess: Tensor, places: Tensor, fraction: float) -> Tensor:
    """bool [N]: the positions among the `fraction` of the step's with the largest excess.

    excess, places: [N] of this process. round(k · N) of the N positions of all processes are kept, at least one; of equal ones
    those that come first in the run (AdaSPEC, section 3, Eq. 7-10). A position whose excess is NaN is kept besides, so that its
    loss stops the training. Every process must call it.
    """
    everyone, order = processes.gathered(excess), processes.gathered(places).sort()
    if not len(everyone):
        return torch.zeros_like(excess, dtype=torch.bool)
    count = max(1, round(fraction * len(everyone)))
    ranked = everyone[order.indices].sort(descending=True, stable=True)
    least, last = ranked.values[count - 1], order.values[ranked.indices[count - 1]]
    return ~((excess < least) | ((excess == least) & (places > last)))


def mean_weights(kept: Tensor, sequences: Tensor | None = None) -> Tensor:
    """What every position weighs in the mean over a step: [N] float32.

    kept: bool [N]. All kept positions weigh alike, unless `sequences` are given, int64 [N], each position's sequence. Then it is
    the mean over the kept positions of each sequence, and over the sequences that have any (DistillSpec, Eq. 2 and Algorithm
    A.2). Where nothing is kept, all is 0.

    The weights of all processes sum to the number of processes: backward passes add up over micro-batches, and their average
    over the processes is the gradient. Every process must call it.
    """
    shares = kept.double()
    if sequences is not None:
        shares = shares / torch.bincount(sequences, shares)[sequences].clamp_min(1.0)
    return (shares * (processes.world() / processes.total(shares.sum()).clamp_min(1.0))).float()


def _reward_means(rewarded: Tensor, kept: Tensor, sequences: Tensor | None, vocabulary: int) -> Tensor:
    """μ [N] float64 of TVD++: the share of (kept position, token) pairs that have the reward.

    Over the positions of the same sequence, or without `sequences` over those of all processes.
    """
    counts, seen = torch.where(kept, rewarded, 0).double(), kept.double()
    if sequences is not None:
        sums, pairs = (torch.bincount(sequences, each) for each in (counts, seen))
        return (sums / (pairs * vocabulary).clamp_min(1.0))[sequences]
    sums, pairs = processes.total(torch.stack([counts.sum(), seen.sum()])).unbind()
    return (sums / (pairs * vocabulary).clamp_min(1.0)).expand(len(counts))


class SelectedTokens:
    """Which tokens the selection favours: counts by token since the last report."""

    def __init__(self, vocab_size: int) -> None:
        # how often each was seen, and how often kept
        self.counts = torch.zeros(2, vocab_size, dtype=torch.long)

    def add(self, tokens: Tensor, kept: Tensor) -> None:
        """Count the tokens [n] that the positions predict and which of them were kept [n]."""
        for counts, found in zip(self.counts, (tokens, tokens[kept]), strict=True):
            counts += torch.bincount(found.cpu(), minlength=len(counts))

    def report(self, count: int = 10) -> dict[str, Any]:
        """{"kept": share kept, "selected": [[token id, times kept, times seen], ...]}: the tokens kept most above that share."""
        all_seen, all_kept = processes.total(self.counts).unbind()
        seen, kept = int(all_seen.sum()), int(all_kept.sum())
        if not seen:
            return {}
        surplus = all_kept - all_seen * (kept / seen)
        top = surplus.topk(min(count, len(surplus))).indices.tolist()
        rows = [[token, int(all_kept[token]), int(all_seen[token])] for token in top if all_kept[token]]
        self.counts.zero_()
        return {"kept": round(kept / seen, 4), "selected": rows}
