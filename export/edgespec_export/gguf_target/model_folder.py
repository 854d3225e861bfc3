"""A GGUF file as a model folder in Hugging Face layout: what training, the ONNX export and verification read. The inverse of
gguf/to_gguf.py for the families that both know.

Weights are expanded a few rows at a time, so that memory holds a piece, not a matrix. F16 and BF16 tensors keep their type; the
others become F32, which holds every value of a quantised type. The folder lies in the cache under the file's content hash: a file
that is moved or renamed is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.untrusted.gguf_config import AGAIN, READABLE, ROPE_FACTORS, read_model, rope_of_factors
from edgespec_runtime.untrusted.gguf_file import Header, TensorAt
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from edgespec.core.errors import InputError, NoRoom
from edgespec.core.families import Family
from edgespec.core.files import whole_file, whole_folder, write_array, write_json
from edgespec.core.folder_lock import held
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import BITS, SINGLE, header_of, refuse_pointer
from edgespec.planning.preflight import expansion, told
from edgespec.shell.environment import cache_folder
from edgespec.stages.own_gguf import MODEL, OwnFile
from edgespec.stages.record import sha256_of
from edgespec_export.gguf.kernels import pieces_of
from edgespec_export.gguf.quantize import precision_of
from edgespec_export.gguf_target.tokenizer import write_tokenizer

Array = np.ndarray[Any, Any]
BF16_EXPONENT = np.uint16(0x7F80)
SCHEMA = 1  # raise it when what is written changes
_KEPT = {Kind.F32: ("F32", "<f4"), Kind.F16: ("F16", "<f2"), Kind.BF16: ("BF16", "<u2")}
# what gguf's dequantize expands without further tensors
_EXPANDED = ("Q2", "Q3", "Q4", "Q5", "Q6", "Q8_0", "IQ", "TQ", "MXFP")
_READ = frozenset(kind for kind in Kind if kind in _KEPT or kind.name.startswith(_EXPANDED))
_ATTENTION, _FFN = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
_LAYER = (
    *_ATTENTION,
    *_FFN,
    "attn_norm",
    "ffn_norm",
    "attn_q_norm",
    "attn_k_norm",
)  # in the order of writing


@dataclass(frozen=True)
class Place:
    """Where a GGUF tensor goes: its Hugging Face name and shape. `heads`: of q and k whose rows are in pairs there, else 0."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def folder_of(file: Path) -> Path:
    """The model folder of a GGUF file, made on first use by one process at a time: whole or not at all.

    Raises InputError and BundleError, each in one sentence that names what was seen: no GGUF file, cut short, one of several
    parts, an unknown family, key, tensor, type of weights, tokenizer or pre-tokenizer, weights that are not finite. NoRoom
    for too small a disk.
    """
    if not file.is_file():
        raise InputError(f"{file} does not exist; give a GGUF file")
    refuse_pointer(file)
    header, config = read_model(file)
    places = check_file(header, config, file)
    digest = sha256_of([file])[file]
    home = cache_folder() / "targets" / f"gguf-{digest[:16]}-v{SCHEMA}"
    model = home / MODEL
    if not _is_there(model):
        with held(home, f"reading {file}", wait=True):
            if not _is_there(model):
                _write(model, file, header, config, places)
    OwnFile(file.resolve(), digest, file.stat().st_size, precision_of(header)).keep(model)
    return model


