"""Freed memory stays with the process while the same large tensors are made again and again. Knows nothing of models."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# mallopt(3), with the numbers that malloc.h gives its parameters
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}
# Whoever sets one of them ends glibc's own adjustment. So they are left where that would have come to with large tensors.
_AFTER = {_TRIM_THRESHOLD: 2**26, _MMAP_MAX: 65_536, _MMAP_THRESHOLD: 2**25}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, glibc keeps what is freed; afterwards it goes back to the system. Nothing happens with another C library.

    Without it a large tensor is mapped anew each time, and the kernel zeroes it page by page.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        yield
        return
    for parameter, value in _KEPT.items():
        library.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _AFTER.items():
            library.mallopt(parameter, value)
        library.malloc_trim(0)
