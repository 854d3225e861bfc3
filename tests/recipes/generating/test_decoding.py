"""Many responses at once against one row at a time, without a cache; and what they are drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgespec_recipes.generating import decoding
from edgespec_recipes.generating.decoding import responses, sample_responses
from edgespec_recipes.losses.distributions import draw, warp
from edgespec_recipes.stored.kept_states import KeptStates
from edgespec_recipes.stored.written_states import FEATURES, RECORDS
from small_llama import PROMPTS, greedy, small_llama
from torch import Tensor


def plain_warp(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """One row, sorted whole, in float64."""
    p = torch.softmax(logits.double() / temperature, -1)
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = p[token]
        mass += float(p[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("size", "spread"),
    [(700, 4.0), (700, 0.1), (9000, 1.5), (9000, 0.1)],
    ids=["first-guess", "whole-small-row", "second-guess", "whole-large-row"],
)
def test_warp_against_a_sorted_row(size: int, spread: float) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(0)) * spread
    heat = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.5])
    warped = warp(logits, heat, 0.9)
    assert torch.equal(warped[0], torch.nn.functional.one_hot(logits[0].argmax(), size).float())
    for row in range(1, 5):
        wanted = plain_warp(logits[row], float(heat[row]), 0.9)
        torch.testing.assert_close(warped[row].double(), wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(warp(logits, 1.0), torch.softmax(logits, -1))


def test_a_temperature_close_to_zero_is_greedy_without_overflow() -> None:
    row = torch.tensor([9.0, -3.0, 10.0, 2.0])
    for temperature in (0.0, 1e-44, 1e-38, 1e-6):
        assert warp(row, temperature, top_p=0.9).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_draw_follows_the_distribution_and_never_gives_the_impossible() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    many = 40_000
    found = draw(p.expand(many, 6), torch.Generator().manual_seed(0)).bincount(minlength=6) / many
    assert not found[p == 0].any()
    torch.testing.assert_close(found, p, atol=0.015, rtol=0)  # six standard deviations


def test_batched_greedy_equals_one_row_at_a_time() -> None:
    model = small_llama(0)
    free = [greedy(model, prompt, 24, []) for prompt in PROMPTS]
    stops = [
        free[0][3],
        free[2][8],
        free[3][1],
    ]  # rows end at different times, so the batch shrinks on the way
    answers = sample_responses(
        model,
        PROMPTS,
        [0.0] * len(PROMPTS),
        top_p=0.9,
        max_new_tokens=24,
        generator=torch.Generator().manual_seed(0),
        stops=stops,
    )
    assert answers == [greedy(model, prompt, 24, stops) for prompt in PROMPTS]
    assert len({len(answer) for answer in answers}) > 2


def test_prompts_of_one_length_in_bf16_keep_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops a mask that hides nothing. The slot before the prompts is hidden in every pass."""
    model, prompts = small_llama(0).bfloat16(), [[3, 1, 4], [5, 9, 2]]
    attend, masks = torch.nn.functional.scaled_dot_product_attention, []

    def spied(*given: Any, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        masks.append(attn_mask)
        return attend(*given, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    noise = torch.zeros(2, 8, dtype=torch.float64)
    sample_responses(model, prompts, [0.0] * 2, top_p=1.0, max_new_tokens=8, noise=noise, stops=[])
    assert len(masks) == 8 * model.config.num_hidden_layers
    assert all(mask is not None and not mask[..., 0].any() for mask in masks)


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_row_that_ends_leaves_its_place_to_the_next_prompt(at_once: int) -> None:
    model, prompts = small_llama(0), PROMPTS * 2
    stops = [greedy(model, PROMPTS[row], 24, [])[place] for row, place in ((0, 3), (2, 8), (3, 1))]
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda _model, _given, how: sizes.append(len(how["input_ids"])), with_kwargs=True
    )
    noise = torch.rand(len(prompts), 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how: Any = {"top_p": 0.9, "max_new_tokens": 24, "noise": noise, "stops": stops}
    heat = [0.0, 1.0] * len(PROMPTS)
    found = list(responses(model, prompts, heat, at_once=at_once, **how))
    together, steps = max(sizes), len(sizes)
    assert dict(found) == dict(enumerate(sample_responses(model, prompts, heat, **how)))
    assert [dict(found)[row] for row in (0, 2, 4)] == [
        greedy(small_llama(0), PROMPTS[row], 24, stops) for row in (0, 2, 4)
    ]
    assert together == at_once
    tokens = sum(len(answer) for _, answer in found)
    assert steps < tokens / at_once + 24 + len(prompts)  # places do not wait for the longest answer


def test_a_row_that_has_ended_leaves_before_its_cache_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays while less than half of the rows have ended, but no position is beyond the longest answer's end.

    Nothing is kept of what it reads then.
    """
    monkeypatch.setattr(decoding, "LEAVE", 2)
    model, stops = small_llama(0), [12]
    others = sorted(([row, 5] for row in range(20)), key=lambda prompt: len(greedy(model, prompt, 12, stops)))
    prompts = [[3] * 20, *others]
    wanted = {row: greedy(model, prompt, 12, stops) for row, prompt in enumerate(prompts)}
    last: list[int] = []
    model.register_forward_pre_hook(
        lambda _model, _given, how: last.append(int(how["position_ids"].max())), with_kwargs=True
    )
    noise = torch.zeros(len(prompts), 12, dtype=torch.float64)
    how: Any = {"top_p": 1.0, "max_new_tokens": 12, "noise": noise, "stops": stops}
    states = KeptStates(len(prompts), 4, True)
    found = dict(responses(model, prompts, [0.0] * len(prompts), at_once=9, states=states, **how))
    assert max(last) == 20 + 12 - 1
    assert found == wanted
    for row, answer in found.items():
        kept = states.taken(row)
        assert [len(kept[RECORDS]), len(kept[FEATURES])] == [len(answer), len(prompts[row]) + len(answer) - 1]
    assert not states.taken(0)