def _is_there(model: Path) -> bool:
    """Whether a folder has its weights and what they mean: what cleans up old files may take one of a cache's."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", SINGLE)
    return all((model / name).is_file() for name in names)


def check_file(header: Header, config: Mapping[str, Any], file: Path) -> dict[str, Place]:
    """Where every tensor of the file goes, RoPE factors apart. Raises InputError for what has no place, is missing, or has an
    unknown type or another shape.
    """
    places = _places(config, READABLE[header.values["general.architecture"]])
    factors = Place("", (config["head_dim"] // 2,))  # of RoPE: they are no tensor of the folder
    for name, tensor in header.tensors.items():
        place = factors if name == ROPE_FACTORS else places.get(name)
        if place is None:
            raise InputError(
                f"{file} has the tensor {name[:80]!r}, which a {config['model_type']} model has no place for; give the model's "
                "folder or hub id instead"
            )
        if Kind(tensor.kind) not in _READ:
            raise InputError(
                f"{file} has {name!r} in {Kind(tensor.kind).name}; of GGUF types "
                f"{', '.join(kind.name for kind in sorted(_READ))} are read"
            )
        if tensor.shape != place.shape:
            raise InputError(
                f"{file} has {name!r} of shape {list(tensor.shape)}, and its sizes make it {list(place.shape)}; {AGAIN}"
            )
    missing = [name for name in places if name not in header.tensors]
    if missing:
        raise InputError(f"{file} lacks {len(missing)} tensors, {missing[0]!r} first; {AGAIN}")
    return places


def _places(config: Mapping[str, Any], family: Family) -> dict[str, Place]:
    """{GGUF name: its place} of all tensors of a model."""
    shape = ModelShape.from_config(config)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(shape.layers):
        names |= {f"blk.{layer}.{part}": f"model.layers.{layer}.{family.gguf_parts[part]}" for part in _LAYER}
    pairs = {"attn_q": shape.heads, "attn_k": shape.kv_heads} if family.permute_qk else {}
    attention = _ATTENTION[:3] if family.attention_bias else _ATTENTION if config["attention_bias"] else ()
    biased = (*attention, *(_FFN if config.get("mlp_bias") else ()))
    sizes = shape.tensors()
    found: dict[str, Place] = {}
    for here, there in names.items():
        part, size = here.rpartition(".")[2], sizes.get(f"{there}.weight")
        if size is not None:  # else a tied model's output, or norms that its heads do not have
            found[f"{here}.weight"] = Place(f"{there}.weight", size, pairs.get(part, 0))
        if part in biased:
            found[f"{here}.bias"] = Place(f"{there}.bias", sizes[f"{there}.weight"][:1], pairs.get(part, 0))
    return found


def _write(
    model: Path, file: Path, header: Header, config: Mapping[str, Any], places: Mapping[str, Place]
) -> None:
    if lack := expansion(file, _beginning(header, places)[1]).shortage():
        raise NoRoom(told([lack]))
    rope: dict[str, Any] = {}
    if tensor := header.tensors.get(ROPE_FACTORS):
        [factors] = _rows(file, tensor, Place("", tensor.shape))
        rope = rope_of_factors(config, factors.tolist(), file)
    with whole_folder(model) as folder:
        write_json(folder / "config.json", {**config, **rope})
        write_tokenizer(folder, file, header)
        _write_weights(folder / SINGLE, file, header, places)


def _beginning(header: Header, places: Mapping[str, Place]) -> tuple[bytes, int]:
    """The beginning of the safetensors file, since all sizes are known, and how many bytes follow it."""
    tensors = {
        place.name: (_KEPT.get(Kind(header.tensors[name].kind), _KEPT[Kind.F32])[0], place.shape)
        for name, place in places.items()
    }
    return header_of(tensors), sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())


def _write_weights(out: Path, file: Path, header: Header, places: Mapping[str, Place]) -> None:
    beginning, size = _beginning(header, places)
    with whole_file(out) as temporary, open(temporary, "wb") as stream:
        stream.write(beginning)
        with progress(f"expand {file.name}", size // 2**20, "MiB") as bar:
            for name, place in places.items():
                for piece in _rows(file, header.tensors[name], place):
                    if not _finite(piece):
                        raise InputError(
                            f"{file} has values in {name!r} that are no finite numbers: it is damaged; {AGAIN}"
                        )
                    write_array(stream, piece)
                bar.update(stream.tell() // 2**20 - int(bar.n))


def _finite(values: Array) -> bool:
    """Whether none is infinite or NaN; uint16: the bits of BF16, whose exponent is then all ones."""
    if values.dtype == np.uint16:
        return not ((values & BF16_EXPONENT) == BF16_EXPONENT).any()
    return bool(np.isfinite(values).all())


def _rows(file: Path, tensor: TensorAt, place: Place) -> Iterator[Array]:
    """The tensor in pieces of rows (a vector: whole), F16 and BF16 as they are, in Hugging Face's order: q and k of paired
    families back from neighbours to halves, head by head.
    """
    kind, head = Kind(tensor.kind), place.shape[0] // place.heads if place.heads else 1
    for piece in pieces_of(file, tensor.start, tensor.shape, kind, head):
        rows = piece.view(_KEPT[kind][1]) if kind in _KEPT else dequantize(piece, kind)
        rows = rows.reshape(-1, *place.shape[1:])
        if place.heads:
            halves = rows.reshape(-1, head // 2, 2, *place.shape[1:]).swapaxes(1, 2)
            rows = np.ascontiguousarray(halves).reshape(rows.shape)
        yield rows
