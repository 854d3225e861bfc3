"""How far blocks are from single steps, on engines whose distance is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from edgespec_runtime.doctor.block_difference import block_difference
from edgespec_runtime.engines.cached_engine import CachedEngine
from toy_engine import ToyEngine, random_model


def test_block_difference_finds_rows_that_depend_on_their_block() -> None:
    exact = CachedEngine(ToyEngine(random_model(0, 16), 16))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    same = block_difference(exact, prompts, positions=100, sizes=(2, 4))
    assert (same.largest, same.flips, same.positions) == (0.0, 0, 2 * 15)
    assert exact.tokens == []

    class Inexact(ToyEngine):
        def forward(self, tokens: Sequence[int]) -> np.ndarray:
            rows = super().forward(tokens)
            if len(tokens) == 4:
                rows[3] = -rows[3]
            return rows

    found = block_difference(CachedEngine(Inexact(random_model(0, 16), 16)), prompts, 100, sizes=(2, 4))
    assert found.flips == 3  # one whole block of four in the first prompt, two in the second
    assert found.largest > 1.0
    fewer = block_difference(exact, prompts, positions=10, sizes=(2,))
    assert fewer.positions == 10
