"""An exported file against its checkpoint and against torch, where the model does not fit in memory: one layer at a time.

The file's weights are read back in order. Each is compared with the checkpoint's, and each layer, as soon as all of it
is there, is run in torch (float32) on the prompts. Memory holds one layer and what came before its turn. What the engine
says to the same prompts must be what torch says with the file's own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.pair.bundle import load_engine
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.families import family_for
from edgespec.core.shapes import ModelShape
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.by_layers import check_alike
from edgespec_export.onnx.repeat import layer_of
from edgespec_export.verify.file_check import BLOCK, Passage, fed, logit_distance, relative
from edgespec_export.verify.readback import Weights, weights_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StreamedCheck:
    """weights: largest relative distance (root mean square) of a tensor from the checkpoint's, and of which. engine: that of the
    engine's centred logits from torch's with the file's weights; block: that of logits of four tokens at once from single steps;
    top1: share of positions where engine and torch agree on the most probable token."""

    weights: float
    worst: str
    engine: float
    block: float
    top1: float
    positions: int


def check_streamed(
    weights: Weights, engine: Engine, model_folder: Path, prompts: Sequence[list[int]]
) -> StreamedCheck:
    """Hold a file (its `weights` in the engine's order and the engine itself) against the model it was made from.

    Raises InputError for a family whose layers need more than the layer before.
    """
    distance = _Distance(Checkpoint(model_folder))
    expected = streamed_logits(distance.watched(weights), model_folder, prompts)
    ours = np.concatenate(expected)
    model = CachedEngine(engine)
    theirs, steps, blocks = (
        np.concatenate([fed(model, Passage(prompt), count) for prompt in prompts])
        for count in (engine.block_length, 1, BLOCK)
    )
    return StreamedCheck(
        weights=distance.largest,
        worst=distance.worst,
        engine=logit_distance(theirs, ours),
        block=logit_distance(blocks, steps),
        top1=float((theirs.argmax(-1) == ours.argmax(-1)).mean()),
        positions=len(ours),
    )


class _Distance:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.largest, self.worst = checkpoint, 0.0, ""

    def watched(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            difference = size = 0.0
            at = 0
            for piece in self.checkpoint.pieces(name):
                part = tensor[at : at + len(piece)]
                difference += float(np.square(part - piece, dtype=np.float64).sum())
                size += float(np.square(piece, dtype=np.float64).sum())
                at += len(piece)
            error = relative(difference, size)
            if np.isnan(error) or error > self.largest:
                self.largest, self.worst = error, name
            yield name, tensor


@torch.inference_mode()
def streamed_logits(weights: Weights, model_folder: Path, prompts: Sequence[list[int]]) -> list[Array]:
    """Logits [n, V] float32 of every prompt in torch with these weights, one layer in memory at a time.

    Weights of later layers that come early wait in memory. Raises InputError for a family that is not known.
    """
    model, layers = _one_layer(model_folder)
    inner, last_norm = model.model, model.model.norm
    inner.norm = torch.nn.Identity()
    wanted = set(inner.layers[0].state_dict())
    waiting = _zero_biases(model_folder)
    rest: dict[str, Tensor] = {}
    states: list[Tensor] = []
    done = 0
    for name, array in weights:
        tensor, layer = torch.from_numpy(np.require(array, requirements=["C", "W"])), layer_of(name)
        if layer is None:
            rest[name] = tensor
            if name == "model.embed_tokens.weight":
                states = [torch.nn.functional.embedding(torch.tensor([ids]), tensor) for ids in prompts]
        else:
            waiting.setdefault(layer, {})[name.partition(f"layers.{layer}.")[2]] = tensor
        while states and done < layers and wanted <= waiting.get(done, {}).keys():
            inner.layers[0].load_state_dict(waiting.pop(done), assign=True)
            states = [inner(inputs_embeds=state, use_cache=False).last_hidden_state for state in states]
            done += 1
    if done < layers:
        raise InputError(f"the file has {done} whole layers of {layers}; export it again")
    last_norm.load_state_dict({"weight": rest["model.norm.weight"]}, assign=True)
    head = rest.get("lm_head.weight", rest["model.embed_tokens.weight"])
    return [torch.nn.functional.linear(last_norm(state), head)[0].numpy() for state in states]


def _zero_biases(model_folder: Path) -> dict[int, dict[str, Tensor]]:
    """The biases of each layer that are zero, which an ONNX file goes without."""
    checkpoint = Checkpoint(model_folder)
    found: dict[int, dict[str, Tensor]] = {}
    for name in checkpoint:
        layer = layer_of(name) if name.endswith(".bias") else None
        if layer is not None and not any(piece.any() for piece in checkpoint.pieces(name)):
            bias = torch.zeros(checkpoint.shape(name))
            found.setdefault(layer, {})[name.partition(f"layers.{layer}.")[2]] = bias
    return found


def _one_layer(model_folder: Path) -> tuple[Any, int]:
    """(the model with a single layer and no weights to speak of, how many layers it has)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False, local_files_only=True)
    family_for("alike_layers", "the check by layers", {"model_type": config.model_type}, model_folder)
    check_alike(model_folder, "the check by layers")
    small = deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 8, None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    return AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval(), config.num_hidden_layers


def opened(path: Path, shape: ModelShape, context: int) -> tuple[Weights, Engine]:
    """(weights, engine) of a GGUF file or an ONNX folder."""
    engine = LLAMACPP if path.is_file() else ONNXRUNTIME
    return weights_of(path, shape), load_engine(engine, path, context, None)
