"""The float model on calibration text: what each group of tensors bears, and what a rounded model keeps.

Sensitivity: one group at a time is rounded to four bits (the probe), and the KL divergence from the float model is measured. To
second order KL grows with the square of the error; so it is told as KL for a unit of error, and any other rounding of the group
is expected to cost that times its own error. The error is Σ E[x²] (w − w')², over a matrix's inputs x: E[x²] is llama.cpp's
importance matrix. In a table of tokens each row counts by its token's mean probability, since KL does so to second order (a logit
off by ε costs p ε²/2). Layers below the rounded one are not computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.core.errors import InputError
from edgespec.core.free_space import free_memory
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import corrected_ids, read_config
from edgespec_export.bits.texts import Text, Texts
from edgespec_export.gguf.to_gguf import Checkpoint

Array = np.ndarray[Any, Any]
BLOCK = 32  # weights of a block of the probe
FLOAT = 4  # bytes
ROWS = 8  # texts of one pass
COPIES = 1.5  # of the weights in memory: themselves, a rounded group or table, activations
# Weights of a layer's matrix whose error is measured: its rows are alike, and all matrices of a large model take minutes.
SAMPLED = 2**20
# Share of the mean below which no input's importance falls: one that these texts do not use may be used by others.
LEAST_IMPORTANCE = 0.01
_LAYER = re.compile(r"(.*\.layers\.(\d+))\.(.+)\.weight")
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv"}
_TOGETHER |= {"gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up"}


@dataclass(frozen=True)
class Group:
    """Matrices that are rounded alike. `layer`: None for embedding and output layer."""

    name: str
    tensors: tuple[str, ...]
    layer: int | None


@dataclass(frozen=True)
class Quality:
    """Of a rounded model against the float one: share of argmaxes kept, KL in nats, over so many positions."""

    top1: float
    kl: float
    positions: int


class Probe:
    """A model folder's float model with texts. Raises InputError where it does not fit in memory or is not finite."""

    _inside: torch.Tensor  # bool [B, T]: where the rows of the pass at hand have text, and no padding

    def __init__(self, folder: Path, texts: Texts) -> None:
        shape = ModelShape.from_config(read_config(folder))
        needed, free = int(COPIES * FLOAT * shape.parameters), free_memory()
        if free is not None and needed > free:
            raise InputError(
                f"choosing bits runs {folder} as floats, which takes {needed / 2**30:.1f} GiB of memory, and "
                f"{free / 2**30:.1f} GiB are free; choose a precision of one kind (int4, q4_k_m) or a machine with more"
            )
        self.folder, self.texts, self._stored = folder, texts, Checkpoint(folder)
        broken = [name for name, value in self.model.named_parameters() if not torch.isfinite(value).all()]
        if broken:
            raise InputError(
                f"{folder}: the tensor {broken[0]} has values that are no finite numbers (and {len(broken) - 1} others); "
                "fetch or train the model again"
            )
        self.groups = groups_of(self.weights)
        self.importance, self.likely = self._measured()
        self._held_out: list[torch.Tensor] | None = None

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        floats = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, **corrected_ids(self.folder)
        )
        return floats.eval()

    @cached_property
    def weights(self) -> dict[str, Array]:
        """The matrices [N, K] by name; what is written to them the model computes with."""
        named = self.model.named_parameters()
        return {name: value.detach().numpy() for name, value in named if value.dim() == 2}

    def release(self) -> None:
        """Give the model's memory back; it is loaded again when it is next needed."""
        for name in ("model", "weights"):
            self.__dict__.pop(name, None)

    def stride(self, name: str) -> int:
        """n where a matrix's error is measured on every n-th row; 1 for a table of tokens, whose rows are unlike."""
        return 1 if _LAYER.fullmatch(name) is None else max(1, self.weights[name].size // SAMPLED)

    def errors(self, name: str, rounded: Array, every: int = 1) -> Array:
        """Σ E[x²] (w − w')² of each row [N] of a matrix, in a table of tokens times how likely the token is.

        rounded: every n-th row, n = `every`; those between count like the one before them.
        """
        weight = self.weights[name]
        difference = np.square(rounded - weight[::every])
        importance = self.importance.get(name)
        rows = difference.sum(1) if importance is None else difference @ importance
        if _LAYER.fullmatch(name) is None and len(rows) == len(self.likely):
            rows = rows * self.likely
        return np.repeat(rows, every)[: len(weight)]

    def _measured(self) -> tuple[dict[str, Array], Array]:
        """E[x²] [K] of every matrix's input, each divided by its mean, but of those that only look rows up; and [V] the mean
        probability of each token, times V.
        """
        sums: dict[str, Any] = {}

        def add(name: str, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0][self._inside].double()
            sums[name] = sums.get(name, 0) + rows.square().sum(0)

        owners = {id(value): name for name, value in self.model.named_parameters()}
        total: Any = 0.0
        positions = 0
        with ExitStack() as hooks:
            for module in self.model.modules():
                if isinstance(module, torch.nn.Linear):
                    hook = partial(add, owners[id(module.weight)])
                    hooks.enter_context(module.register_forward_pre_hook(hook))
            for logits in self._logits(self.texts.calibration):
                total = total + torch.softmax(logits, -1).sum(0).double().numpy()
                positions += len(logits)
        importance = {}
        for name, squares in sums.items():
            mean = float(squares.mean())
            relative = (squares / mean).numpy() if mean > 0 else np.ones(len(squares))
            importance[name] = np.maximum(relative, LEAST_IMPORTANCE).astype(np.float32)
        return importance, np.maximum(len(total) * total / positions, LEAST_IMPORTANCE)

    @cached_property
    def sensitivities(self) -> dict[str, float]:
        """{group: KL in nats for a unit of error}."""
        found: dict[str, float] = {}
        texts = self.texts.measured
        wanted, outputs = self._remembered(texts)
        with progress("measure tensors", len(self.groups), "groups") as bar:
            for group in self.groups:
                rounded = {name: probed(self.weights[name]) for name in group.tensors}
                error = sum(float(self.errors(name, value).sum()) for name, value in rounded.items())
                with (
                    self._replaced(rounded.__getitem__, group.tensors),
                    self._from_layer(group.layer, outputs),
                ):
                    kl = _quality(self._logits(texts), wanted).kl
                found[group.name] = max(kl, 0.0) / error if error > 0 else 0.0
                bar.update(1)
        return found

    def quality(self, rounded: Callable[[str], Array], names: Sequence[str]) -> Quality:
        """Of the model with `rounded` matrices in place of those named, on the held-out texts. The weights are then as before."""
        if self._held_out is None:
            self._held_out = list(self._logits(self.texts.held_out))
        with self._replaced(rounded, names):
            return _quality(self._logits(self.texts.held_out), self._held_out)

    @contextmanager
    def _replaced(self, rounded: Callable[[str], Array], names: Sequence[str]) -> Iterator[None]:
        try:
            for name in names:
                self.weights[name][:] = rounded(name)
            yield
        finally:  # from the folder: a second copy of all weights would take their memory
            for name in names:
                self.weights[name][:] = self._stored.whole(name)

    def _logits(self, texts: Sequence[Text]) -> Iterator[torch.Tensor]:
        """Logits [positions, V] of a few texts at a time, in order."""
        for at in range(0, len(texts), ROWS):
            batch = texts[at : at + ROWS]
            width = max(len(text.tokens) for text in batch)
            self._inside = torch.arange(width) < torch.tensor([[len(text.tokens)] for text in batch])
            ids = torch.tensor([text.tokens + [0] * (width - len(text.tokens)) for text in batch])
            with torch.inference_mode():  # a causal model does not see the padding behind a text
                logits = self.model(ids, use_cache=False).logits
            yield torch.cat(
                [row[text.start - 1 : len(text.tokens) - 1] for row, text in zip(logits, batch, strict=True)]
            ).float()

    def _remembered(self, texts: Sequence[Text]) -> tuple[list[torch.Tensor], list[list[Any]]]:
        """The float model's logits, and what every layer gave for them."""
        layers = self.model.model.layers
        outputs: list[list[Any]] = [[] for _ in layers]
        with ExitStack() as hooks:
            for layer, kept in zip(layers, outputs, strict=True):
                hooks.enter_context(
                    layer.register_forward_hook(lambda module, inputs, output, kept=kept: kept.append(output))
                )
            return list(self._logits(texts)), outputs

    @contextmanager
    def _from_layer(self, layer: int | None, outputs: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Layers below give what they gave before."""
        below = list(self.model.model.layers)[: layer or 0]
        try:
            for module, before in zip(below, outputs, strict=False):
                kept = iter(before)
                module.forward = lambda *inputs, kept=kept, **options: next(kept)
            yield
        finally:
            for module in below:
                del module.forward


def groups_of(names: Mapping[str, Any]) -> list[Group]:
    """Matrices of one layer that share an input, and the embedding and output layer one by one."""
    found: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name.removesuffix(".weight"), None] = [name]
            continue
        stem, layer, part = match.groups()
        last = part.rpartition(".")[2]
        found.setdefault((f"{stem}.{_TOGETHER.get(last, last)}", int(layer)), []).append(name)
    return [Group(name, tuple(tensors), layer) for (name, layer), tensors in found.items()]


def probed(weight: Array) -> Array:
    """A matrix [N, K] rounded to four bits in blocks of 32, scale by the largest weight."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / 7
    scale[scale == 0] = 1
    rounded = np.rint(blocks / scale) * scale
    return np.ascontiguousarray(rounded.reshape(rows, -1)[:, :columns])


def _quality(seen: Iterable[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Quality:
    same, divergence, positions = 0, 0.0, 0
    for ours, theirs in zip(seen, wanted, strict=True):
        a, b = torch.log_softmax(ours, -1), torch.log_softmax(theirs, -1)
        divergence += float((b.exp() * (b - a)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(ours)
    return Quality(same / positions, divergence / positions, positions)
