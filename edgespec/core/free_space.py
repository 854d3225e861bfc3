"""What is free on this machine: memory, within a container's limit, and disk. Questions to the system, nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CGROUPS = (  # the limit of a container, and what it has taken: version 2, then version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def free_memory() -> int | None:
    """Bytes that programs may still take without swapping, within a container's limit; None where the system does not say."""
    free = _machine_memory()
    for limit, used, stat in CGROUPS:
        bound, taken = _number(limit), _number(used)
        if bound is not None and taken is not None and bound < 2**60:
            # files in a container's memory, which the kernel gives back when programs ask
            files = _number(stat, "inactive_file", "total_inactive_file") or 0
            room = max(0, bound - taken + files)
            free = room if free is None else min(free, room)
    return free


def _machine_memory() -> int | None:
    available = _number("/proc/meminfo", "MemAvailable:")
    if available is not None:
        return available * 1024
    try:  # macOS and the BSDs: all of it, since what is free is not told
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _number(file: str, *names: str) -> int | None:
    """The number behind one of `names` in a file of the system, or the file's only one; None where there is none."""
    try:
        words = Path(file).read_text(encoding="ascii").split()
        place = next(i for i, word in enumerate(words, 1) if word in names) if names else 0
        return int(words[place])
    except (OSError, ValueError, IndexError, StopIteration):  # also 'max'
        return None


def folder_at(place: Path) -> Path:
    """The folder that is there and in which `place` is or will be; a folder's own."""
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; 0 for one that is not there."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def free_disk(place: Path) -> int:
    """Bytes that can still be written where `place` is or will be."""
    return shutil.disk_usage(folder_at(place)).free
