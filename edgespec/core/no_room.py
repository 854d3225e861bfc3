"""A write that failed for want of room or rights, as one line: what it was, how much is free, what to do. And memory used up.

Libraries say that a disk is full in words of their own, often without the system's error number: NumPy counts bytes, Rust prints
"os error 28", torch's archive writer finds itself at a wrong position. Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from edgespec.core.errors import EdgespecError, InputError, NoRoom, OneProcessError
from edgespec.core.free_space import folder_at, free_disk

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the size limit",
}
_FORBIDDEN = {
    errno.EROFS: "the file system is read-only",
    errno.EEXIST: "a file has that name already",
    errno.ENOTDIR: "a file stands where a folder is wanted",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "the name is too long",
}
_DENIED = {errno.EACCES: "permission denied", errno.EPERM: "operation not permitted"}
# Windows' own numbers: Python makes EACCES, EINVAL or ENOENT of them. It lets nobody replace what a program has mapped.
_IN_USE = "a program has it open, so close that one"
_WINDOWS = {32: _IN_USE, 123: "Windows takes no such name", 206: "the name is too long", 1224: _IN_USE}
_WINDOWS_ABSENT = 3  # a folder on the way, or the drive
_WINDOWS_DENIED = 5  # also of what a program has mapped
_WINDOWS_FULL = (39, 112)  # Rust prints these
_NO_SCRATCH = "No usable temporary directory found in "  # the words of Python's tempfile
_KILLED = -9  # by SIGKILL
_ALLOCATOR = re.compile(r"DefaultCPUAllocator: (.+)")  # torch's, of the machine's own memory
_CUT_SHORT = re.compile(  # NumPy's words, torch's, llama.cpp's
    r"^\d+ requested and \d+ written|inline_container.*unexpected pos|PytorchStreamWriter failed writing|iostream error"
)


def write_error(path: Path | str, error: BaseException, *, within: bool = False) -> InputError | None:
    """The message for an error met while writing, or None where it is not about the place written to.

    It names `path`; `within`: the file that the error names, where it names one. Raises InputError for a drive that is not
    there.
    """
    if isinstance(error, EdgespecError) or not isinstance(error, Exception):
        return None
    if within:
        path = getattr(error, "filename2", None) or getattr(error, "filename", None) or path
    found = next(filter(None, map(_full, _chain(error))), None)
    if found:
        reason, wanted = found
        return NoRoom(_message(path, reason, wanted))
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    windows = getattr(error, "winerror", None)
    if windows in _WINDOWS:
        return OneProcessError(_message(path, _WINDOWS[windows], 0))
    if number in _DENIED:  # libraries read, too, where something is written
        denied = _DENIED[number] + f", or {_IN_USE}" * (windows == _WINDOWS_DENIED)
        return OneProcessError(
            f"cannot use {path}: {denied}; allow it or choose another place, then run the same command again"
        )
    if number == errno.ENOENT and _NO_SCRATCH in str(error):
        return OneProcessError(
            f"no folder takes temporary files, of {str(error).partition(_NO_SCRATCH)[2]}; make room in one of them, or set "
            "TMPDIR to another, then run the same command again"
        )
    if windows == _WINDOWS_ABSENT:
        folder_at(Path(os.fsdecode(path)))  # says it where the drive is not there
    return OneProcessError(_message(path, _FORBIDDEN[number], 0)) if number in _FORBIDDEN else None


def memory_error(error: BaseException) -> OneProcessError | None:
    """The message where memory is used up, a GPU's or the machine's; None for any other error."""
    smaller = (
        "begin in a new folder with smaller batches (--generate.batch-size, --distill.micro-batch-size and the like) or "
        "--inference.dtype bfloat16"
    )
    if type(error).__name__ == "OutOfMemoryError":  # torch's own: most verbs do not load torch
        told = str(error).partition(" Including ")[0].rstrip(". ")  # what follows is for who knows torch
        return OneProcessError(
            f"{told}; end other programs on that GPU and run the same command again, or {smaller}"
        )
    allocator = _ALLOCATOR.search(str(error))
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (allocator or refused or isinstance(error, MemoryError)):
        return None
    told = (allocator[1] if allocator else str(error)).rstrip(". ")
    return OneProcessError(
        f"no memory is left{f' ({told})' if told else ''}; end other programs and run the same command again, or give a "
        f"shorter --context, or {smaller}"
    )


def killed(code: int) -> str:
    """What to say of a program that the system killed, by its exit code; '' of any other."""
    words = "was killed, as the system does where no memory is left (close other programs and run it again)"
    return words if code == _KILLED else ""


def _message(path: Path | str, reason: str, wanted: int) -> str:
    folder = folder_at(Path(os.fsdecode(path)))
    free = f"{free_disk(folder) / 2**20:.0f} MiB free in {folder}"
    needed = f", {wanted / 2**20:.0f} MiB needed for this write alone" if wanted else ""
    return (
        f"cannot write {path}: {reason} ({free}{needed}); "
        "make room or choose another folder, then run the same command again"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _full(error: BaseException, *, windows: bool = sys.platform == "win32") -> tuple[str, int] | None:
    """(what is full, bytes that were to be written or 0) where an error says so, by its number or in words."""
    words = str(error)
    numbers = [error.errno] if isinstance(error, OSError) else []
    for told in map(int, re.findall(r"\(os error (\d+)\)", words)):  # Rust: safetensors, tokenizers
        numbers.append(errno.ENOSPC if windows and told in _WINDOWS_FULL else told)
    for number in numbers:
        if number in _FULL:
            return _FULL[number], 0
    if match := re.search(r"Not enough free space to write (\d+) bytes", words):  # NumPy
        return _FULL[errno.ENOSPC], int(match[1])
    return ("the file could not be written whole", 0) if _CUT_SHORT.search(words) else None
