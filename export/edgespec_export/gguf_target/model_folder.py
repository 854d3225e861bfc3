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
from typing import Any, BinaryIO

import numpy as np
from edgespec_runtime.untrusted.gguf_config import AGAIN, READABLE, ROPE_FACTORS, read_model, rope_of_factors
from edgespec_runtime.untrusted.gguf_file import Header, TensorAt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from edgespec.core.errors import InputError, NoRoom
from edgespec.core.families import Family
from edgespec.core.files import whole_file, whole_folder, write_array, write_json
from edgespec.core.folder_lock import held
from edgespec.core.progress import progress
from edgespec.model_folder.weights_files import BITS, SINGLE, header_of, refuse_pointer
from edgespec.planning.preflight import expansion, told
from edgespec.shell.environment import cache_folder
from edgespec.stages.own_gguf import MODEL, OwnFile
from edgespec.stages.record import sha256_of
from edgespec_export.gguf.quantize import precision_of
from edgespec_export.gguf_target.tokenizer import write_tokenizer

Array = np.ndarray[Any, Any]
PIECE = 2**22  # weights expanded at once: 16 MiB as float32
SCHEMA = 1  # raise it when what is written changes
_KEPT = {Kind.F32: ("F32", "<f4"), Kind.F16: ("F16", "<f2"), Kind.BF16: ("BF16", "<u2")}
# what gguf's dequantize expands without further tensors
_EXPANDED = ("Q2", "Q3", "Q4", "Q5", "Q6", "Q8_0", "IQ", "TQ", "MXFP")
_READ = frozenset(kind for kind in Kind if kind in _KEPT or kind.name.startswith(_EXPANDED))


