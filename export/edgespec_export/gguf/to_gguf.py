"""A model folder as a GGUF file that llama.cpp runs. Knows checkpoints and the order of a file; others know families and types.

Weights are read from the safetensors files in pieces of a few rows, changed, rounded and written: memory holds a piece, not a
matrix, a shard or the model. (Mapped files would count against the memory of the process and crowd out others.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_VERSION, MODEL_ARCH
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.families import Family, family_for, leave_out
from edgespec.core.files import whole_file, write_array
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import read_tensors
from edgespec.recipe.precisions import MIXED
from edgespec_export.gguf.hyperparameters import write_hyperparameters
from edgespec_export.gguf.kernels import packed, pieces_of
from edgespec_export.gguf.quantize import (
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
_READ = ("F32", "F16", "BF16")


def permute_qk(weight: Array, heads: int) -> Array:
    """Reorder the rows [heads * d, ...] of q or k from rotate-halves to rotate-neighbours (a weight or a bias)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


class Checkpoint:
    """The safetensors files of a model folder: `shapes` by name at once, rows when asked for.

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
            if tensor.dtype not in _READ:
                raise InputError(
                    f"{tensor.file}: tensor {name} is {tensor.dtype}; GGUF export reads {', '.join(_READ)}"
                )
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}

    def is_zero_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which an ONNX file goes without."""
        return name.endswith(".bias") and not any(piece.any() for piece in self.pieces(name))

    def whole(self, name: str) -> Array:
        """The tensor as float32."""
        return np.concatenate(list(self.pieces(name)))

    def pieces(self, name: str, multiple: int = 1) -> Iterator[Array]:
        """The tensor as float32 in pieces of rows (a vector: whole), each a multiple of `multiple` rows but the last.

        Raises InputError where a value is infinite or NaN.
        """
        stored = self._stored[name]
        kind = Kind[stored.dtype]
        for piece in pieces_of(stored.file, stored.start, stored.shape, kind, multiple):
            rows = dequantize(piece, kind).reshape(-1, *stored.shape[1:])
            if not np.isfinite(rows).all():
                raise InputError(
                    f"{stored.file}: the tensor {name} has values that are no finite numbers; fetch or train the model again"
                )
            yield rows


class Bits(NamedTuple):
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
    if precision == MIXED["gguf"] and bits is not None:
        wanted = mixed_precision(bits.kinds, Checkpoint(model_folder).shapes)
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


def check_gguf_possible(model_folder: Path) -> None:
    """Whether a folder can become a GGUF file, without reading weights: what `export_gguf` would refuse. Raises InputError."""
    _planned(model_folder, PRECISIONS["f16"], [])


class _Tensor(NamedTuple):
    """One tensor of the file; its values are computed piece by piece when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    pieces: Iterator[Array]


def _write(
    model_folder: Path, out: Path, precision: Precision, notes: list[str], bits: Bits | None = None
) -> None:
    writer, tensors = _planned(model_folder, precision, notes, bits)
    kept = [one.name for one in tensors if one.kind is Kind.F16]
    if kept and precision.kind not in (Kind.F16, Kind.F32):
        notes.append(
            f"{len(kept)} matrices stay F16 because their rows are no multiple of 32 ({kept[0]} ...)"
        )
    try:
        writer.write_header_to_file(out)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        stream = writer.fout[0]
        for tensor in tensors:  # as the writer's write_tensor_data does, which wants it whole
            writer.write_padding(stream, stream.tell())
            for piece in tensor.pieces:
                write_array(stream, piece)
            writer.write_padding(stream, bytes_of(tensor.shape, tensor.kind))
    finally:
        writer.close()


def _planned(
    model_folder: Path, precision: Precision, notes: list[str], bits: Bits | None = None
) -> tuple[GGUFWriter, list[_Tensor]]:
    """A writer that knows all of the file's header, and the tensors in order; no weight is read yet."""
    config = read_config(model_folder)
    family = family_for("gguf", "GGUF export", config, model_folder)
    shape = ModelShape.from_config(config)
    vocabulary = read_vocabulary(model_folder, config)
    writer = GGUFWriter(None, family.gguf)
    writer.add_name(_model_name(config, strips_right=vocabulary.strips_right))
    computed = write_hyperparameters(writer, family, shape, config, notes)
    writer.add_file_type(precision.file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    vocabulary.write(writer)
    tensors = [_Tensor(name, vector.shape, Kind.F32, iter([vector])) for name, vector in computed.items()]
    tensors += _stored(model_folder, family, shape, precision, bits)
    for name, size, kind, _ in tensors:
        writer.add_tensor_info(name, size, np.dtype(np.float32), bytes_of(size, kind), raw_dtype=kind)
    return writer, tensors


def _model_name(config: dict[str, Any], *, strips_right: bool) -> str:
    """The model's name; llama.cpp lets special tokens swallow the white space after them where it holds "phi-3" or "phi3"."""
    name = str(config.get("_name_or_path") or config["model_type"])
    if strips_right:
        return name if re.search(r"phi-?3", name, re.IGNORECASE) else f"Phi-3 {name}"
    return re.sub(r"phi-?3", "Phi 3", name, flags=re.IGNORECASE)


def _stored(
    folder: Path, family: Family, shape: ModelShape, precision: Precision, bits: Bits | None
) -> Iterator[_Tensor]:
    """The tensors of the checkpoint. Raises InputError for one without a place in the file, and for those that it lacks."""
    checkpoint = Checkpoint(folder)
    names = get_tensor_name_map(MODEL_ARCH[family.gguf.upper()], shape.layers)
    head = "token_embd.weight" if shape.tied else "output.weight"
    missing = {"token_embd.weight", "output_norm.weight", head}
    for source, size in checkpoint.shapes.items():
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise InputError(
                f"{folder}: tensor {source} has no name in the GGUF architecture {family.gguf!r}"
            )
        part, _, ending = name.removeprefix("blk.").partition(".")[2].rpartition(".")
        if ending == "bias" and part not in family.gguf_biases:
            raise InputError(
                f"{folder} has the bias {source}, and llama.cpp's {family.gguf!r} has no place for it; "
                f"{leave_out('gguf')}"
            )
        kind, importance = kind_of(size, precision, head=name == head), None
        if bits is not None:
            kind, importance = bits.kinds.get(source, kind), bits.importance.get(source)
        permuted = family.permute_qk and (".q_proj." in source or ".k_proj." in source)
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        head_rows = shape.head_dim if permuted else 0
        pieces = checkpoint.pieces(source, multiple=head_rows or 1)
        yield _Tensor(name, size, kind, _rounded(pieces, kind, importance, head_rows, offset))
        missing.discard(name)
    if missing:
        raise InputError(f"{folder}: the checkpoint lacks {', '.join(sorted(missing))}")


def _rounded(
    pieces: Iterator[Array], kind: Kind, importance: Array | None, head_rows: int, offset: float
) -> Iterator[Array]:
    """Pieces as the file holds them. `head_rows`: of a head where q or k is permuted, else 0; `offset`: added to every weight."""
    for piece in pieces:
        if head_rows:
            piece = permute_qk(piece, len(piece) // head_rows)
        if offset:
            piece = piece + np.float32(offset)
        yield packed(piece, kind, importance)
