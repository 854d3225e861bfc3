"""What this machine has to give: memory and processors, within a container's limits, and disk. Asks the system, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath

from edgespec.core.errors import InputError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMORY = (  # a group's limit, and what it has taken: version 2, then version 1
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory() -> int | None:
    """Bytes that programs may still take without swapping, within a container's limit; None where the system does not say."""
    free = _machine_memory()
    for group in _cgroups("memory"):
        for limit, used in MEMORY:
            bound, taken = _number(group / limit), _number(group / used)
            if bound is not None and taken is not None and bound < 2**60:
                room = max(0, bound - taken + _of_files(group))
                free = room if free is None else min(free, room)
    return free


def _of_files(group: Path) -> int:
    """Bytes of a group's memory that are parts of files: the kernel gives them back when programs ask, read often or not."""
    found = 0
    for kind in ("inactive_file", "active_file"):
        names = (f"total_{kind}", kind)  # version 1 has both
        totals = (_number(group / "memory.stat", name) for name in names)
        found += next(filter(None, totals), 0)
    return found


def processor_limit() -> float | None:
    """How many processors' time a container's limit grants, such as 1.5; None without a limit."""
    granted = []
    for group in _cgroups("cpu"):
        both, quota, period = group / "cpu.max", group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
        for most, each in ((_number(both), _number(both, place=1)), (_number(quota), _number(period))):
            if most and each and most > 0:
                granted.append(most / each)
    return min(granted, default=None)


def _cgroups(controller: str) -> list[Path]:
    """The control groups of this process and all above them: those of version 2, then a controller's of version 1.

    A container may see its own group as the root. Then what its path names is not there.
    """
    try:
        text = OWN_CGROUPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.split(":", 2) for line in text.splitlines()]
    groups = []
    for root, wanted in ((CGROUPS, ""), (CGROUPS / controller, controller)):
        named = [path for _, names, path in lines if wanted in names.split(",")]
        own = PurePosixPath(*named[:1])
        groups += [root / path.as_posix().lstrip("/") for path in (own, *own.parents)]
    return groups


def _machine_memory() -> int | None:
    available = _number(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        return available * 1024
    if sys.platform == "darwin" and (available := available_in(_said_by_vm_stat())):
        return available
    try:  # the BSDs: all of it, since what is free is not told
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _said_by_vm_stat() -> str:
    """'' where there is no such program."""
    import subprocess  # only now: --help does not wait for it

    try:
        said: str = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    return said


def available_in(text: str) -> int | None:
    """Bytes that a Mac's kernel has left or gives back when programs ask, from what vm_stat prints; None where it is not that."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)\.", text, re.MULTILINE)
    return int(size[1]) * sum(map(int, pages)) if size and pages else None


def _number(file: Path, name: str = "", place: int = 0) -> int | None:
    """The number behind `name` in a file of the system, or the word at a place; None where there is none."""
    try:
        words = file.read_text(encoding="ascii").split()
        return int(words[words.index(name) + 1 if name else place])
    except (OSError, ValueError, IndexError):  # also 'max'
        return None


def folder_at(place: Path) -> Path:
    """The folder that is there and in which `place` is or will be; a folder's own.

    Raises InputError where there is none, as on a drive of Windows that is not there.
    """
    folder = place
    while not os.path.isdir(folder):  # Path.is_dir fails at a name that is too long
        if folder == folder.parent:
            raise InputError(f"{place} lies on {folder}, which is not there; choose another place")
        folder = folder.parent
    return folder


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; 0 for one that is not there."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process has deleted it meanwhile
                found += os.stat(os.path.join(place, name)).st_size
    return found


def free_disk(place: Path) -> int:
    """Bytes that can still be written where `place` is or will be."""
    return shutil.disk_usage(folder_at(place)).free


def on_one_disk(*places: Path) -> bool:
    """Whether places, there or not, take from the same free bytes."""
    return len({folder_at(place).stat().st_dev for place in places}) == 1
