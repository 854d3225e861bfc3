"""llama.cpp's own rounding of rows to a GGUF type, with an importance matrix where there is one. Rows in, bytes out.

The types without K are gguf's Python where no importance is given: its bytes are llama.cpp's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

from edgespec.core.errors import EdgespecError

Array = np.ndarray[Any, Any]
IN_PYTHON = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0})


def packed(rows: Array, kind: Kind, importance: Array | None = None) -> Array:
    """Rows [n, K] of float32 as the file holds them: uint8 or float16 [n, bytes]. `importance` [K]: of an error in each column.

    Raises MissingExtra where a K type or an importance needs llama.cpp and it is not installed.
    """
    if kind in IN_PYTHON and (importance is None or kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0)):
        return np.ascontiguousarray(quantize(rows, kind))
    from edgespec_runtime.engines.llamacpp import load_library

    library = load_library().llama_cpp._lib
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    rows = np.ascontiguousarray(rows, np.float32)
    count, columns = rows.shape
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty((count, columns // int(block) * int(size)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    written = function(
        int(kind),
        rows.ctypes.data,
        out.ctypes.data,
        0,
        count,
        columns,
        None if weights is None else weights.ctypes.data,
    )
    if written != out.nbytes:
        raise EdgespecError(
            f"llama.cpp wrote {written} bytes of {kind.name} where {out.nbytes} were expected; install the llama-cpp-python of "
            "constraints.txt"
        )
    return out
