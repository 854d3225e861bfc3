"""A float16 copy of a GGUF file whose own type llama.cpp multiplies row by row: many texts at once then share the work.

llama.cpp has tiled products for F32, F16, Q8_0, Q4_0 and others, and none for Q4_1 and Q5_1: a batch of 64 costs 64 single rows
(benchmarks/generating.py). The copy's weights are the file's numbers to 11 bits, and its activations are not rounded to 8 bits,
so that it is nearer to the file's exact distributions than the file's own kernels are.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from edgespec.core.errors import BundleError
from edgespec.core.files import sha256_file, whole_file
from edgespec.core.folder_lock import held
from edgespec_runtime.engines.llamacpp import load_library, reason
from edgespec_runtime.untrusted.gguf_file import read_header

UNTILED = frozenset({3, 7})  # ggml_type: Q4_1, Q5_1
GROWTH = 16 / 5  # bits of a weight, from Q4_1 to F16
MOST_BYTES = 2**31  # of a copy: with caches and buffers a process stays below 4 GiB


def wants_copy(file: Path) -> bool:
    """Whether many texts at once are faster from a copy, and it is small enough."""
    return not UNTILED.isdisjoint(read_header(file).types) and file.stat().st_size * GROWTH <= MOST_BYTES


def float_copy(file: Path, folder: Path, threads: int) -> Path:
    """`folder`/SHA-f16.gguf, made where it is not there yet: whole or absent. Raises BundleError where llama.cpp cannot."""
    copy = folder / f"{sha256_file(file)[:16]}-f16.gguf"
    if not copy.is_file():
        with held(folder, "making a float16 copy", wait=True):
            if not copy.is_file():  # another process may have made it meanwhile
                _write(file, copy, threads)
    return copy


def _write(file: Path, copy: Path, threads: int) -> None:
    lib = load_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = lib.LLAMA_FTYPE_MOSTLY_F16, True, threads
    with whole_file(copy) as temporary:
        status = lib.llama_model_quantize(os.fsencode(file), os.fsencode(temporary), ctypes.byref(params))
        if status != 0:
            raise BundleError(f"llama.cpp cannot make a float16 copy of {file}: {reason()}; export it again")
