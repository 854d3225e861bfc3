"""The weights of a model folder: which files have them, and what every tensor is. Reads headers only, never weights.

A file that is missing, cut short or a git-lfs pointer is named before anything is loaded. Knows nothing of models.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.core.errors import InputError
from edgespec.core.files import parse_json, read_object

MAX_HEADER = 100_000_000
"""Bytes that a header may have (the safetensors format's own limit)."""
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16},
    **{"U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "fetch the file again"
FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of float weights, and torch's name for the one they are read in."""
_POINTER = b"version https://git-lfs"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file: its type as the format names it, and the place of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int


def stored_type(folder: Path) -> str | None:
    """torch's name of the type that a folder's float weights are stored in: float32 for a mixture, None where there are none.

    Raises InputError where the files are not whole.
    """
    types = {FLOATS[tensor.dtype] for tensor in read_tensors(folder).values() if tensor.dtype in FLOATS}
    return types.pop() if len(types) == 1 else "float32" if types else None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder by name, from the headers. Raises InputError for files that are missing or not whole."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= read_header(folder / file)
    if not (folder / SINGLE).is_file():
        _check_index(folder, tensors)
    return tensors


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that make up the model, as transformers finds them. Raises InputError naming what is not there."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        wanted = sorted(set(_weight_map(folder).values()))
        strange = [
            name for name in wanted if "/" in name or "\\" in name or not name.endswith(".safetensors")
        ]
        if strange:
            raise InputError(
                f"{folder / INDEX} names {strange[0][:200]!r}; a .safetensors file of the folder is wanted"
            )
    elif first := next((match for name in there if (match := _SHARD.fullmatch(name))), None):
        count = int(first[3])
        wanted = [f"{first[1]}-{number:05d}-of-{first[3]}.safetensors" for number in range(1, count + 1)]
    elif there:
        raise InputError(
            f"{folder} has {', '.join(there[:4])} and neither {SINGLE} nor {INDEX}; transformers reads these names only: "
            "fetch the model again, or save it with save_pretrained"
        )
    else:
        raise InputError(f"{folder} has no *.safetensors file; only safetensors weights are read")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of its {len(wanted)} weight files: {', '.join(missing[:8])}"
            f"{' ...' if len(missing) > 8 else ''}; fetch them again"
        )
    if not (folder / INDEX).is_file():
        raise InputError(
            f"{folder} has {len(wanted)} shards and no {INDEX}, which says what is where; fetch it"
        )
    return wanted


def _weight_map(folder: Path) -> Mapping[str, str]:
    names = read_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{folder / INDEX} has no weight_map of tensors and files; {AGAIN}")
    return names


def _check_index(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, file in _weight_map(folder).items():
        if name not in tensors or tensors[name].file.name != file:
            there = f"it is in {tensors[name].file.name}" if name in tensors else "no file has it"
            raise InputError(
                f"{folder / INDEX} says that {file} has the tensor {name[:200]}, and {there}; {AGAIN}"
            )


def refuse_pointer(path: Path) -> None:
    """Raises InputError for the text that git leaves in place of a large file when git-lfs is not there."""
    with _opened(path) as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise InputError(
                f"{path} is a git-lfs pointer of {path.stat().st_size:,} bytes and not the file itself; run `git lfs pull` in "
                f"{path.parent}, or fetch the model with `hf download`"
            )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, to be read. Raises InputError where it cannot be."""
    try:
        with open(path, "rb") as stream:
            yield stream
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; make it readable, or give another folder"
        ) from error


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises InputError where it is none, or shorter or longer than it says."""
    refuse_pointer(path)
    size = path.stat().st_size
    with _opened(path) as stream:
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
    tensors, end = {}, 0
    for name, entry in header.items():
        shape, first, last = _entry(path, name, entry)
        tensors[name], end = Tensor(shape, entry["dtype"], path, 8 + length + first), max(end, last)
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
    return tensors


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The beginning of a safetensors file of these tensors, {name: (dtype, shape)}; their values follow it in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], int, int]:
    """(shape, first byte, last byte) of one tensor. Raises InputError where the header has no such."""
    wanted = {"dtype": str, "shape": list, "data_offsets": list}
    if isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in wanted.items()):
        shape, offsets = entry["shape"], entry["data_offsets"]
        numbers = all(type(number) is int and 0 <= number < 2**62 for number in [*shape, *offsets])
        if numbers and len(shape) <= 64 and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return tuple(shape), offsets[0], offsets[1]
    raise InputError(f"{path}: the header's entry of {name[:200]} is {str(entry)[:200]}; {AGAIN}")
