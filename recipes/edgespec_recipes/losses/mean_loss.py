"""The mean over a whole optimiser step, of all micro-batches and processes: the one place that knows masks and means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgespec_recipes.losses.head_loss import head_loss, in_head
from edgespec_recipes.losses.losses import Divergence, nll
from edgespec_recipes.losses.positions import positions_of
from edgespec_recipes.losses.target_rows import label_rows, labels_of
from edgespec_recipes.parallel import processes

LABELS = Divergence(nll)


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
        shares = [_of_sequence(own, sequence) for own, sequence in zip(kept, sequences, strict=True)]
    count = processes.total(torch.stack([share.sum() for share in shares]).sum())
    scale = processes.world() / count.clamp_min(1.0)
    return [(share * scale).float() for share in shares]


def _of_sequence(kept: Tensor, sequence: Tensor) -> Tensor:
    """[n] float64: one divided by how many positions of the same sequence are kept; 0 where a position is not."""
    counts = torch.bincount(sequence, kept.double())
    return kept / counts[sequence].clamp_min(1.0)


def label_losses(
    model: Any,
    batches: Sequence[dict[str, Tensor]],
    inputs_of: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    mean: str = "tokens",
) -> Iterator[Tensor]:
    """Cross-entropy of the next tokens, a micro-batch at a time; their sum, averaged over the processes, is the step's mean.

    Micro-batches have input_ids [B, T] and compared [B, T] (positions whose next token counts), with mean "sequences" also
    what Positions takes; `inputs_of` makes of one what the model is given. A drafter with a vocabulary of its own does not
    learn labels outside it.
    """
    columns = known_tokens(model)
    sides = [label_rows(labels_of(batch), columns) for batch in batches]
    sequences = [positions_of(batch).sequence for batch in batches] if mean == "sequences" else None
    weights = mean_weights([known for _, known in sides], sequences)
    for batch, (rows, _), own in zip(batches, sides, weights, strict=True):
        compute = partial(head_loss, LABELS, target_rows=rows, weights=own)
        yield in_head(model, batch["compared"], inputs_of(batch), compute)


def known_tokens(model: Any) -> Tensor | None:
    """The ids [V'] of the tokens a model gives logits for, None where these are all. `model` may be wrapped."""
    return getattr(getattr(model, "module", model).get_output_embeddings(), "ids", None)
