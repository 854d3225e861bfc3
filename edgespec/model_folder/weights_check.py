"""Do a model folder's weights fit its config.json, and are they floats? Reads headers only, never weights.

Knows the tensor names that decoders of the Llama family have in Hugging Face layout; tensors with other names are held against
their own header only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import FLOATS, Tensor, read_tensors

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PACKED = (".weight", ".qweight", ".weight_packed")  # what quantisers call their matrices


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Hold the weights of a model folder against its config. Raises InputError with the file, the tensor and both numbers."""
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith(_PACKED) and tensor.dtype not in FLOATS:
            raise InputError(quantised(folder, f"{name[:200]} is {tensor.dtype}"))
    _check_shapes(folder, shape, tensors)


def quantised(where: Path | str, how: str) -> str:
    """The message for a model whose weights are quantised; `how`: the method, or what shows it."""
    return (
        f"{where} holds quantised weights ({how}), and edgespec trains with and exports float weights only: give the model that "
        "was quantised (float16, bfloat16 or float32); --inference.bits 4 reads it in 4 bits on a GPU, and --inference.source "
        "file --inference.file FILE.gguf reads a quantised file of it"
    )


def refuse_quantised(config: Mapping[str, Any], where: Path | str) -> None:
    """Raises InputError for a config.json of quantised weights, whatever the method: GPTQ, AWQ, bitsandbytes, FP8 ..."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return
    known = settings if isinstance(settings, dict) else {}
    method = known.get("quant_method") or (
        "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & known.keys() else "method unknown"
    )
    bits = known.get("bits") or known.get("w_bit")
    raise InputError(quantised(where, f"{str(method)[:40]}{f', {bits} bits' if type(bits) is int else ''}"))


def _check_shapes(folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden),
        "lm_head.weight": (shape.vocab_size, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    inside = shape.layer_tensors() | {  # Phi-3 has these in one
        "self_attn.qkv_proj.weight": (joined, shape.hidden),
        "mlp.gate_up_proj.weight": (2 * shape.intermediate, shape.hidden),
    }
    layers = set()
    for name, tensor in tensors.items():
        in_layer = _LAYER.fullmatch(name)
        if in_layer:
            layers.add(int(in_layer[1]))
        expected = inside.get(in_layer[2]) if in_layer else wanted.get(name)
        if expected is not None and tensor.shape != expected:
            raise InputError(
                f"{folder}: config.json and weights disagree: {name} in {tensor.file.name} is {list(tensor.shape)}, and the "
                f"config's sizes make it {list(expected)}; take both from the same model"
            )
    if not layers:
        return  # another family's names
    if layers != set(range(shape.layers)):
        raise InputError(
            f"{folder}: config.json and weights disagree: num_hidden_layers is {shape.layers}, and the files have "
            f"{len(layers)} layers (up to number {max(layers)}, counted from 0); take both from the same model"
        )
    needed = ["model.embed_tokens.weight", "model.norm.weight", *([] if shape.tied else ["lm_head.weight"])]
    gone = [name for name in needed if name not in tensors]
    first = {match[2] for name in tensors if (match := _LAYER.fullmatch(name)) and match[1] == "0"}
    gone += [
        f"model.layers.{layer}.{name}"
        for layer in sorted(layers)
        for name in inside
        if name in first and f"model.layers.{layer}.{name}" not in tensors
    ]
    if gone:
        raise InputError(f"{folder}: the weight files have no {gone[0]}; fetch them again, whole")
