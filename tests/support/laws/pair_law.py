"""The law of a reply's first two tokens on a real engine, one token at a time, and a chi-squared test of samples of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from edgespec_runtime.engines.cached_engine import CachedEngine
from scipy.stats import chisquare

LEAST = 5  # expected samples of a cell, as the test's approximation wants it


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def law_of_next(model: CachedEngine, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """[V] what the model alone says behind `ids`."""
    model.prefill(ids[:-1])
    return softmax(model.forward(ids[-1:])[0], temperature)


def law_of_pairs(
    target: CachedEngine, prompt: Sequence[int], first_tokens: int, temperature: float = 1.0
) -> dict[tuple[int, int], float]:
    """p(x1) p(x2 | x1) of the target alone, for the `first_tokens` most probable x1."""
    first = law_of_next(target, prompt, temperature)
    found = {}
    for token in np.argsort(-first)[:first_tokens].tolist():
        second = law_of_next(target, [*prompt, token], temperature)
        found.update({(token, other): first[token] * mass for other, mass in enumerate(second.tolist())})
    return found


def fit(found: Counter[Any], law: Mapping[Hashable, float], least_cells: int = 8) -> float:
    """p-value of a chi-squared test; all that is expected less than `LEAST` times, or has no place in `law`, is one cell.

    Where that cell is expected less than `LEAST` times too, it joins the rarest one. With 2,500 samples in about 25 cells, a law
    that is 0.09 off in total variation over the cells has a p-value below 1e-4 in 99 of 100 trials, whatever the shape of the
    error (test_acceptance.py). Smaller errors of the rules are what the enumerations see.
    """
    samples = found.total()
    cells = [key for key, mass in law.items() if mass * samples >= LEAST]
    assert len(cells) >= least_cells
    observed, wanted = [found[key] for key in cells], [law[key] * samples for key in cells]
    rest = samples - sum(observed), samples - sum(wanted)
    if rest[1] >= LEAST:
        observed, wanted = [*observed, rest[0]], [*wanted, rest[1]]
    else:
        rarest = wanted.index(min(wanted))
        observed[rarest] += rest[0]
        wanted[rarest] += rest[1]
    return float(chisquare(observed, wanted).pvalue)
