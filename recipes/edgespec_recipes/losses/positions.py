"""Where a position is in the run: its place, its sequence, its random numbers. The same however a step is split.

A row has a slot of its own in the order of the whole run (mixing.py). What is derived from slot and column here does not change
with micro-batches or processes, and a run that was killed and started again finds it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WRITING, LOSS = range(2)
"""What random numbers are for: tokens of the drafter's own responses, tokens drawn by TVD++."""


@dataclass(frozen=True)
class Positions:
    """The n compared positions of a micro-batch, in row order.

    place [n] int64: slot · T + column; no two positions of a run have the same. sequence [n] int64: the number, from 0, of its
    sequence in the micro-batch: of a conversation, or of a block of text. No sequence goes beyond its row.
    """

    place: Tensor
    sequence: Tensor


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
