"""Sample responses to many prompts at once, in torch: rows that end leave their places to the next prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgespec_recipes.losses.distributions import draw, token_at, warp
from edgespec_recipes.models.batch_decoder import BatchDecoder, left_pad
from edgespec_recipes.stored.kept_states import KeptStates

LEAVE = 8  # an eighth of the rows: to copy the others' cache costs two or three steps; kept, an eighth of every later one is idle
COME = 2  # half of the places: each row attends over the slots of the longest one, so rows that begin together cost least


class _Places:
    """The rows that are decoded together. Of each: `rows` [B], the number of its prompt; `active` [B], whether it goes on;
    `logits` [B, V] of its next token.
    """

    logits: Tensor
    decoder: BatchDecoder

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], most: int, states: KeptStates | None
    ) -> None:
        self.model, self.prompts, self.most, self.states = model, prompts, most, states
        self.rows = torch.zeros(0, dtype=torch.long, device=model.device)
        self.active, self.begun = self.rows.bool(), 0

    def fill(self, at_once: int) -> bool:
        """Give the free ones of `at_once` places to the next prompts, once they are half. Whether there is a row then."""
        free = at_once - len(self.rows)
        come = self.prompts[self.begun :][: free if free * COME >= at_once else 0]
        if come:
            numbers = torch.arange(self.begun, self.begun + len(come), device=self.rows.device)
            decoder = BatchDecoder(self.model, self.most)
            tokens, valid = self._rectangle(come)
            logits = decoder.forward(tokens, valid, keep=1)[:, -1]
            self._read(numbers, decoder.features, valid)
            if len(self.rows):
                self.decoder.join(decoder)
                self.logits = torch.cat([self.logits, logits])
            else:
                self.decoder, self.logits = decoder, logits
            self.rows, self.begun = torch.cat([self.rows, numbers]), self.begun + len(come)
            self.active = torch.cat([self.active, torch.ones_like(numbers, dtype=torch.bool)])
        return len(self.rows) > 0

    def step(self, tokens: Tensor, active: Tensor) -> None:
        """Append a token [B] to every row. Those that do not go on leave, once they are an eighth of all or the cache is full."""
        self.active = active
        full = self.decoder.slots >= self.most
        if full or active.sum() * LEAVE <= len(active) * (LEAVE - 1):
            left = active.nonzero()[:, 0]
            self.decoder.select(left)
            self.rows, self.active, tokens = self.rows[left], active[left], tokens[left]
        if len(self.rows):
            self.logits = self.decoder.forward(tokens[:, None])[:, -1]
            self._read(self.rows, self.decoder.features, self.active[:, None])

    def _read(self, rows: Tensor, features: Tensor | None, valid: Tensor) -> None:
        if self.states is not None and features is not None:
            self.states.read(rows.tolist(), features, valid)

    def _rectangle(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """`left_pad`, with a slot that no row uses where transformers would drop a mask that hides nothing.

        Without a mask, torch is several times slower at grouped queries of one token in bf16.
        """
        tokens, valid = left_pad(prompts)
        if valid.all() and self.model.device.type == "cpu" and self.model.dtype == torch.bfloat16:
            tokens, valid = (pad(part, (1, 0)) for part in (tokens, valid))
        return tokens, valid


def responses(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    at_once: int,
    top_p: float,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    stops: Sequence[int],
    min_p: float = 0.0,
    states: KeptStates | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Plain autoregressive responses: (the prompt's number, tokens) in the order in which they end; a stop token is kept.

    `at_once` rows are decoded together. Those that have ended leave the batch once they are an eighth of it, and the next prompts
    come when half of the places are free (continuous batching; Orca, Yu et al. 2022). Random numbers come from `generator` (of
    the model's device), or are given: `noise` [prompts, max_new_tokens] (float64, from 0 to below 1), one for each token. With a
    generator the result depends on the generator's state and on which prompts come together. With noise each response depends on
    its own numbers (and on rounding, which the other prompts of the batch change). Either way: on the same number of threads.
    `states` is told of every token that is read and of every distribution that a token is drawn from.
    """
    assert (generator is None) is not (noise is None)
    heat = torch.tensor(temperatures, device=model.device)
    found: list[list[int]] = [[] for _ in prompts]
    places = _Places(model, prompts, max(map(len, prompts)) + max_new_tokens, states)
    while places.fill(at_once):
        if states is not None:
            states.drawn(places.rows[places.active].tolist(), places.logits[places.active])
        probabilities = warp(places.logits, heat[places.rows], top_p, min_p)
        rows = places.rows.tolist()
        if noise is None:
            assert generator is not None
            drawn = draw(probabilities, generator)
        else:  # of a row that has ended, any number
            counts = [min(len(found[row]), max_new_tokens - 1) for row in rows]
            drawn = token_at(probabilities, noise[places.rows, counts])
        active = places.active.tolist()
        for place, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            if not active[place]:
                continue
            found[row].append(token)
            if token in stops or len(found[row]) == max_new_tokens:
                active[place] = False
                yield row, found[row]
        places.step(drawn, torch.tensor(active, device=model.device))


def sample_responses(
    model: Any, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], **how: Any
) -> list[list[int]]:
    """The `responses` to one batch of prompts, in their order; `how` are the other arguments of `responses`."""
    found = dict(responses(model, prompts, temperatures, at_once=len(prompts), **how))
    return [found[number] for number in range(len(prompts))]
