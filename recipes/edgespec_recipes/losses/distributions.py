"""Distributions from logits, and tokens from distributions: temperature, top-p, min-p, drawing. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

NUCLEUS_GUESS = 128  # tokens searched for the nucleus before a whole row is sorted


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
    size = probabilities.shape[-1]
    guess = min(NUCLEUS_GUESS, size)
    values, tokens = probabilities.topk(guess)
    kept = torch.zeros_like(probabilities)
    short = (values.sum(-1) < top_p) & (guess < size)
    _keep_mass(kept, values, tokens, top_p)
    if short.any():
        values, tokens = probabilities[short].sort(descending=True, stable=True)
        whole = torch.zeros_like(values)
        _keep_mass(whole, values, tokens, top_p)
        kept[short] = whole
    return kept / kept.sum(-1, keepdim=True)


def _likely(probabilities: Tensor, min_p: float) -> Tensor:
    """[N, V] -> [N, V] renormalised over the tokens with at least `min_p` times the row's highest probability."""
    floor = min_p * probabilities.amax(-1, keepdim=True)
    kept = torch.where(probabilities < floor, 0.0, probabilities)
    return kept / kept.sum(-1, keepdim=True)


def _keep_mass(kept: Tensor, values: Tensor, tokens: Tensor, top_p: float) -> None:
    before = values.cumsum(-1) - values  # mass of the tokens ahead; the most probable one always stays
    kept.scatter_(-1, tokens, torch.where(before < top_p, values, 0.0))


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
