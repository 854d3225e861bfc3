"""A small target in torch and drafts that never, sometimes and always agree with it."""

from __future__ import annotations

from typing import Any

import torch
from small_llama import PROMPTS, greedy, small_llama

MAX_NEW = 24


def noisy_copy(model: Any, noise: float, seed: int) -> Any:
    """A drafter that agrees with `model` sometimes."""
    copy = small_llama(seed, model.config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs + noise * theirs.std() * torch.randn(theirs.shape, generator=generator))
    return copy


TARGET = small_llama(0)
FREE = [greedy(TARGET, prompt, MAX_NEW, []) for prompt in PROMPTS]
STOPS = [FREE[0][3], FREE[2][8], FREE[3][1]]
DRAFTS = {"never": small_llama(9), "sometimes": noisy_copy(TARGET, 0.15, 1), "always": TARGET}
