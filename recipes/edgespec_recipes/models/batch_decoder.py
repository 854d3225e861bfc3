"""Decode a batch of rows that grow unevenly with one KV cache. In torch.

Knows nothing of drafting, sampling or prompts. Rows end together: before a pass the valid slots of each row are moved to the end
of the cache, where tokens were taken back. Models count slots, not positions, for their windows and chunks, so a slot without a
token in the middle would cost a row a token of its window. Any Hugging Face decoder with a DynamicCache can run here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer

from edgespec.core.errors import InputError
from edgespec_recipes.models.kept_positions import output_layer_sees


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
            old, self._room = self._room, []
            for index, states in enumerate((key_states, value_states)):
                self._room.append(states.new_empty(*states.shape[:-2], self._slots(total), states.shape[-1]))
                if old:
                    self._room[index][..., :past, :] = old[index][..., :past, :]
        for buffer, states in zip(self._room, (key_states, value_states), strict=True):
            buffer[..., past:total, :] = states
        self.keys, self.values = (buffer[..., :total, :] for buffer in self._room)
        return self.keys, self.values

    def _slots(self, total: int) -> int:
        """How many to make room for where `total` are wanted."""
        return max(total, min(2 * total, self.most or 2 * total))

    def keep(self, rows: Tensor, first: int) -> None:
        """Keep these rows (indices), in this order, and their slots from `first` on."""
        past = self.get_seq_length() - first
        own = rows.to(self.device)  # of a model over several GPUs, the layer may be on another one
        self._room = [buffer[..., first:, :][own] for buffer in self._room]
        self.keys, self.values = (buffer[..., :past, :] for buffer in self._room)

    def join(self, other: _RoomyLayer) -> None:
        """Put the rows of another cache behind the own ones. All end together; zeros fill the slots before the shorter ones."""
        slots = max(self.get_seq_length(), other.get_seq_length())
        spare = self._slots(slots) - slots
        self._room = [
            torch.cat([pad(states, (0, 0, slots - states.shape[-2], spare)) for states in pair])
            for pair in ((self.keys, other.keys), (self.values, other.values))
        ]
        self.keys, self.values = (buffer[..., :slots, :] for buffer in self._room)

    def reorder(self, slots: Tensor) -> None:
        """Keep these slots [B, S] of each row (indices), in this order."""
        index = slots.to(self.device)[:, None, :, None]
        self._room = [
            states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (self.keys, self.values)
        ]
        self.keys, self.values = self._room


PASS_TOKENS = 4096  # of one pass: buffers of more are slower to make than they are to fill
ACCELERATOR_TOKENS = 2**16  # of a 7B model's widest layer they take 1.4 GiB in bf16


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

    @property
    def slots(self) -> int:
        """Tokens of the longest row, with those that fill the rectangle."""
        return 0 if self.mask is None else self.mask.shape[1]

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
            output_layer_sees(self.model, lambda hidden: hidden[:, -keep:].contiguous()) as seen,
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
        """Keep only these rows of the batch (indices), in this order, and of the slots that none of them uses the last one."""
        assert self.mask is not None
        mask = self.mask[rows]
        first = max(0, int(mask.any(0).long().argmax()) - 1)
        for layer in self.cache.layers:
            layer.keep(rows, first)
        self.mask, self.lengths = mask[:, first:], self.lengths[rows]

    def join(self, other: BatchDecoder) -> None:
        """Put the rows of another decoder of the same model behind the own ones."""
        assert self.mask is not None
        assert other.mask is not None
        for layer, others in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.join(others)
        slots = max(self.mask.shape[1], other.mask.shape[1])
        self.mask = torch.cat([pad(mask, (slots - mask.shape[1], 0)) for mask in (self.mask, other.mask)])
        self.lengths = torch.cat([self.lengths, other.lengths])
