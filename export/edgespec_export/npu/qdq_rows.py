"""Real text for the ranges of integer activations: what the target wrote for the distillation. Knows the shards' rows."""

from __future__ import annotations

from pathlib import Path

from edgespec.core.files import read_jsonl

ROWS = 16
"""What docs/devices.md was measured with."""


def written_rows(folder: Path, count: int = ROWS) -> list[list[int]]:
    """Prompt and response ids of `count` rows (fewer where there are fewer) spread over the shards of a build's generate/.

    An empty list where the folder has no shard.
    """
    rows = [
        [*row["prompt_ids"], *row["response_ids"]]
        for shard in sorted(folder.glob("shard-*.jsonl"))
        for row in read_jsonl(shard)
    ]
    return rows[:: max(1, len(rows) // count)][:count]
