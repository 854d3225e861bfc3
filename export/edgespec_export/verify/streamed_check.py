"""An exported file against its checkpoint and against torch, where the model does not fit in memory: one layer at a time.

The file's weights are read back in order. Each is compared with the checkpoint's, and each layer, as soon as all of it
is there, is run in torch (float32) on the prompts. Memory holds one layer and what came before its turn. What the engine
says to the same prompts must be what torch says with the file's own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.pair.bundle import load_engine
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.families import family_for
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.by_layers import check_alike
from edgespec_export.onnx.repeat import layer_of
from edgespec_export.verify.file_check import (
    FileCheck,
    Passage,
    compare_engine,
    judge,
    measure,
    note_weight,
)
from edgespec_export.verify.readback import Weights, weights_of

Array = np.ndarray[Any, Any]


def check_streamed(
    path: Path, precision: str, context: int, model_folder: Path, prompts: Sequence[list[int]]
) -> FileCheck:
    """Hold a target's GGUF file or ONNX folder against the model it was made from, and the engine against the file's own weights.

    Raises InputError for a family whose layers need more than the layer before.
    """
    engine = LLAMACPP if path.is_file() else ONNXRUNTIME
    check = FileCheck("target", engine, precision, checked_with=engine, weights_relative=0.0)
    found = weights_of(path, ModelShape.from_config(read_config(model_folder)))
    own = streamed_logits(_noted(check, found, Checkpoint(model_folder)), model_folder, prompts)
    passages = [Passage(prompt) for prompt in prompts]
    seen = compare_engine(check, partial(load_engine, engine, path, context, None), passages, own)
    measure(check, seen, own, passages)
    judge(check)
    return check


def _noted(check: FileCheck, weights: Weights, checkpoint: Checkpoint) -> Weights:
    """The same weights; how far each lies from the checkpoint's is noted as it passes."""
    for name, tensor in weights:
        difference = size = 0.0
        at = 0
        for piece in checkpoint.pieces(name):
            part = tensor[at : at + len(piece)]
            difference += float(np.square(part - piece, dtype=np.float64).sum())
            size += float(np.square(piece, dtype=np.float64).sum())
            at += len(piece)
        note_weight(check, name, difference, size)
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
