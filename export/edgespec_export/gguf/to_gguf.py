"""A model folder as a GGUF file that llama.cpp runs. Knows checkpoints and the order of a file; others know families and types.

Weights are read from the safetensors files in pieces of a few rows, changed, rounded and written: memory holds a piece, not a
matrix, a shard or the model. (Mapped files would count against the memory of the process and crowd out others.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_VERSION, MODEL_ARCH
from gguf.constants import GGMLQuantizationType as Kind

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.families import Family, family_for, leave_out
from edgespec.core.files import whole_file, write_array
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import read_tensors
from edgespec_export.gguf.hyperparameters import write_hyperparameters
from edgespec_export.gguf.kernels import packed
from edgespec_export.gguf.quantize import (
    MIXED,
    PRECISIONS,
    Precision,
    bytes_of,
    kind_of,
    mixed_precision,
    quantize_file,
)
from edgespec_export.gguf.vocabulary import read_vocabulary

logging.getLogger("gguf").setLevel(logging.WARNING)

Array = np.ndarray[Any, Any]
PIECE = 2**22  # weights converted at once: 16 MiB as float32
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def permute_qk(weight: Array, heads: int) -> Array:
    """Reorder the rows [heads * d, ...] of q or k from rotate-halves to rotate-neighbours (a weight or a bias)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


class Checkpoint:
    """The safetensors files of a model folder: names and shapes at once, rows when asked for.

    What files store and no model has is left out: RoPE's rates in old checkpoints, and an output table of its own where the
    embedding is the output table.
    Raises InputError where there are none, where they are not whole, and for a tensor of a type that is not read.
    """

    def __init__(self, folder: Path) -> None:
        tied = ModelShape.from_config(read_config(folder)).tied
        self._stored = {
            name: tensor
            for name, tensor in read_tensors(folder).items()
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))
        }
        for name, tensor in self._stored.items():
            if tensor.dtype not in _DTYPES:
                raise InputError(
                    f"{tensor.file}: tensor {name} is {tensor.dtype}; GGUF export reads {', '.join(_DTYPES)}"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def is_zero_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which an ONNX file goes without."""
        return name.endswith(".bias") and not any(piece.any() for piece in self.pieces(name))

    def whole(self, name: str) -> Array:
        """The tensor as float32."""
        return np.concatenate(list(self.pieces(name)))

    def pieces(self, name: str, multiple: int = 1) -> Iterator[Array]:
        """The tensor as float32 in pieces of rows (a vector: whole), each a multiple of `multiple` rows but the last."""
        stored = self._stored[name]
        rows, width = stored.shape[0], int(np.prod(stored.shape[1:]))
        step = rows if len(stored.shape) == 1 else max(1, PIECE // (width * multiple)) * multiple
        dtype = _DTYPES[stored.dtype]
        with open(stored.file, "rb") as stream:
            stream.seek(stored.start)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                raw = np.fromfile(stream, dtype=dtype, count=count * width)
                if raw.size < count * width:
                    raise InputError(f"{stored.file} ends within {name}; fetch the model again")
                floats = (
                    (raw.astype(np.uint32) << 16).view(np.float32)  # BF16 is the upper half of a float32
                    if stored.dtype == "BF16"
                    else raw.astype(np.float32, copy=False)
                )
                yield floats.reshape(count, *stored.shape[1:])


@dataclass(frozen=True)
class Bits:
    """What calibration text said of a model, by the checkpoint's names: {matrix: its type}, and {matrix: weight [K] of an error
    in each of its columns}.
    """

    kinds: Mapping[str, Kind]
    importance: Mapping[str, Array]


def export_gguf(
    model_folder: Path, out_file: Path, precision: str, bits: Bits | None = None
) -> dict[str, Any]:
    """Write `out_file` (whole or not at all) and return {"bytes", "notes"}.

    `bits`: of a q_mixed file alone.

    Norms, biases and other one-dimensional tensors are F32; a matrix whose rows are no whole number of blocks stays F16 (in the K
    types it becomes what llama.cpp falls back to), said in a note. For a K type a temporary F16 file lies beside `out_file` while
    llama.cpp works. Raises InputError for an unknown precision or family, a RoPE variant or a tokenizer llama.cpp would read
    differently.
    """
    if precision == MIXED and bits is not None:
        checkpoint = Checkpoint(model_folder)
        sizes = {name: int(np.prod(checkpoint.shape(name))) for name in bits.kinds}
        wanted = mixed_precision(bits.kinds, sizes)
    elif precision in PRECISIONS:
        wanted = PRECISIONS[precision]
    else:
        raise InputError(f"GGUF precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    notes: list[str] = []
    with whole_file(out_file) as temporary:
        if wanted.by_llama_cpp:
            floats = temporary.with_suffix(".f16.tmp")  # a killed run's is swept up as `temporary` is
            try:
                _write(model_folder, floats, PRECISIONS["f16"], notes)
                notes += quantize_file(floats, temporary, wanted)
            finally:
                floats.unlink(missing_ok=True)
        else:
            _write(model_folder, temporary, wanted, notes, bits)
    return {"bytes": out_file.stat().st_size, "notes": notes}


def check_gguf_possible(model_folder: Path, config: dict[str, Any]) -> None:
    """Whether a folder can become a GGUF file, without reading weights: what `export_gguf` would refuse. Raises InputError.

    `config`: its config.json, as model_config reads it.
    """
    family = family_for("gguf", "GGUF export", config, model_folder)
    shape = ModelShape.from_config(config)
    write_hyperparameters(GGUFWriter(None, family.gguf), family, shape, config, [])
    read_vocabulary(model_folder, config)
    _plan(Checkpoint(model_folder), family, shape, PRECISIONS["f16"], model_folder)


def _write(
    model_folder: Path, out: Path, precision: Precision, notes: list[str], bits: Bits | None = None
) -> None:
    config = read_config(model_folder)
    family = family_for("gguf", "GGUF export", config, model_folder)
    shape = ModelShape.from_config(config)
    checkpoint = Checkpoint(model_folder)
    vocabulary = read_vocabulary(model_folder, config)
    writer = GGUFWriter(None, family.gguf)
    writer.add_name(_model_name(config, strips_right=vocabulary.strips_right))
    computed = write_hyperparameters(writer, family, shape, config, notes)
    writer.add_file_type(precision.file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    vocabulary.write(writer)
    plan = _plan(checkpoint, family, shape, precision, model_folder, bits)
    for name, vector in computed.items():
        writer.add_tensor_info(name, vector.shape, vector.dtype, vector.nbytes, raw_dtype=Kind.F32)
    for entry in plan:
        size = bytes_of(entry.shape, entry.kind)
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size, raw_dtype=entry.kind)
    kept = [
        entry.name for entry in plan if entry.kind is Kind.F16 and precision.kind not in (Kind.F16, Kind.F32)
    ]
    if kept:
        notes.append(
            f"{len(kept)} matrices stay F16 because their rows are no multiple of 32 ({kept[0]} ...)"
        )
    try:
        writer.write_header_to_file(out)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        stream: BinaryIO = writer.fout[0]
        for vector in computed.values():
            _append(writer, stream, iter([vector]))
        for entry in plan:
            importance = bits.importance.get(entry.source) if bits is not None else None
            _append(writer, stream, _rounded(checkpoint, entry, importance))
    finally:
        writer.close()


def _model_name(config: dict[str, Any], *, strips_right: bool) -> str:
    """The model's name; llama.cpp lets special tokens swallow the white space after them where it holds "phi-3" or "phi3"."""
    name = str(config.get("_name_or_path") or config["model_type"])
    if strips_right:
        return name if re.search(r"phi-?3", name, re.IGNORECASE) else f"Phi-3 {name}"
    return re.sub(r"phi-?3", "Phi 3", name, flags=re.IGNORECASE)


