"""How far the logits of a block are from those of single steps, here and on these files.

Another processor has other kernels, so what was measured where the bundle was made need not hold here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.engines.cached_engine import CachedEngine


@dataclass(frozen=True)
class Difference:
    """Logits of blocks against those of single steps: the largest difference, and argmaxes that changed among `positions`."""

    largest: float
    flips: int
    positions: int

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest:.1g}, {self.flips} of {self.positions} argmaxes changed"
        )


def block_difference(
    target: CachedEngine,
    prompts: Sequence[Sequence[int]],
    positions: int,
    sizes: Sequence[int] = (2, 4, 5, 8),
) -> Difference:
    """Feed prompts in blocks of each size and in single steps, `positions` tokens each way in all; the cache is empty after."""
    largest, flips, compared = 0.0, 0, 0
    left = positions
    try:
        for prompt in prompts:
            ids = prompt[: min(left, target.engine.context_length)]
            left -= len(ids)
            if not ids:
                continue
            single = _fed(target, ids, 1)
            for size in sizes:
                block = _fed(target, ids, size)
                largest = max(largest, float(np.abs(block - single).max()))
                flips += int((block.argmax(axis=1) != single.argmax(axis=1)).sum())
                compared += len(ids)
    finally:
        target.rewind(0)
    return Difference(largest, flips, compared)


def _fed(target: CachedEngine, ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """Logits [n, V] of `ids` fed `size` at a time from an empty cache."""
    target.rewind(0)
    return np.array(target.read_rows(ids, size))
