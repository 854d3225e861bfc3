"""Distributions from logits, and tokens from distributions: temperature, top-p, min-p, drawing. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

NUCLEUS_GUESSES = (
    128,
    4096,
)  # tokens searched for the nucleus before a whole row is sorted, which takes as long as many guesses


def warp(logits: Tensor, temperature: Tensor | float, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Probabilities [.., V] in float32 after temperature, top-p and min-p, in this order: the runtime's `sampling.warp` in torch.

    `temperature` is one number or one per leading index ([..]); 0 gives the one-hot argmax, so greedy decoding is the general
    rule at that distribution. The nucleus is the shortest run of most probable tokens whose mass reaches `top_p`
    (Holtzman et al. 2020); equal probabilities at its edge are taken in the order of the sort. Of these, the tokens stay whose
    probability is at least `min_p` times the highest one (Nguyen et al. 2024).
    """
    shape = logits.shape
    rows = logits.float().reshape(-1, shape[-1])
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=rows.device)
    heat = heat.expand(shape[:-1]).reshape(-1, 1)
    warm = heat[:, 0] > 0
    probabilities = torch.zeros_like(rows)
    if not warm.all():
        probabilities.scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)
    if warm.any():
        drawn = torch.softmax(rows[warm] / heat[warm].clamp_min(1e-6), -1)  # a colder quotient overflows
        drawn = _nucleus(drawn, top_p) if top_p < 1.0 else drawn
        probabilities[warm] = _likely(drawn, min_p) if min_p > 0.0 else drawn
    return probabilities.reshape(shape)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """[N, V] -> [N, V] renormalised over the nucleus. Selects first and sorts a whole row only where that is not enough."""
    size, kept = probabilities.shape[-1], torch.zeros_like(probabilities)
    short = torch.arange(
        len(probabilities), device=probabilities.device
    )  # rows whose nucleus is not found yet
    for guess in (*NUCLEUS_GUESSES, size):
        if guess < size:
            values, tokens = probabilities[short].topk(guess)
        else:
            values, tokens = probabilities[short].sort(descending=True, stable=True)
        ahead = values.cumsum(-1) - values  # mass of the tokens ahead; the most probable one always stays
        values = torch.where(ahead < top_p, values, 0.0)
        mass = values.sum(-1, keepdim=True)
        kept[short[:, None], tokens] = values / mass
        short = short[mass[:, 0] < top_p]
        if guess >= size or not len(short):
            break
    return kept


def _likely(probabilities: Tensor, min_p: float) -> Tensor:
    """[N, V] -> [N, V] renormalised over the tokens with at least `min_p` times the row's highest probability."""
    floor = min_p * probabilities.amax(-1, keepdim=True)
    kept = torch.where(probabilities < floor, 0.0, probabilities)
    return kept / kept.sum(-1, keepdim=True)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: [.., V] -> [..] (int64)."""
    shape, device = probabilities.shape[:-1], probabilities.device
    return token_at(probabilities, torch.rand(shape, dtype=torch.float64, device=device, generator=generator))


def token_at(probabilities: Tensor, noise: Tensor) -> Tensor:
    """The token [..] (int64) that a uniform number `noise` [..] (float64, from 0 to below 1) draws from [.., V].

    It inverts the distribution function (torch.multinomial draws V numbers).
    """
    heights = probabilities.cumsum(-1, dtype=torch.float64)
    marks = noise[..., None] * heights[..., -1:]
    # the first token whose height exceeds the mark: never one of probability 0
    return torch.searchsorted(heights, marks, right=True)[..., 0].clamp_max(heights.shape[-1] - 1)
