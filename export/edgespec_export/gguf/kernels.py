"""Rows as the bytes of a GGUF type: read from a file in pieces, or rounded by llama.cpp, with an importance where there is one.

The types without K are gguf's Python where no importance is given: its bytes are llama.cpp's. Where one is given, each row has
whichever of the two roundings is nearer: a matrix that was rounded to such a type before keeps its values in the plain one alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.engine import default_threads
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from edgespec.core.errors import EdgespecError, InputError

Array = np.ndarray[Any, Any]
BLIND = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0})  # do not look at an importance
SHORT = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1})  # blocks of 32
PIECE = 2**22  # weights read at once: 16 MiB as float32


def pieces_of(
    file: Path, start: int, shape: tuple[int, ...], kind: Kind, multiple: int = 1
) -> Iterator[Array]:
    """The bytes of a tensor in a file, uint8 [n, bytes of a row], some rows at a time; a vector is one row.

    n is a multiple of `multiple` but in the last piece. Raises InputError where the file ends before the tensor does.
    """
    rows, width = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    block, size = GGML_QUANT_SIZES[kind]
    row_bytes = width // block * size
    step = max(1, PIECE // (width * multiple)) * multiple
    with open(file, "rb") as stream:
        stream.seek(start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            piece = np.fromfile(stream, np.uint8, count * row_bytes)
            if piece.size < count * row_bytes:
                raise InputError(f"{file} ends within the tensor at byte {start}; fetch it again")
            yield piece.reshape(count, row_bytes)


def packed(rows: Array, kind: Kind, importance: Array | None = None) -> Array:
    """Rows [n, K] of float32 as the file holds them: uint8 or float16 [n, bytes]. `importance` [K]: of an error in each column.

    Every thread has a part of the rows.

    Raises MissingExtra where a K type or an importance needs llama.cpp and it is not installed.
    """
    parts = np.array_split(rows, max(1, min(len(rows), default_threads())))
    with ThreadPoolExecutor(len(parts)) as threads:
        return np.concatenate([*threads.map(lambda part: _packed(part, kind, importance), parts)])


def _packed(rows: Array, kind: Kind, importance: Array | None) -> Array:
    if kind in BLIND or (importance is None and kind in SHORT):
        return np.ascontiguousarray(quantize(rows, kind))
    weighted = _by_llama_cpp(rows, kind, importance)
    if importance is None or kind not in SHORT:
        return weighted
    plain = np.ascontiguousarray(quantize(rows, kind))
    nearer, further = (np.square(dequantize(one, kind) - rows) @ importance for one in (plain, weighted))
    return np.where((nearer <= further)[:, None], plain, weighted)


def _by_llama_cpp(rows: Array, kind: Kind, importance: Array | None) -> Array:
    from edgespec_runtime.engines.llamacpp import load_library

    package = load_library()
    library = package.llama_cpp._lib
    if not hasattr(library, "ggml_quantize_chunk"):  # Windows does not look in what a library has loaded
        library = package._ctypes_extensions.load_shared_library("ggml-base", package.llama_cpp._base_path)
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    rows = np.ascontiguousarray(rows, np.float32)
    count, columns = rows.shape
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty((count, columns // int(block) * int(size)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    given = None if weights is None else weights.ctypes.data
    written = function(int(kind), rows.ctypes.data, out.ctypes.data, 0, count, columns, given)
    if written != out.nbytes:
        raise EdgespecError(
            f"llama.cpp wrote {written} bytes of {kind.name} where {out.nbytes} were expected; install llama-cpp-python 0.3.36"
        )
    return out
