"""The drafter writes responses of its own while it trains (DistillSpec's student data). Fills the `room` that mixing.py left.

Every token is drawn with the random number of its position in the run. So a run that was killed and started again writes
the same responses, and micro-batches and several processes write those of one batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgespec_recipes.data.token_rows import PADDING, Batch
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.losses.whole_batch import WRITING, noise
from edgespec_recipes.models.packing import without_dropout


def _documents(batch: Batch) -> list[tuple[int, Tensor, Tensor]]:
    """(row, places of the prompt [n], places of the room [m]) of every prompt that waits for a response."""
    found = []
    for row in batch["room"].any(1).nonzero()[:, 0].tolist():
        documents, room = batch["document_ids"][row], batch["room"][row]
        for document in sorted(set(documents[room].tolist())):
            here = documents == document
            found.append((row, (here & ~room).nonzero()[:, 0], (here & room).nonzero()[:, 0]))
    return found


def write_own_responses(
    draft: Any, batch: Batch, *, temperature: float, stops: Sequence[int], seed: int
) -> Batch:
    """The batch with a response drawn from `draft` in every room and marked as compared; what stays empty becomes padding."""
    documents = _documents(batch)
    if not documents:
        return batch
    batch = {name: values.clone() for name, values in batch.items()}
    ids, compared, owners = batch["input_ids"], batch["compared"], batch["document_ids"]
    longest = max(len(room) for _, _, room in documents)
    numbers = noise(seed, batch["slot"], ids.shape[1], WRITING)
    own = [pad(numbers[row, room], (0, longest - len(room))) for row, _, room in documents]
    with without_dropout(draft):
        responses = sample_responses(
            draft,
            [ids[row, prompt].tolist() for row, prompt, _ in documents],
            [temperature] * len(documents),
            top_p=1.0,
            max_new_tokens=longest,
            noise=torch.stack(own),
            stops=stops,
        )
    torch.clear_autocast_cache()  # weights cast without gradient must not serve the pass with gradient that follows
    for (row, _, room), response in zip(documents, responses, strict=True):
        written = room[: len(response)]
        ids[row, written] = torch.tensor(response[: len(room)], device=ids.device)
        compared[row, written - 1] = True
        owners[row, room[len(response) :]] = PADDING
    return batch
