"""A step of training under watch: the bytes that it holds, and the rows that it reads."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from edgespec_recipes.data.mixing import TARGET
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Meter(TorchDispatchMode):
    """`peak`: the most bytes that tensors made in the body held at once, those of `models`' weights left out."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.own = {
            weight.untyped_storage()._cdata
            for model in models
            for weight in (*model.parameters(), *model.buffers())
        }
        self.held: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.own or key in self.held or not storage.nbytes():
            return
        self.held[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self.held.pop(key, 0)


def all_compared(rows: int, context: int, vocabulary: int) -> dict[str, torch.Tensor]:
    compared = torch.ones(rows, context, dtype=torch.bool)
    compared[:, -1] = False
    return {
        "input_ids": torch.randint(0, vocabulary, (rows, context)),
        "position_ids": torch.arange(context).repeat(rows, 1),
        "document_ids": torch.zeros(rows, context, dtype=torch.long),
        "compared": compared,
        "room": torch.zeros(rows, context, dtype=torch.bool),
        "kind": torch.full((rows,), TARGET),
        "row_id": torch.arange(rows),
        "slot": torch.arange(rows),
    }
