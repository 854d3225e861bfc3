"""A feature drafter in torch: a head of one or two decoder layers that reads the target's last hidden states (EAGLE and its kin).

Slot s reads the newest token x_s and the feature f_{s−1}, the target's last hidden state (behind its final norm) at the token
before, and gives a distribution of x_{s+1} and a feature g_s of its own. A draft's first token comes from a true feature. Where
the target has not been yet, the slot reads the head's own g_{s−1} (Li et al. 2024, EAGLE, section 3).

    x = fc([norm(e(x_s)); norm(f_{s−1})])  ->  decoder layers  ->  norm = g_s  ->  logits [V'] = W g_s

Where the target gives three layers' states (EAGLE-3, section 3.1), a true feature is one matrix times all of them; the head's own
features go on as they are. It drafts over the target's most frequent V' tokens. The embedding e is the target's own and is not
part of the head.
`unrolled` is training: several of the head's own steps at every position at once (Li et al. 2025, EAGLE-3, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from edgespec_runtime.engines.vocabulary import VOCABULARY, Vocabulary, read_vocabulary, write_vocabulary
from torch import Tensor, nn

from edgespec.core.errors import InputError
from edgespec.core.files import whole_folder, write_json
from edgespec.core.no_room import memory_error
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import (
    HEAD_FILE,
    JOINING,
    WEIGHTS,
    head_numbers,
    head_weights,
    shape_of_drafter,
    target_layers,
)
from edgespec_recipes.models.vocabulary import SubsetHead


class _Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, slots: Tensor, theta: float) -> Tensor:
    """RoPE of [B, T, heads, d] at `slots` [T], halves rotated against each other (Su et al. 2021; Llama's layout)."""
    size = x.shape[-1]
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    angles = slots[:, None].float() * rates
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return x * cos + turned * sin


class HeadLayer(nn.Module):
    """A Llama decoder layer whose attention takes its keys from several unrolled steps."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, size = shape.hidden, shape.head_dim
        self.shape = shape
        self.input_layernorm = _Norm(width, shape.rms_norm_eps)
        self.post_attention_layernorm = _Norm(width, shape.rms_norm_eps)
        self.q_proj = nn.Linear(width, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, width, bias=False)
        self.gate_proj = nn.Linear(width, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(width, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, width, bias=False)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]], same: Tensor | None = None) -> Tensor:
        """One unrolled step of x [B, T, H]. `past`: keys and values [B, T, kv heads, d] of the steps before; these are added.

        At step k (from 0) slot s sees the true slots up to s − k, and of the steps j = 1 .. k the slot s − k + j alone.
        `same` (bool [B, 1, T, T]): which slots are of one text, where a row holds several.
        """
        shape, (batch, length, _) = self.shape, x.shape
        y, slots = self.input_layernorm(x), torch.arange(x.shape[1], device=x.device)

        def split(values: Tensor, heads: int) -> Tensor:
            return values.view(batch, length, heads, shape.head_dim)

        q = rotate(split(self.q_proj(y), shape.heads), slots, shape.rope_theta)
        k = rotate(split(self.k_proj(y), shape.kv_heads), slots, shape.rope_theta)
        past.append((k, split(self.v_proj(y), shape.kv_heads)))
        step = len(past) - 1
        seen = slots[None, :] <= slots[:, None] - step
        if same is not None:
            seen = seen & same
        alone = torch.eye(length, dtype=torch.bool, device=x.device).expand(*seen.shape[:-2], -1, -1)
        # one call for all steps: it costs (step + 1) times the products, and never makes the weights [B, heads, T, T]
        keys, values = (
            torch.cat([first, *(_later(values, step - j) for j, values in enumerate(later, 1))], 1)
            for first, *later in zip(*past, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=torch.cat([seen, *[alone] * step], -1),
            enable_gqa=shape.heads != shape.kv_heads,
        ).transpose(1, 2)
        x = x + self.o_proj(mixed.reshape(batch, length, -1))
        y = self.post_attention_layernorm(x)
        left: Tensor = x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return left


def _later(values: Tensor, by: int) -> Tensor:
    """[B, T, ...] moved `by` slots later; zeros come in."""
    if not by:
        return values
    return functional.pad(values, (0, 0) * (values.dim() - 2) + (by, 0))[:, : values.shape[1]]


class FeatureHead(nn.Module):
    """The head; `lm_head` knows which of the target's tokens its V' output rows belong to.

    `early`: the target's layers whose states are read beside the last one. What the target gives of a token has a state of each.
    """

    def __init__(self, shape: ModelShape, vocabulary: Vocabulary, early: tuple[int, ...] = ()) -> None:
        super().__init__()
        if len(vocabulary.ids) != shape.vocab_size:
            raise InputError(
                f"the head's output has {shape.vocab_size} rows and its vocabulary {len(vocabulary.ids)} tokens; "
                "build the drafter again"
            )
        self.shape, self.vocabulary, self.early = shape, vocabulary, early
        self.embedding_norm = _Norm(shape.hidden, shape.rms_norm_eps)
        self.feature_norm = _Norm(shape.hidden, shape.rms_norm_eps)
        self.reduce: nn.Module = nn.Identity()
        if early:
            self.reduce = nn.Linear(shape.hidden * (1 + len(early)), shape.hidden, bias=False)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape) for _ in range(shape.layers)])
        self.norm = _Norm(shape.hidden, shape.rms_norm_eps)
        rows = torch.empty(shape.vocab_size, shape.hidden)
        self.lm_head = SubsetHead(nn.Parameter(nn.init.kaiming_uniform_(rows, a=math.sqrt(5))), vocabulary)

    @property
    def multiplications(self) -> int:
        """Multiplications of one draft step without attention: its floor in bytes at 8 bits."""
        return sum(w.numel() for name, w in self.named_parameters() if w.dim() > 1 and name != JOINING)

    def unrolled(
        self, embeddings: Tensor, features: Tensor, steps: int, documents: Tensor | None = None
    ) -> Iterator[Tensor]:
        """g [B, T, H] of each of `steps` own steps, from embeddings e(x_s) [B, T, H] and what the target gave at the
        tokens before [B, T, G].

        Step k (from 0) is what a draft's token k + 1 is drawn from at a slot whose last k features are the head's own. The first
        k slots of a text have no such past: leave them out of a loss. Several steps need features of the head's own width.
        `documents` [B, T]: the number of each slot's text, where a row holds several; each sees itself only.
        """
        same = None if documents is None else (documents[:, None, :, None] == documents[:, None, None, :])
        pasts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        known, features = self.embedding_norm(embeddings), self.reduce(features)
        for step in range(steps):
            x = self.fc(torch.cat([known, self.feature_norm(features)], -1))
            for layer, past in zip(self.layers, pasts, strict=True):
                x = layer(x, past, same)
            own = self.norm(x)
            yield own
            if step + 1 < steps:
                features = _later(own, 1)


def save_head(head: FeatureHead, folder: Path, provenance: dict[str, Any]) -> None:
    """Write head.json, model.safetensors (float32), vocabulary.json: whole or not at all. `provenance`: the target's hash ..."""
    from safetensors.torch import save_file

    with whole_folder(folder) as place:
        weights = {name: value.detach().float().contiguous() for name, value in head.state_dict().items()}
        save_file(weights, place / WEIGHTS, metadata={"format": "pt"})
        write_json(place / HEAD_FILE, {"shape": head_numbers(head.shape, head.early), **provenance})
        write_vocabulary(place / VOCABULARY, head.vocabulary)


def load_head(folder: Path) -> FeatureHead:
    """Raises InputError where the folder holds no head, or weights of another shape, or memory is used up."""
    if not (folder / HEAD_FILE).is_file():
        raise InputError(f"{folder} has no {HEAD_FILE}; give the folder of a head")
    try:
        vocabulary = read_vocabulary(folder / VOCABULARY, InputError)
        head = FeatureHead(shape_of_drafter(folder), vocabulary, target_layers(folder))
        weights = {name: torch.from_numpy(value) for name, value in head_weights(folder).items()}
        head.load_state_dict(weights)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]  # torch's has several lines
        raise memory_error(error) or InputError(
            f"{folder} is not a head: {why}; build the drafter again"
        ) from error
    return head
