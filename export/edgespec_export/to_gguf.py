"""A model folder as a GGUF file that llama.cpp runs: F16 or Q8_0. Knows families by a table; tensors stream one by one.

llama.cpp's "llama" architecture rotates neighbouring pairs of a head (GPT-J order) where Hugging Face rotates halves (NeoX
order), so the rows of q and k are permuted; the Qwen architectures rotate halves and keep them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    GGMLQuantizationType,
    LlamaFileType,
    RopeScalingType,
)
from gguf.quants import quantize
from safetensors import safe_open

from edgespec.errors import InputError, did_you_mean
from edgespec.files import read_json, whole_file
from edgespec.shapes import ModelShape
from edgespec_export.gguf_vocabulary import read_vocabulary

logging.getLogger("gguf").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Family:
    """How one Hugging Face model_type is written."""

    architecture: MODEL_ARCH
    name: str
    permute_qk: bool


FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, "llama", permute_qk=True),
    "mistral": Family(MODEL_ARCH.LLAMA, "llama", permute_qk=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, "qwen2", permute_qk=False),
    "qwen3": Family(MODEL_ARCH.QWEN3, "qwen3", permute_qk=False),
}
PRECISIONS = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
Q8_0_BLOCK = 32  # weights that share a scale; a row must be a whole number of blocks


def permute_qk(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows [heads * d, ...] of q or k from rotate-halves to rotate-neighbours (a weight or a bias)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


class Checkpoint:
    """The safetensors files of a model folder: names and shapes at once, one tensor in memory at a time."""

    def __init__(self, folder: Path) -> None:
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            names = [single]
        elif index.exists():
            names = sorted({folder / name for name in read_json(index)["weight_map"].values()})
        else:
            raise InputError(
                f"{folder} has no model.safetensors; save the model with save_pretrained (pickle files are not read)"
            )
        self._files: list[Any] = [safe_open(name, framework="pt") for name in names]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor as float32."""
        whole: np.ndarray[Any, Any] = self._where[name].get_tensor(name).float().numpy()
        return whole


def export_gguf(model_folder: Path, out_file: Path, precision: str) -> dict[str, Any]:
    """Write `out_file` (whole or not at all) and return {"bytes", "notes"}.

    Norms, biases and other one-dimensional tensors are F32; a matrix whose rows are no multiple of 32 stays F16 in Q8_0 files,
    said in a note. Raises InputError for an unknown precision or family, a RoPE variant or a tokenizer llama.cpp would read
    differently.
    """
    if precision not in PRECISIONS:
        raise InputError(f"GGUF precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    config = read_json(model_folder / "config.json")
    family = _family(config, model_folder)
    shape = ModelShape.from_config(config)
    checkpoint = Checkpoint(model_folder)
    notes: list[str] = []
    writer = GGUFWriter(None, family.name)
    _write_shape(writer, shape, config, notes)
    writer.add_file_type(PRECISIONS[precision][1])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    read_vocabulary(model_folder, config).write(writer)
    plan = _plan(checkpoint, family, shape, precision, model_folder)
    for entry in plan:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=entry.kind
        )
    kept = [
        entry.name for entry in plan if len(entry.shape) > 1 and entry.kind is not PRECISIONS[precision][0]
    ]
    if kept:
        notes.append(
            f"{len(kept)} matrices stay F16 because their rows are no multiple of {Q8_0_BLOCK} ({kept[0]} ...)"
        )
    with whole_file(out_file) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in plan:
                weight = checkpoint.read(entry.source)
                if entry.permute_heads:
                    weight = permute_qk(weight, entry.permute_heads)
                writer.write_tensor_data(quantize(weight, entry.kind))
        finally:
            writer.close()
    return {"bytes": out_file.stat().st_size, "notes": notes}


def _family(config: dict[str, Any], model_folder: Path) -> Family:
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        raise InputError(f"{model_folder} is a {kind!r} model; GGUF export knows {', '.join(FAMILIES)}")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise InputError(
            f"{model_folder} has partial_rotary_factor {config['partial_rotary_factor']}; GGUF export needs 1.0"
        )
    return FAMILIES[kind]


def _write_shape(writer: GGUFWriter, shape: ModelShape, config: dict[str, Any], notes: list[str]) -> None:
    context = shape.context_length
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < context:
        notes.append(
            f"the context is cut from {context} to the sliding window of {window}: llama.cpp attends in full"
        )
        context = int(window)
    writer.add_name(str(config.get("_name_or_path") or config["model_type"]))
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind != "default":
        raise InputError(f"RoPE scaling {kind!r} is not exported to GGUF yet; known: default, linear")


@dataclass(frozen=True)
class _Entry:
    source: str
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    permute_heads: int  # 0: as it is

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.shape))
        if self.kind is GGMLQuantizationType.Q8_0:
            return size // Q8_0_BLOCK * (Q8_0_BLOCK + 2)
        return size * (4 if self.kind is GGMLQuantizationType.F32 else 2)


def _plan(
    checkpoint: Checkpoint, family: Family, shape: ModelShape, precision: str, folder: Path
) -> list[_Entry]:
    """What is written, in order: GGUF name, shape, type and source of every tensor."""
    names = get_tensor_name_map(family.architecture, shape.layers)
    entries = []
    for source in checkpoint:
        if source.endswith("rotary_emb.inv_freq") or (shape.tied and source == "lm_head.weight"):
            continue  # computed by the engine; the same table as the embedding
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise InputError(
                f"{folder}: tensor {source} has no name in the GGUF architecture {family.name!r}"
            )
        size = checkpoint.shape(source)
        kind = GGMLQuantizationType.F32 if len(size) == 1 else PRECISIONS[precision][0]
        if kind is GGMLQuantizationType.Q8_0 and size[-1] % Q8_0_BLOCK:
            kind = GGMLQuantizationType.F16
        heads = {".q_proj": shape.heads, ".k_proj": shape.kv_heads} if family.permute_qk else {}
        permute = next((count for part, count in heads.items() if part in source), 0)
        entries.append(_Entry(source, name, size, kind, permute))
    found = {entry.name for entry in entries}
    needed = {"token_embd.weight", "output_norm.weight"} | (set() if shape.tied else {"output.weight"})
    if needed - found:
        raise InputError(f"{folder}: the checkpoint lacks {', '.join(sorted(needed - found))}")
    return entries
