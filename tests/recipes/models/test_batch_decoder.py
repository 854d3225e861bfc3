"""A batch of rows with one cache against one row at a time, without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgespec_recipes.models import batch_decoder
from edgespec_recipes.models.batch_decoder import BatchDecoder, left_pad
from elsewhere import Elsewhere
from small_llama import PROMPTS, small_llama


def test_a_long_rectangle_in_pieces_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama(3)
    found = []
    for most in (batch_decoder.PASS_TOKENS, 2 * len(PROMPTS)):  # the second: two columns at a time
        monkeypatch.setattr(batch_decoder, "PASS_TOKENS", most)
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


def test_rows_that_join_are_decoded_as_if_alone() -> None:
    """Shorter and longer than those that are there; then the longest leaves, and the slots that none uses go with it."""
    model, texts = small_llama(1), [PROMPTS[0][:2], PROMPTS[1], [*range(1, 10)], [7, 8]]
    decoder, others = BatchDecoder(model, 14), BatchDecoder(model, 14)
    decoder.forward(*left_pad(texts[:2]))
    others.forward(*left_pad(texts[2:]))
    decoder.join(others)
    assert decoder.slots == 9
    rows = [0, 1, 2, 3]
    for step, leaves in enumerate(([], [2], [0])):
        rows = [row for row in rows if row not in leaves]
        if leaves:
            decoder.select(torch.tensor([place for place in range(len(rows) + 1) if place != leaves[0]]))
        logits = decoder.forward(torch.tensor([[20 + step]] * len(rows)))[:, -1]
        texts = [[*text, 20 + step] for text in texts]
        with torch.inference_mode():
            alone = torch.stack([model(torch.tensor([texts[row]])).logits[0, -1] for row in rows])
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
    assert decoder.slots == 1 + decoder.lengths.max() == 6


def test_a_layer_on_another_device_keeps_the_rows_that_stay() -> None:
    layer, states = batch_decoder._RoomyLayer(), torch.arange(24.0).view(3, 2, 2, 2)
    layer.update(states, states)
    rows: Any = Elsewhere(torch.tensor([2, 0]))
    layer.keep(rows, 0)
    assert torch.equal(layer.keys, states[[2, 0]])
