"""Can a model folder be trained with and exported at all? Looks at every file that later stages open; loads no weights.

Knows the files of a Hugging Face folder, and the tensor names that decoders of the Llama family have there; tensors with other
names are held against their own header only. What an exporter cannot express is edgespec_export's formats/export.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.families import FAMILIES
from edgespec.core.files import read_json, read_object
from edgespec.core.shapes import ModelShape, impossible
from edgespec.model_folder.chat_template import SETTINGS, read_chat_template
from edgespec.model_folder.weights_files import FLOATS, Tensor, read_tensors, refuse_pointer

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")  # Python reads no number of 5,000 digits
_PACKED = (".weight", ".qweight", ".weight_packed")  # what quantisers call their matrices
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
SAME = "take both from the same model"
LAYOUT = "a model folder in Hugging Face layout (config.json, *.safetensors, tokenizer)"


def check_model(folder: Path, what: str = "") -> ModelShape:
    """Hold a folder against what every stage needs of a model; return its shape.

    `what` names the model in messages ("the drafter"). Raises InputError: no config.json, quantised weights, files that are
    missing, cut short or git-lfs pointers, weights of another shape, no tokenizer.
    """
    named = f"{what} {folder}".strip()
    if not (folder / "config.json").is_file():
        raise InputError(f"{named} has no config.json; give {LAYOUT}")
    shape = shape_in(folder / "config.json")
    check_weights(folder, shape)
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    if not files:
        raise InputError(
            f"{named} has no tokenizer (tokenizer.json); copy the model's tokenizer files into it"
        )
    for file in files:
        refuse_pointer(file)
    return shape


def check_chat(folder: Path) -> None:
    """Whether a folder has the chat template that a target needs. Raises InputError where it has none, or none is the default."""
    if not read_chat_template(folder):
        raise InputError(
            f"the tokenizer in {folder} has no chat template; edgespec needs a chat model, or add chat_template to {SETTINGS}"
        )


def shape_in(file: Path) -> ModelShape:
    """The shape that a config.json describes. Raises InputError for another kind of model, and for quantised weights."""
    config = read_json(file)
    try:
        shape = ModelShape.from_config(config)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{file} is no config of a Llama-style decoder: {error}") from error
    if wrong := impossible(asdict(shape)):
        raise InputError(f"{file} is no config of a Llama-style decoder: it gives {wrong}")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise InputError(
            f"{file} has the layer_types {str(kinds)[:80]}; a list of names is wanted: fetch it again, or leave them out"
        )
    refuse_quantised(config, file.parent)
    return shape


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
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    known = replace(shape, layers=1, tied=False).tensors() | {  # Phi-3 has these in one
        "model.layers.0.self_attn.qkv_proj.weight": (joined, shape.hidden),
        "model.layers.0.mlp.gate_up_proj.weight": (2 * shape.intermediate, shape.hidden),
    }
    for name, tensor in tensors.items():
        expected = known.get(_LAYER.sub(r"model.layers.0.\2", name), tensor.shape)
        if tensor.shape != expected:
            raise _unfit(
                folder,
                f"config.json and weights disagree: {name} in {tensor.file.name} is {list(tensor.shape)}, and the config's sizes "
                f"make it {list(expected)}",
                SAME,
            )
    layers = {int(match[1]) for name in tensors if (match := _LAYER.fullmatch(name))}
    if not layers:  # another family's names
        if shape.layers > len(tensors):  # transformers would make so many, whatever the files have
            there = f"num_hidden_layers is {shape.layers}, and the files have {len(tensors)} tensors"
            raise _unfit(folder, f"config.json and weights disagree: {there}", SAME)
        return
    if not len(layers) == max(layers) + 1 == shape.layers:
        raise _unfit(
            folder,
            f"config.json and weights disagree: num_hidden_layers is {shape.layers}, and the files have {len(layers)} layers (up "
            f"to number {max(layers)}, counted from 0)",
            SAME,
        )
    first = [name for name in known if name in tensors and _LAYER.fullmatch(name)]
    in_layers = (name.replace(".0.", f".{layer}.", 1) for layer in sorted(layers) for name in first)
    for name in (*replace(shape, layers=0).tensors(), *in_layers):
        if name not in tensors:
            raise _unfit(folder, f"the weight files have no {name}", "fetch them again, whole")


def _unfit(folder: Path, seen: str, cure: str) -> InputError:
    """For weights that are not those of the config; in a family that is not known they may be right, and of another form."""
    kind = str(read_object(folder / "config.json").get("model_type", ""))
    if kind not in FAMILIES:
        cure = f"a {kind[:40]!r} model may be of another form than Llama's: give one of {', '.join(FAMILIES)}"
    return InputError(f"{folder}: {seen}; {cure}")
