"""How far one model's logits are from another's, in numbers that mean something to who uses it. Arrays only, no files.

largest, mean   absolute differences of logits
kl              KL(p ‖ p') in nats, mean over positions, p being the reference's distribution at temperature 1
top1            share of positions with the same most likely token
perplexity      exp of the mean −log p of the text's own next tokens, of both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec_export.answers.quality import log_softmax

Array = np.ndarray[Any, Any]

# Most KL allowed, by precision; what is not listed (3 to 5 bits) is told and not bounded: it is the price of the size.
# Measured on a trained target of 14M: fp32 8e-13, f32 1e-7 (keys and values are F16), f16 2e-7, bf16 8e-6, int8 6e-5, q8_0 2e-4,
# q6_k 9e-4 (int4 2e-2, q4_k_m 5e-3); the bounds leave room for targets that suffer more.
MOST_KL = {
    "fp32": 1e-6,
    "f32": 1e-4,
    "fp16": 1e-3,
    "f16": 1e-3,
    "bf16": 1e-2,
    "int8": 5e-2,
    "q8_0": 5e-2,
    "q6_k": 2e-1,
}


@dataclass(frozen=True)
class Distance:
    """The numbers at the head of this module, over all positions; perplexities are NaN where no text has a next token."""

    largest: float
    mean: float
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    positions: int


def distance(seen: Sequence[Array], wanted: Sequence[Array], prompts: Sequence[Sequence[int]]) -> Distance:
    """`seen` and `wanted`: logits [n, V] of every prompt; `prompts`: the n token ids they follow."""
    largest, total, divergence, same, count, entries = 0.0, 0.0, 0.0, 0, 0, 0
    losses: list[float] = []
    reference_losses: list[float] = []
    for a, b, prompt in zip(seen, wanted, prompts, strict=True):
        difference = np.abs(a - b)
        largest = max(largest, float(difference.max())) if np.isfinite(difference).all() else float("nan")
        total += float(difference.sum(dtype=np.float64))
        ours, theirs = log_softmax(a), log_softmax(b)
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        same += int((a.argmax(1) == b.argmax(1)).sum())
        count, entries = count + len(a), entries + a.size
        places = np.arange(len(prompt) - 1), np.asarray(prompt[1:], dtype=np.int64)
        losses += (-ours[places]).tolist()
        reference_losses += (-theirs[places]).tolist()
    perplexities = _perplexity(losses), _perplexity(reference_losses)
    return Distance(largest, total / entries, divergence / count, same / count, *perplexities, count)


def _perplexity(losses: Sequence[float]) -> float:
    return float(np.exp(np.mean(losses))) if losses else float("nan")
