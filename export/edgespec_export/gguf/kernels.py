"""llama.cpp's own rounding of rows to a GGUF type, with an importance matrix where there is one. Rows in, bytes out.

The types without K are gguf's Python where no importance is given: its bytes are llama.cpp's. Where one is given, each row has
whichever of the two roundings is nearer: a matrix that was rounded to such a type before keeps its values in the plain one alone.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from edgespec_runtime.engines.engine import default_threads
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from edgespec.core.errors import EdgespecError

Array = np.ndarray[Any, Any]
BLIND = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0})  # do not look at an importance
SHORT = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1})  # blocks of 32


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
    if kind not in SHORT:
        return weighted
    plain = np.ascontiguousarray(quantize(rows, kind))
    nearer = _errors(rows, plain, kind, importance) <= _errors(rows, weighted, kind, importance)
    return np.where(nearer[:, None], plain, weighted)


def _errors(rows: Array, packed: Array, kind: Kind, importance: Array | None) -> Array:
    """Σ importance (w − w')² of each row [n]."""
    difference = np.square(dequantize(packed, kind) - rows)
    return np.asarray(difference @ (np.ones(rows.shape[1]) if importance is None else importance))


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
