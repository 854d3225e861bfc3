"""A drafter that knows a part of the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.models.vocabulary import choose_vocabulary, restrict
from edgespec_runtime.engines.vocabulary import Vocabulary

FULL = 512
KEPT = 160


def subset(seed: int = 0, size: int = KEPT) -> Vocabulary:
    """Tokens 0 to 3 (special) and random ones."""
    counts = np.random.default_rng(seed).integers(0, 1000, FULL)
    return choose_vocabulary(counts, range(4), size)


def restricted(folder: Path, vocabulary: Vocabulary) -> Any:
    return restrict(load_model(folder), vocabulary, np.zeros(FULL, np.int64)).eval()
