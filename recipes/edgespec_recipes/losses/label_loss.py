"""The likelihood of written tokens: labels in the place of the target's distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgespec_recipes.data.token_rows import Batch
from edgespec_recipes.losses.losses import nll
from edgespec_recipes.losses.output_loss import TargetRows, in_output_layer, output_loss
from edgespec_recipes.losses.whole_batch import mean_weights, positions_of


def label_losses(
    model: Any,
    batches: Sequence[Batch],
    inputs_of: Callable[[Batch], dict[str, Tensor]],
    mean: str = "tokens",
) -> Iterator[Tensor]:
    """Cross-entropy of the next tokens, a micro-batch at a time; their sum, averaged over the processes, is the step's mean.

    Micro-batches have input_ids [B, T] and compared [B, T] (positions whose next token counts), with mean "sequences" also
    what `positions_of` takes; `inputs_of` makes of one what the model is given. A drafter with a vocabulary of its own does not
    learn labels outside it.
    """
    columns = getattr(getattr(model, "module", model).get_output_embeddings(), "ids", None)
    targets, known = zip(*(label_rows(labels_of(batch), columns) for batch in batches), strict=True)
    weights = mean_weights(torch.cat(known), positions_of(batches)[1] if mean == "sequences" else None)
    of_batches = torch.split(weights, list(map(len, known)))
    for batch, rows, own in zip(batches, targets, of_batches, strict=True):
        compute = partial(output_loss, nll, target_rows=rows, weights=own)
        yield in_output_layer(model, batch["compared"], inputs_of(batch), compute)


def labels_of(batch: Batch) -> Tensor:
    """[n] the tokens that the compared positions predict."""
    following = batch["input_ids"].roll(-1, dims=1)
    return following[batch["compared"]]


def label_rows(labels: Tensor, columns: Tensor | None) -> tuple[TargetRows, Tensor]:
    """Rows that are the written tokens [n] themselves, as the drafter numbers them, and which of them it knows (bool [n]).

    columns: the ids [V'] of the tokens that the drafter gives logits for, None where these are all.
    """
    if columns is None:
        return labels.__getitem__, torch.ones_like(labels, dtype=torch.bool)
    places = torch.searchsorted(columns, labels).clamp_max(len(columns) - 1)
    return places.__getitem__, columns[places] == labels
