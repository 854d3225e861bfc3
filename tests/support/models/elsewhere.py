"""A device that is not here, for models over several of them."""

from __future__ import annotations

import torch
from torch import Tensor


class Elsewhere:
    """Values on a second device, which is not here: they can be brought to the first one, and nothing else."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Tensor:
        return self.values.to(device)