@dataclass(frozen=True)
class Place:
    """Where a GGUF tensor goes: its Hugging Face name and shape. `heads`: of q and k whose rows are in pairs there, else 0."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def folder_of(file: Path) -> Path:
    """The model folder of a GGUF file, made on first use by one process at a time: whole or not at all.

    Raises InputError and BundleError, each in one sentence that names what was seen: no GGUF file, cut short, one of several
    parts, an unknown family, key, tensor, type of weights, tokenizer or pre-tokenizer. NoRoom for too small a disk.
    """
    if not file.is_file():
        raise InputError(f"{file} does not exist; give a GGUF file")
    refuse_pointer(file)
    header, config = read_model(file)
    places = check_file(header, config, file)
    digest = sha256_of([file])[file]
    home = cache_folder() / "targets" / f"gguf-{digest[:16]}-v{SCHEMA}"
    model = home / MODEL
    about = OwnFile(file.resolve(), digest, file.stat().st_size, precision_of(header))
    if not (model / "config.json").is_file():
        with held(home, f"reading {file}", wait=True):
            if not (model / "config.json").is_file():
                _write(model, file, header, config, places)
    about.keep(model)
    return model


def check_file(header: Header, config: Mapping[str, Any], file: Path) -> dict[str, Place]:
    """Where every tensor of the file goes, RoPE factors apart. Raises InputError for what has no place, is missing, or has an
    unknown type or another shape.
    """
    places = _places(config, READABLE[header.values["general.architecture"]])
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name not in places:
            raise InputError(
                f"{file} has the tensor {name[:80]!r}, which a {config['model_type']} model has no place for; give the model's "
                "folder or hub id instead"
            )
        if Kind(tensor.kind) not in _READ:
            raise InputError(
                f"{file} has {name!r} in {Kind(tensor.kind).name}; of GGUF types "
                f"{', '.join(kind.name for kind in sorted(_READ))} are read"
            )
        if tensor.shape != places[name].shape:
            raise InputError(
                f"{file} has {name!r} of shape {list(tensor.shape)}, and its sizes make it {list(places[name].shape)}; {AGAIN}"
            )
    missing = [name for name in places if name not in header.tensors]
    if missing:
        raise InputError(f"{file} lacks {len(missing)} tensors, {missing[0]!r} first; {AGAIN}")
    return places


def _places(config: Mapping[str, Any], family: Family) -> dict[str, Place]:
    """{GGUF name: its place} of all tensors of a model."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        **{"attn_q": (heads * size, hidden), "attn_k": (kv_heads * size, hidden)},
        **{"attn_v": (kv_heads * size, hidden), "attn_output": (hidden, heads * size)},
        **{"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
        **{"attn_norm": (hidden,), "ffn_norm": (hidden,)},
        **({"attn_q_norm": (size,), "attn_k_norm": (size,)} if family.head_norms else {}),
    }
    pairs = {"attn_q": heads, "attn_k": kv_heads} if family.permute_qk else {}
    has_bias = {"attn": config["attention_bias"], "ffn": config.get("mlp_bias")}
    biased = {name for name, of in shapes.items() if len(of) == 2 and has_bias[name.partition("_")[0]]}
    biased = {"attn_q", "attn_k", "attn_v"} if family.attention_bias else biased
    found = {
        "token_embd.weight": Place("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": Place("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        found["output.weight"] = Place("lm_head.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            here, there = f"blk.{layer}.{name}", f"model.layers.{layer}.{family.gguf_parts[name]}"
            found[f"{here}.weight"] = Place(f"{there}.weight", shape, pairs.get(name, 0))
            if name in biased:
                found[f"{here}.bias"] = Place(f"{there}.bias", shape[:1], pairs.get(name, 0))
    return found


def _write(
    model: Path, file: Path, header: Header, config: Mapping[str, Any], places: Mapping[str, Place]
) -> None:
    lack = expansion(file, _size(_kept(header, places))).shortage()
    if lack:
        raise NoRoom(told([lack]))
    rope: dict[str, Any] = {}
    if ROPE_FACTORS in header.tensors:
        pieces = _pieces(file, header.tensors[ROPE_FACTORS], 1)
        rope = rope_of_factors(config, np.concatenate(list(pieces)).tolist(), file)
    with whole_folder(model) as folder:
        write_json(folder / "config.json", {**config, **rope})
        write_tokenizer(folder, file, header)
        _write_weights(folder / SINGLE, file, header, places)


def _kept(header: Header, places: Mapping[str, Place]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{Hugging Face name: (type, shape)} of what is written, in order."""
    kinds = {name: Kind(header.tensors[name].kind) for name in places}
    return {
        place.name: (_KEPT.get(kinds[name], _KEPT[Kind.F32])[0], place.shape)
        for name, place in places.items()
    }


def _size(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())


def _write_weights(out: Path, file: Path, header: Header, places: Mapping[str, Place]) -> None:
    """A safetensors file: its header first, since all sizes are known, then piece after piece."""
    tensors = _kept(header, places)
    with whole_file(out) as temporary, open(temporary, "wb") as stream:
        stream.write(header_of(tensors))
        with progress(f"expand {file.name}", _size(tensors) // 2**20, "MiB") as bar:
            for name, place in places.items():
                for piece in _rows(file, header.tensors[name], place):
                    write_array(stream, piece)
                bar.update(stream.tell() // 2**20 - int(bar.n))


def _rows(file: Path, tensor: TensorAt, place: Place) -> Iterator[Array]:
    """The tensor's rows in Hugging Face's order: q and k of paired families back from neighbours to halves, head by head."""
    size = place.shape[0] // place.heads if place.heads else 1
    for piece in _pieces(file, tensor, size):
        if place.heads:
            halves = piece.reshape(-1, size // 2, 2, *piece.shape[1:]).swapaxes(1, 2)
            piece = np.ascontiguousarray(halves).reshape(piece.shape)
        yield piece


def _pieces(file: Path, tensor: TensorAt, multiple: int) -> Iterator[Array]:
    """A tensor in pieces of a multiple of `multiple` rows (the last may be shorter; a vector whole); F16 and BF16 as they are."""
    kind = Kind(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    vector = len(tensor.shape) == 1
    rows, *rest = (1, *tensor.shape) if vector else tensor.shape
    width = prod(rest)
    step = max(1, PIECE // (width * multiple)) * multiple
    with open(file, "rb") as stream:
        stream.seek(tensor.start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            expanded = _read(stream, kind, count, width // block * size)
            yield expanded.reshape(rest if vector else (count, *rest))


def _read(stream: BinaryIO, kind: Kind, rows: int, row_bytes: int) -> Array:
    raw = np.frombuffer(stream.read(rows * row_bytes), np.uint8).reshape(rows, row_bytes)
    if kind in _KEPT:
        return raw.view(_KEPT[kind][1])
    found: Array = dequantize(raw, kind).astype(np.float32, copy=False)
    return found
