"""One process at a time in a folder of results. The operating system takes the lock back when its holder ends, killed or not.

The lock file says who holds it, for the message to the second one. On a file system without locks nothing is held.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, writing
from edgespec.core.output import note

LOCK = ".in-use.json"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_POLL = 0.5  # seconds between two tries of one that waits
_BEYOND = 2**20  # Windows locks bytes against reading too: one far behind the holder's name


def is_empty(folder: Path, own: str = "") -> bool:
    """Whether a folder is absent or holds nothing but a lock.

    What a run left that was killed while it wrote its first file, `own`, counts as nothing.
    """
    begun = f".{escape(own)}.*.tmp"
    return not folder.is_dir() or all(path.name == LOCK or path.match(begun) for path in folder.iterdir())


def refuse_other(out: Path, own: str, flag: str = "--out") -> None:
    """Raises InputError for a folder that holds files, and not the one called `own`, which would make it ours.

    flag: the one that names the folder.
    """
    if not is_empty(out, own) and not (out / own).exists():
        raise InputError(f"{out} holds other files and no {own}; give an empty or new folder with {flag}")


@contextmanager
def held(folder: Path, command: str, *, wait: bool = False) -> Iterator[None]:
    """Hold `folder` (made if absent) for the body. Raises InputError that names the holder, or waits for its end.

    Of the processes of one torchrun job the first one holds it for all.
    """
    told = False
    while (lock := _taken(folder / LOCK)) is None:
        used = f"{folder} is in use by {_holder(folder / LOCK)}"
        if not wait:
            raise InputError(f"{used}; wait for its end, or give another folder")
        if not told:
            note(f"{used}: waiting for its end")
        told = True
        time.sleep(_POLL)
    try:
        about = {
            "pid": os.getpid(),
            "host": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": command,
        }
        with writing(folder):
            os.ftruncate(lock, 0)
            os.write(lock, json.dumps(about).encode() + b"\n")
        yield
    finally:
        if sys.platform == "win32":
            os.close(lock)
            with suppress(OSError):  # an open file cannot be deleted there: one who waits has it open
                (folder / LOCK).unlink()
                folder.rmdir()  # where the body deleted all of it, the lock was left
        else:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(lock)


def remove_older(out: Path, command: str) -> None:
    """Take away the folders beside NAME-KEY that have the same name and another key in hex, unless one is in use."""
    name, _, key = out.name.rpartition("-")
    for older in out.parent.glob(f"{escape(name)}-{'[0-9a-f]' * len(key)}"):
        if older != out:
            with suppress(InputError), held(older, command):
                shutil.rmtree(older, ignore_errors=True)


def _taken(file: Path) -> int | None:
    """An open, locked file; None where another process holds the lock."""
    while True:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = _opened(file)
        try:
            _lock(lock)
            if os.path.samestat(os.fstat(lock), os.stat(file)):
                return lock
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in _HELD:  # no locks on this file system
                return lock
            os.close(lock)
            return None
        os.close(lock)  # its holder deleted it in between: the next one makes another


def _opened(file: Path) -> int:
    """The lock file, open. Raises InputError for a link or what is no file: who made the folder would choose what is emptied."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            return lock
        os.close(lock)
    raise InputError(f"{file} is a link or no regular file; remove it")


def _lock(file: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _BEYOND, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        os.lseek(file, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: Path) -> str:
    """Who holds a lock, as far as it says."""
    try:
        about = read_json(file, limit=2**16)
        return f"process {about['pid']} on {about['host']} since {about['since']} ({about['command'][:200]})"
    except (InputError, KeyError, TypeError):
        return "another process"
