"""This machine: what tells it from another one, and how fast it reads memory. Knows no models."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, sleep, thread_time

import numpy as np

from edgespec.core.free_space import free_memory, processor_limit
from edgespec.core.table import many
from edgespec_runtime.engines.engine import default_threads

READ_BYTES = 512 * 2**20  # more than the last cache of nearly every processor
READS = 5
# seconds that an engine's threads may spin behind its last pass: ONNX Runtime's do for 50 ms on a Zen 3, where a pause is short
SPINNING = 0.15
_PIECE = 2**20
_PACKAGES = {"onnxruntime": "onnxruntime", "llama.cpp": "llama_cpp_python", "static": "onnxruntime"}


@dataclass(frozen=True)
class Device:
    """Costs measured on one device hold for no other. `cores`: those this process may use; `memory_gib`: all RAM, rounded."""

    cpu: str
    cores: int
    memory_gib: int
    system: str

    def __str__(self) -> str:
        memory = [f"{self.memory_gib} GiB"] if self.memory_gib else []  # a system may not say it
        return ", ".join([self.cpu, many(self.cores, "core"), *memory, self.system])


def this_device() -> Device:
    """The machine this process runs on."""
    return Device(
        cpu_name(), default_threads(), _memory_gib(), f"{platform.system()} {platform.machine()}".strip()
    )


def engine_version(engine: str) -> str:
    """Version of the package that runs `engine`; '' where it is not installed."""
    try:
        return version(_PACKAGES.get(engine, engine))
    except PackageNotFoundError:
        return ""


def read_bandwidth(threads: int, size: int = READ_BYTES) -> float:
    """Bytes per second at which `threads` threads together read `size` bytes of memory: the best of several reads.

    Where memory is short, they read a quarter of what is free. The reads are numpy reductions over pieces of 1 MiB, which release
    the interpreter's lock.
    """
    free = free_memory()
    if free is not None:
        size = min(size, max(free // 4, _PIECE * threads))
    values = np.ones(size // 4, dtype=np.int32)  # written, so that every page is real
    parts = np.array_split(values, threads)

    def read(part: np.ndarray) -> int:
        return max(int(part[start : start + _PIECE // 4].max()) for start in range(0, len(part), _PIECE // 4))

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READS):
            start = perf_counter()
            list(pool.map(read, parts))
            best = min(best, perf_counter() - start)
    return values.nbytes / best


def free_share(threads: int, seconds: float = 0.15) -> float:
    """Share of the processor time that `threads` busy threads get; 1 where nothing else runs, in this process or another.

    What is measured beside other work are its costs too. What a container's limit withholds goes to none. It waits until threads
    that spin behind a pass have gone to sleep.
    """
    sleep(SPINNING)
    granted = min(threads, processor_limit() or threads)
    piece = bytes(2**20)  # hashed in about a millisecond, without the interpreter's lock
    end = perf_counter() + seconds

    def spin(_: int) -> float:
        begun = thread_time()  # the process's time would count another pair's threads as these
        while perf_counter() < end:
            hashlib.sha256(piece)
        return thread_time() - begun

    with ThreadPoolExecutor(threads) as pool:
        start = perf_counter()
        used = sum(pool.map(spin, range(threads)))
        return min(1.0, used / (granted * (perf_counter() - start)))


@cache
def is_amd_with_bf16() -> bool:
    """Whether this is a processor of AMD's with AVX-512 BF16 (Zen 4 and later), as far as Linux tells; False elsewhere."""
    words = set(" ".join(_cpu_info()).split())
    return {"AuthenticAMD", "avx512_bf16"} <= words


def _cpu_info() -> list[str]:
    """What Linux says of the processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def cpu_name() -> str:
    """The processor's own name where the system tells it; on 64-bit ARM Linux the maker's number and the core's."""
    said: dict[str, str] = {}
    for line in _cpu_info():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value)
    names = [" ".join(said.get(key, "").split()) for key in ("model name", "Model", "Hardware")]
    if "CPU part" in said:
        maker, core = said.get("CPU implementer", "").strip(), said["CPU part"].strip()
        names.append(f"{platform.machine()} {maker} {core}")
    names += [_apple_name(), platform.processor(), platform.machine()]
    return next(filter(None, names), "unknown processor")


@cache
def _apple_name() -> str:
    """'' on any other system."""
    if sys.platform != "darwin":
        return ""
    words = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _memory_gib() -> int:
    """0 where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return 0
