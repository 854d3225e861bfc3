"""What a target in torch computes for the responses that it writes, where that is kept: see written_states.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import NoNumbers
from edgespec_recipes.stored.top_k import records_of
from edgespec_recipes.stored.written_states import FEATURES, RECORDS


class KeptStates:
    """Records of `top_k` tokens, and `features` where they are wanted; `rows` are the numbers of prompts."""

    def __init__(self, prompts: int, top_k: int, features: bool) -> None:
        self.top_k, self.features = top_k, features
        self._records: list[list[np.ndarray]] = [[] for _ in range(prompts)]
        self._features: list[list[np.ndarray]] = [[] for _ in range(prompts)]

    def read(self, rows: list[int], features: Tensor, valid: Tensor) -> None:
        """Last hidden states [B, n, H] of the tokens that the rows have just read, where `valid` [B, n]."""
        if not self.features:
            return
        states = features.to(torch.float16).cpu().numpy()
        for row, of_row, counts in zip(rows, states, valid.cpu().numpy(), strict=True):
            self._features[row].append(of_row[counts])

    def drawn(self, rows: list[int], logits: Tensor) -> None:
        """Logits [B, V] from which the rows' next tokens are drawn. Raises NoNumbers where they are NaN."""
        if logits.amax().isnan():  # a largest entry is NaN where any is
            raise NoNumbers("the target")
        if not self.top_k:
            return
        found = records_of(logits, self.top_k)
        for place, row in enumerate(rows):
            self._records[row].append(found[place : place + 1])

    def taken(self, prompt: int) -> dict[str, np.ndarray]:
        """{kind: array} of one response, of the kinds that are wanted; see written_states.py. They are here no more."""
        found = {RECORDS: self._records[prompt], FEATURES: self._features[prompt]}
        self._records[prompt], self._features[prompt] = [], []
        return {kind: np.concatenate(arrays) for kind, arrays in found.items() if arrays}
