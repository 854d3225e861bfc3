"""Freed memory stays with the process while the same large tensors are made again and again. Knows nothing of models."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt(3): what the parameters are called in malloc.h, and their defaults
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 2**10, _MMAP_MAX: 65_536}
_KEPT = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, glibc keeps what is freed; afterwards it goes back to the system. Nothing happens with another C library.

    Without it every tensor above some 100 KiB is mapped anew, and the kernel zeroes it page by page: 10-20 % of the time of a
    training or of batched decoding on a CPU.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        yield
        return
    for parameter, value in _KEPT.items():
        library.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _DEFAULTS.items():
            library.mallopt(parameter, value)
        library.malloc_trim(0)