def _append(writer: GGUFWriter, stream: BinaryIO, pieces: Iterator[Array]) -> None:
    """One tensor at the next aligned place: what the writer's write_tensor_data does, which wants it whole."""
    writer.write_padding(stream, stream.tell())
    size = 0
    for piece in pieces:
        write_array(stream, piece)
        size += piece.nbytes
    writer.write_padding(stream, size)


@dataclass(frozen=True)
class _Entry:
    source: str
    name: str
    shape: tuple[int, ...]
    kind: Kind
    head_rows: int  # rows of one head where q or k is permuted; 0: as it is
    offset: float  # added to every weight


def _rounded(checkpoint: Checkpoint, entry: _Entry, importance: Array | None) -> Iterator[Array]:
    for piece in checkpoint.pieces(entry.source, multiple=entry.head_rows or 1):
        if entry.head_rows:
            piece = permute_qk(piece, len(piece) // entry.head_rows)
        if entry.offset:
            piece = piece + np.float32(entry.offset)
        yield packed(piece, entry.kind, importance if len(entry.shape) > 1 else None)


def _plan(
    checkpoint: Checkpoint,
    family: Family,
    shape: ModelShape,
    precision: Precision,
    folder: Path,
    bits: Bits | None = None,
) -> list[_Entry]:
    """What is written, in order: GGUF name, shape, type and source of every tensor."""
    names = get_tensor_name_map(MODEL_ARCH[family.gguf.upper()], shape.layers)
    head = "token_embd.weight" if shape.tied else "output.weight"
    entries = []
    for source in checkpoint:
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise InputError(
                f"{folder}: tensor {source} has no name in the GGUF architecture {family.gguf!r}"
            )
        part, _, kind_of_tensor = name.removeprefix("blk.").partition(".")[2].rpartition(".")
        if kind_of_tensor == "bias" and part not in family.gguf_biases:
            raise InputError(
                f"{folder} has the bias {source}, and llama.cpp's {family.gguf!r} has no place for it; "
                f"{leave_out('gguf')}"
            )
        size = checkpoint.shape(source)
        kind = kind_of(size, precision, head=name == head)
        if bits is not None:
            kind = bits.kinds.get(source, kind)
        permuted = family.permute_qk and (".q_proj." in source or ".k_proj." in source)
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        entries.append(_Entry(source, name, size, kind, shape.head_dim * permuted, offset))
    missing = {"token_embd.weight", "output_norm.weight", head} - {entry.name for entry in entries}
    if missing:
        raise InputError(f"{folder}: the checkpoint lacks {', '.join(sorted(missing))}")
    return entries
