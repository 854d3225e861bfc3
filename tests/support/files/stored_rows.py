"""A few rows of random conversations, and how much of the target's distributions tests store of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.data.token_rows import Rows
from edgespec_recipes.stored.written_states import Mapped, find_states

TOP_K = 8
ROWS = 11  # 6 shards of 2, the last one short


def some_rows(seed: int = 0) -> Rows:
    generator = np.random.default_rng(seed)
    conversations = [
        (generator.integers(4, 500, 6).tolist(), generator.integers(4, 500, 14).tolist())
        for _ in range(ROWS * 3)
    ]
    rows = response_rows(conversations, 64)
    assert len(rows) == ROWS
    return rows


def read_states(shard: Path) -> Iterator[tuple[dict[str, Any], np.ndarray | None, np.ndarray | None]]:
    """(row, its records, its features) of every row of a shard; None where not kept."""
    mapped = Mapped()
    for row, *parts in find_states(shard):
        records, features = (None if part is None else mapped.read(part) for part in parts)
        yield row, records, features
