"""Logits and states at some positions against all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from edgespec_recipes.models.kept_positions import logits_at, states_at
from elsewhere import Elsewhere
from small_llama import small_llama
from torch import Tensor, nn


def test_logits_at_equals_picking_from_all_logits() -> None:
    model = small_llama(2)
    tokens = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    keep = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    with torch.inference_mode():
        found = logits_at(model, keep, input_ids=tokens)
        torch.testing.assert_close(found, model(tokens).logits[keep])
        assert model(tokens).logits.shape == (3, 9, 60)  # the hook is gone


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
