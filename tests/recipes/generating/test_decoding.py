"""Batched decoding and sampling against one row at a time, without a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edgespec_recipes.generating import decoding
from edgespec_recipes.generating.decoding import (
    BatchDecoder,
    left_pad,
    logits_at,
    sample_responses,
    states_at,
)
from edgespec_recipes.losses.distributions import draw, warp
from small_llama import PROMPTS, greedy, small_llama
from torch import Tensor, nn


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


@pytest.mark.parametrize("spread", [0.1, 4.0], ids=["nucleus-beyond-the-first-guess", "small-nucleus"])
def test_warp_against_a_sorted_row(spread: float) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * spread
    heat = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.5])
    warped = warp(logits, heat, 0.9)
    assert torch.equal(warped[0], torch.nn.functional.one_hot(logits[0].argmax(), 700).float())
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


def test_a_long_rectangle_in_pieces_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama(3)
    found = []
    for most in (decoding.PASS_TOKENS, 2 * len(PROMPTS)):  # the second: two columns at a time
        monkeypatch.setattr(decoding, "PASS_TOKENS", most)
        decoder = BatchDecoder(model)
        passes = [
            decoder.forward(*left_pad(PROMPTS), keep=1),
            decoder.forward(torch.tensor([[1]] * len(PROMPTS))),
        ]
        decoder.forward(*left_pad(PROMPTS), keep=3)
        assert decoder.features is not None
        valid = left_pad(PROMPTS)[1]
        found.append((*passes, decoder.features[valid]))
    assert max(map(len, PROMPTS)) > 4
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_the_cache_takes_no_more_slots_than_will_be_needed() -> None:
    """Each decoder doubles its room, but the one that knows its rows' length stops there. The logits are the same."""
    model, rooms = small_llama(1), []
    decoders = BatchDecoder(model), BatchDecoder(model, 11)
    for tokens in ([[1, 2, 3, 4]] * 2, *[[[5]] * 2] * 7):
        found = [decoder.forward(torch.tensor(tokens)) for decoder in decoders]
        assert torch.equal(*found)
        rooms.append([decoder.cache.layers[0]._room[0].shape[2] for decoder in decoders])
    assert rooms == [[8, 8]] * 5 + [[18, 11]] * 3


def test_slots_taken_back_leave_no_trace() -> None:
    model = small_llama(1)
    decoder = BatchDecoder(model)
    decoder.forward(*left_pad(PROMPTS[:3]))
    decoder.forward(torch.tensor([[1, 2, 3]] * 3))
    decoder.take_back(torch.tensor([0, 2, 3]))
    decoder.select(torch.tensor([2, 0, 1]))
    logits = decoder.forward(torch.tensor([[4, 5]] * 3))
    texts = [[*PROMPTS[2], 4, 5], [*PROMPTS[0], 1, 2, 3, 4, 5], [*PROMPTS[1], 1, 4, 5]]
    assert decoder.lengths.tolist() == [len(text) for text in texts]
    with torch.inference_mode():
        for row, text in enumerate(texts):
            torch.testing.assert_close(
                logits[row], model(torch.tensor([text])).logits[0, -2:], atol=1e-4, rtol=1e-4
            )


def test_logits_at_equals_picking_from_all_logits() -> None:
    model = small_llama(2)
    tokens = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    keep = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    with torch.inference_mode():
        found = logits_at(model, keep, input_ids=tokens)
        torch.testing.assert_close(found, model(tokens).logits[keep])
        assert model(tokens).logits.shape == (3, 9, 60)  # the hook is gone


class Elsewhere:
    """Values on a second device, which is not here: they can be brought to the first one, and nothing else."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Tensor:
        return self.values.to(device)


def test_a_layer_on_another_device_keeps_the_rows_that_stay() -> None:
    layer, states = decoding._RoomyLayer(), torch.arange(24.0).view(3, 2, 2, 2)
    layer.update(states, states)
    rows: Any = Elsewhere(torch.tensor([2, 0]))
    layer.batch_select_indices(rows)
    assert torch.equal(layer.keys, states[[2, 0]])


class ElsewhereNorm(nn.Module):
    def forward(self, hidden: Tensor) -> Elsewhere:
        return Elsewhere(2 * hidden)


class OverTwoDevices(nn.Module):
    """Its only layer is on another device than its output layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.input_layernorm = ElsewhereNorm()
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.head = nn.Linear(4, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = nn.functional.one_hot(input_ids, 4).float()
        self.model.layers[0].input_layernorm(hidden)
        return SimpleNamespace(logits=self.head(hidden))


def test_states_of_a_layer_on_another_device() -> None:
    tokens = torch.tensor([[3, 1]])
    states, _ = states_at(OverTwoDevices(), torch.tensor([[False, True]]), tokens, early=(0,))
    hidden = nn.functional.one_hot(tokens, 4).float()
    assert torch.equal(states, torch.cat([2 * hidden, hidden], -1))
