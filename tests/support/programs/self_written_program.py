"""Running text of a small random target, written by one process or several.

torchrun --nproc_per_node 2 self_written_program.py TARGET OUT

A random model's text is no text, so nothing is left out here but what comes twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgespec_recipes.generating import self_written
from edgespec_recipes.generating.self_written import Verdict

from edgespec.recipe.schema import GenerateOptions, InferenceOptions

OPTIONS = GenerateOptions(shard_size=6, batch_size=3)


def anything(tokenizer: Any, ids: list[int]) -> Verdict:
    return Verdict(tokenizer.decode(list(ids), skip_special_tokens=True))


def write(target: Path, out: Path, seed: int = 0, how: InferenceOptions | None = None) -> dict[str, Any]:
    with patch.multiple(self_written, DOCUMENT_TOKENS=16, judge_document=anything):
        return self_written.write_text(out, target, 100, OPTIONS, seed, how)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
