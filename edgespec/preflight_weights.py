"""Do a model folder's safetensors files hold what its config.json says? Reads headers only, never weights.

A shard that is missing, cut short or of another model is named before anything is loaded. Knows the tensor names that decoders of
the Llama family have in Hugging Face layout; tensors with other names are held against their own header only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from edgespec.errors import InputError
from edgespec.files import parse_json, read_json
from edgespec.shapes import ModelShape

MAX_HEADER = 100_000_000
"""Bytes that a header may have (the safetensors format's own limit)."""
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16},
    **{"U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
INDEX = "model.safetensors.index.json"
AGAIN = "fetch the file again"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    file: str


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Hold the weights of a model folder against its config. Raises InputError with the file, the tensor and both numbers."""
    tensors: dict[str, Tensor] = {}
    files = _files(folder)
    for file in files:
        for name, size in read_header(folder / file).items():
            tensors[name] = Tensor(size, file)
    _check_index(folder, tensors)
    if read_json(folder / "config.json").get("quantization_config"):
        return  # packed: their shapes are not the matrices'
    _check_shapes(folder, shape, tensors)


def _files(folder: Path) -> list[str]:
    """The safetensors files that make up the model. Raises InputError naming the shards that are not there."""
    if (folder / INDEX).is_file():
        wanted = sorted(set(_weight_map(folder).values()))
        strange = [
            name for name in wanted if "/" in name or "\\" in name or not name.endswith(".safetensors")
        ]
        if strange:
            raise InputError(
                f"{folder / INDEX} names {strange[0][:200]!r}; a .safetensors file of the folder is wanted"
            )
    else:
        there = sorted(path.name for path in folder.glob("*.safetensors"))
        first = next((match for name in there if (match := _SHARD.fullmatch(name))), None)
        wanted = there
        if first:
            count = int(first[3])
            wanted = [f"{first[1]}-{number:05d}-of-{first[3]}.safetensors" for number in range(1, count + 1)]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of its {len(wanted)} weight files: {', '.join(missing[:8])}"
            f"{' ...' if len(missing) > 8 else ''}; fetch them again"
        )
    return wanted


def _weight_map(folder: Path) -> Mapping[str, str]:
    found = read_json(folder / INDEX)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{folder / INDEX} has no weight_map of tensors and files; {AGAIN}")
    return names


def _check_index(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    if not (folder / INDEX).is_file():
        return
    for name, file in _weight_map(folder).items():
        if name not in tensors or tensors[name].file != file:
            there = f"it is in {tensors[name].file}" if name in tensors else "no file has it"
            raise InputError(
                f"{folder / INDEX} says that {file} has the tensor {name[:200]}, and {there}; {AGAIN}"
            )


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a safetensors file. Raises InputError where it is none, or shorter or longer than it says."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER or 8 + length > size:
            raise InputError(
                f"{path} has {size:,} bytes and is no whole safetensors file (its header would have {length:,}); {AGAIN}"
            )
        header = parse_json(stream.read(length), path)
    if not isinstance(header, dict):
        raise InputError(f"{path} has no safetensors header; {AGAIN}")
    header.pop("__metadata__", None)
    shapes, end = {}, 0
    for name, entry in header.items():
        shape, first, last = _entry(path, name, entry)
        shapes[name], end = shape, max(end, last)
        bits = BITS.get(entry["dtype"])
        if bits is not None and (last - first) * 8 != prod(shape) * bits:
            raise InputError(
                f"{path}: {name[:200]} has {last - first:,} bytes, and {list(shape)} in {entry['dtype']} take "
                f"{prod(shape) * bits // 8:,}; {AGAIN}"
            )
    if size != 8 + length + end:
        what = "is cut short" if size < 8 + length + end else "is longer than it should be"
        raise InputError(
            f"{path} {what}: it has {size:,} bytes and its header names {8 + length + end:,}; {AGAIN}"
        )
    return shapes


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], int, int]:
    """(shape, first byte, last byte) of one tensor. Raises InputError where the header has no such."""
    wanted = {"dtype": str, "shape": list, "data_offsets": list}
    if isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in wanted.items()):
        shape, offsets = entry["shape"], entry["data_offsets"]
        numbers = all(type(number) is int and 0 <= number < 2**62 for number in [*shape, *offsets])
        if numbers and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return tuple(shape), offsets[0], offsets[1]
    raise InputError(f"{path}: the header's entry of {name[:200]} is {str(entry)[:200]}; {AGAIN}")


def _layer_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, by name within the layer; those that a family does not have are not asked for."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.qkv_proj.weight": (query + 2 * key_value, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _check_shapes(folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden),
        "lm_head.weight": (shape.vocab_size, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    inside = _layer_shapes(shape)
    layers = set()
    for name, tensor in tensors.items():
        in_layer = _LAYER.fullmatch(name)
        if in_layer:
            layers.add(int(in_layer[1]))
        expected = inside.get(in_layer[2]) if in_layer else wanted.get(name)
        if expected is not None and tensor.shape != expected:
            raise InputError(
                f"{folder}: config.json and weights disagree: {name} in {tensor.file} is {list(tensor.shape)}, and the "
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
