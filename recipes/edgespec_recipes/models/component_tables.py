"""Token tables for a narrow drafter out of a wide target's: its principal components, tokens weighted by how often they occur.

A small drafter of a large vocabulary is mostly tables, and tables learn slowly: a rare token's row moves when the token occurs.
The target knows already which tokens are alike. The best D of its H directions keep the most of that; layers start at random.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError


def component_table(table: Tensor, width: int, counts: np.ndarray) -> Tensor:
    """Rows [V, width] of a table [V, H]: coordinates along its `width` largest principal components, float32.

    counts: [V], how often each token occurs; one is added, so that no token is without weight. The rows' mean is left out. Raises
    InputError where the table is narrower than `width`.
    """
    if width > table.shape[1]:
        raise InputError(
            f"the drafter is {width} wide and the target {table.shape[1]}; principal components make tables narrower: "
            "give a smaller --drafter.hidden or --drafter.init random"
        )
    rows = table.detach().to("cpu", torch.float64)
    weights = torch.from_numpy(counts.astype(np.float64) + 1.0)
    weights /= weights.sum()
    centred = rows - weights @ rows
    _, directions = torch.linalg.eigh(centred.T @ (weights[:, None] * centred))  # ascending
    made: Tensor = centred @ directions[:, -width:].flip(1)
    return made.float()


def start_from_components(model: Any, target: Any, counts: np.ndarray) -> Any:
    """Give a drafter of all the target's tokens the tables of its components, in place; returns it.

    They keep the spread of the drafter's random ones, which its layers are made for.
    """
    pairs = [(model.get_input_embeddings(), target.get_input_embeddings())]
    if not model.config.tie_word_embeddings:
        pairs.append((model.get_output_embeddings(), target.get_output_embeddings()))
    with torch.no_grad():
        for mine, theirs in pairs:
            made = component_table(theirs.weight, mine.weight.shape[1], counts)
            mine.weight.copy_(made * (mine.weight.std() / made.std()))
    return model
