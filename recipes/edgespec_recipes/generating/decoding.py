"""Decode a batch of rows that grow unevenly with one KV cache, and sample from warped distributions. In torch.

Knows nothing of drafting, files or prompts. Rows end together: before a pass the valid slots of each row are moved to the end of
the cache, where tokens were taken back. Models count slots, not positions, for their windows and chunks, so a slot without a
token in the middle would cost a row a token of its window. Any Hugging Face decoder with a DynamicCache can run here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer

from edgespec.core.errors import InputError, NoNumbers
from edgespec_recipes.losses.distributions import draw, token_at, warp
from edgespec_recipes.models.packing import fitted
from edgespec_recipes.stored.top_k import records_of
from edgespec_recipes.stored.written_states import FEATURES, RECORDS


@contextmanager
def _output_layer_sees(model: Any, part: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Give the output layer only `part` of the hidden states [B, T, H]. Yields a list that receives them all.

    It stays empty for a model without that layer.
    """
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    if head is None:
        yield seen
        return

    def hook(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(given[0])
        return part(given[0]), *given[1:]

    handle = head.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def logits_at(model: Any, keep: Tensor, **inputs: Any) -> Tensor:
    """Logits [n, V] at the n positions where `keep` [B, T] is true, in row order.

    The output layer is by far the largest product of a small model and its result the largest tensor, so positions nobody
    asks for are dropped before it. `model` may be wrapped (DDP): the hook sits on the inner module.
    """
    inner = getattr(model, "module", model)
    given = fitted(inner, inputs)
    with _output_layer_sees(inner, lambda hidden: hidden[keep]) as seen:
        logits: Tensor = model(**given, use_cache=False).logits
    return logits if seen else logits[keep]


def states_at(
    model: Any, keep: Tensor, input_ids: Tensor, early: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(hidden states [B, T, G], `logits_at` of the kept positions).

    The states are what the attention of each of the `early` layers, in rising order, reads, and then what the output layer reads:
    all behind their norms. Raises InputError where the layers are not of Llama's form.
    """
    below: list[Tensor] = []
    try:
        norms = [model.model.layers[layer].input_layernorm for layer in early]
    except (AttributeError, IndexError) as error:
        raise InputError(
            f"drafter.features is 'three', and a {model.config.model_type} model's layers are not of Llama's form ({error}); "
            "give --drafter.features last"
        ) from error
    with ExitStack() as hooks, torch.inference_mode():
        for norm in norms:
            handle = norm.register_forward_hook(lambda _norm, _inputs, states: below.append(states))
            hooks.callback(handle.remove)
        seen = hooks.enter_context(_output_layer_sees(model, lambda hidden: hidden[keep]))
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    # of a model over several GPUs, a layer may be on another one than the output layer
    return torch.cat([*(states.to(seen[0].device) for states in below), seen[0]], -1), logits


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(tokens [B, S] int64, valid [B, S] bool) with the rows aligned at their ends."""
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    tokens = padded([torch.tensor(row, dtype=torch.long) for row in rows])
    return tokens, padded([torch.ones(len(row), dtype=torch.bool) for row in rows])


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer in buffers with room to grow: DynamicLayer copies everything for every token.

    `most`: slots that will be needed, where that is known; the room never exceeds it.
    """

    is_initialized: bool

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most = most

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        past = self.get_seq_length()
        total = past + key_states.shape[-2]
        if not self.is_initialized:
            # what lazy_initialization sets, whose arguments are others in transformers 4
            self.dtype, self.device = key_states.dtype, key_states.device
            self._room: list[Tensor] = []
            self.is_initialized = True
        if not self._room or self._room[0].shape[-2] < total:
            room = max(total, min(2 * total, self.most or 2 * total))
            old, self._room = self._room, []
            for index, states in enumerate((key_states, value_states)):
                self._room.append(states.new_empty(*states.shape[:-2], room, states.shape[-1]))
                if old:
                    self._room[index][..., :past, :] = old[index][..., :past, :]
        for buffer, states in zip(self._room, (key_states, value_states), strict=True):
            buffer[..., past:total, :] = states
        self.keys, self.values = (buffer[..., :total, :] for buffer in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        past = self.get_seq_length()
        own = indices.to(self.device)  # of a model over several GPUs, the layer may be on another one
        self._room = [buffer[own] for buffer in self._room]
        self.keys, self.values = (buffer[..., :past, :] for buffer in self._room)

    def reorder(self, slots: Tensor) -> None:
        """Keep these slots [B, S] of each row (indices), in this order."""
        index = slots.to(self.device)[:, None, :, None]
        self._room = [
            states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (self.keys, self.values)
        ]
        self.keys, self.values = self._room


LEAVE = 8  # an eighth of the rows: copying the others' cache costs two or three steps, and each one after is an eighth cheaper
PASS_TOKENS = 4096  # of one pass: buffers of more are slower to make than they are to fill
ACCELERATOR_TOKENS = 2**16  # of a 7B model's widest layer they take 1.4 GiB in bf16


class KeptStates:
    """What is kept of the responses to one batch of prompts: records of `top_k` tokens, `features`; the `rows` are prompts."""

    def __init__(self, prompts: int, top_k: int, features: bool) -> None:
        self.top_k, self.features = top_k, features
        self._records: list[list[np.ndarray]] = [[] for _ in range(prompts)]
        self._features: list[list[np.ndarray]] = [[] for _ in range(prompts)]

    def read(self, rows: list[int], features: Tensor, valid: Tensor) -> None:
        """Last hidden states [B, n, H] of the tokens that the rows have just read, where `valid` [B, n]."""
        if not self.features:
            return
        states = features.to(torch.float16).cpu().numpy()
        for row, of_row, counts in zip(rows, states, valid.cpu().numpy(), strict=True):
            self._features[row].append(of_row[counts])

    def drawn(self, rows: list[int], logits: Tensor) -> None:
        """Logits [B, V] from which the rows' next tokens are drawn. Raises NoNumbers where they are NaN."""
        if logits.amax().isnan():  # a largest entry is NaN where any is
            raise NoNumbers("the target")
        if not self.top_k:
            return
        found = records_of(logits, self.top_k)
        for place, row in enumerate(rows):
            self._records[row].append(found[place : place + 1])

    def of(self, prompt: int) -> dict[str, np.ndarray]:
        """{kind: array} of one response, of the kinds that are wanted; see written_states.py."""
        found = {RECORDS: self._records[prompt], FEATURES: self._features[prompt]}
        return {kind: np.concatenate(arrays) for kind, arrays in found.items() if arrays}


class BatchDecoder:
    """A model and the KV cache of a batch of rows. `lengths` [B] is the number of valid tokens of every row.

    `features` [B, n, H] are the last hidden states of what was appended last, as the output layer reads them; None for a model
    without such a layer.
    """

    def __init__(self, model: Any, most: int | None = None) -> None:
        """`most`: slots of a row that will be needed, where that is known: the cache takes no more memory than they do."""
        self.model, self.device = model, model.device
        self.features: Tensor | None = None
        self.cache = Cache(layer_class_to_replicate=partial(_RoomyLayer, most))
        self.mask: Tensor | None = None
        self.lengths = torch.zeros(0, dtype=torch.long)
        kinds = set(getattr(model.config, "layer_types", None) or ())
        if getattr(model, "_is_stateful", False) or kinds & {"conv", "linear_attention"}:
            raise InputError(
                f"a {model.config.model_type} model has recurrent or convolution layers, which forget no token; decoding in "
                "torch needs attention in every layer. Run it from a file: --inference.source file --inference.file FILE.gguf"
            )
        self._takes = inspect.signature(model.forward).parameters

    def forward(self, tokens: Tensor, valid: Tensor | None = None, keep: int | None = None) -> Tensor:
        """Append tokens [B, n]; float32 logits [B, keep, V] of the last `keep` (all by default).

        Slots that are not `valid` fill a rectangle: no row ever sees them and they take no position. They come before the
        valid ones of their row.
        """
        tokens = tokens.to(self.device)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid.to(self.device)
        if self.mask is None:
            self.mask = torch.zeros(len(tokens), 0, dtype=torch.bool, device=self.device)
            self.lengths = torch.zeros(len(tokens), dtype=torch.long, device=self.device)
        keep = keep or tokens.shape[1]
        most = PASS_TOKENS if self.device.type == "cpu" else ACCELERATOR_TOKENS
        width = max(1, most // len(tokens))
        last = (tokens.shape[1] - keep) // width * width  # the last piece has all that is kept
        pieces = [(start, start + width, 1) for start in range(0, last, width)]
        features: list[Tensor] = []
        for start, end, kept in [*pieces, (last, tokens.shape[1], keep)]:
            logits, seen = self._pass(tokens[:, start:end], valid[:, start:end], kept)
            features += seen
        self.features = torch.cat(features, 1) if features else None
        return logits

    def _pass(self, tokens: Tensor, valid: Tensor, keep: int) -> tuple[Tensor, list[Tensor]]:
        """(logits [B, keep, V], [hidden states [B, n, H] before the output layer] or [])."""
        assert self.mask is not None
        self._close_gaps(self.mask)
        positions = (self.lengths[:, None] + valid.cumsum(-1) - 1).clamp_min(0)
        self.mask = torch.cat([self.mask, valid], 1)
        self.lengths = self.lengths + valid.sum(1)
        more = {"position_ids": positions} if "position_ids" in self._takes else {}
        # contiguous: of a slice, torch multiplies every row by a copy of the layer's weights that it makes for it
        with (
            torch.inference_mode(),
            _output_layer_sees(self.model, lambda hidden: hidden[:, -keep:].contiguous()) as seen,
        ):
            output = self.model(
                input_ids=tokens,
                attention_mask=self.mask.long(),
                past_key_values=self.cache,
                use_cache=True,
                **more,
            )
            logits: Tensor = output.logits[:, -keep:].float()
        return logits, seen

    def _close_gaps(self, mask: Tensor) -> None:
        """Move the valid slots of every row to the end of the cache, where one has others behind or between them."""
        slots = torch.arange(mask.shape[1], device=self.device)
        if torch.equal(mask, slots >= mask.shape[1] - self.lengths[:, None]):
            return
        longest = int(self.lengths.max())
        order = mask.long().argsort(dim=1, stable=True)[:, mask.shape[1] - longest :]
        for layer in self.cache.layers:
            layer.reorder(order)
        self.mask = mask.gather(1, order)

    def take_back(self, counts: Tensor) -> None:
        """Forget the last `counts` [B] slots of every row; the slots must have been valid in the pass before."""
        assert self.mask is not None
        slots = self.mask.shape[1]
        self.mask = self.mask & (torch.arange(slots, device=self.device) < (slots - counts)[:, None])
        self.lengths = self.lengths - counts

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch (indices), in this order."""
        assert self.mask is not None
        self.cache.batch_select_indices(rows)
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]


def sample_responses(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    top_p: float,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    stops: Sequence[int],
    min_p: float = 0.0,
    states: KeptStates | None = None,
) -> list[list[int]]:
    """Plain autoregressive responses to one batch of prompts; an ending stop token is kept.

    Rows that have ended leave the batch once they are an eighth of it. Random numbers come from `generator` (of the model's
    device), or are given: `noise` [prompts, max_new_tokens] (float64, from 0 to below 1), one for each token. With a generator
    the result depends on the generator's state and on which prompts come together. With noise each response depends on its own
    numbers (and on rounding, which the other prompts of the batch change). Either way: on the same number of threads.
    `states` is told of every token that is read and of every distribution that a token is drawn from.
    """
    assert (generator is None) is not (noise is None)
    decoder = BatchDecoder(model, max(map(len, prompts)) + max_new_tokens)
    device = model.device
    heat = torch.tensor(temperatures, device=device)
    ends = torch.tensor(list(stops), dtype=torch.long, device=device)
    responses: list[list[int]] = [[] for _ in prompts]
    rows = torch.arange(len(prompts), device=device)  # which prompt each row of the batch answers
    active = torch.ones(len(prompts), dtype=torch.bool, device=device)
    first, valid = left_pad(prompts)
    logits = decoder.forward(first, valid, keep=1)
    for step in range(max_new_tokens):
        if states is not None:
            alive = active.nonzero()[:, 0]
            if decoder.features is not None:
                read = valid if not step else torch.ones_like(rows, dtype=torch.bool)[:, None]
                states.read(rows[alive].tolist(), decoder.features[alive], read.to(device)[alive])
            states.drawn(rows[alive].tolist(), logits[alive, -1])
        probabilities = warp(logits[:, -1], heat[rows], top_p, min_p)
        if noise is not None:
            tokens = token_at(probabilities, noise[rows, step])
        else:
            assert generator is not None
            tokens = draw(probabilities, generator)
        for row, token, goes_on in zip(rows.tolist(), tokens.tolist(), active.tolist(), strict=True):
            if goes_on:
                responses[row].append(token)
        active &= ~torch.isin(tokens, ends)
        if not active.any() or step == max_new_tokens - 1:
            break
        if active.sum() * LEAVE <= len(active) * (LEAVE - 1):
            left = active.nonzero()[:, 0]
            decoder.select(left)
            rows, tokens, active = rows[left], tokens[left], active[left]
        logits = decoder.forward(tokens[:, None])
    return responses
