"""Run a program and say how long it took and how much memory it had at its peak. Knows nothing of what it runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen
from tempfile import TemporaryFile

from edgespec.core.errors import EdgespecError
from edgespec.core.no_room import killed

LOOK = 0.1  # seconds between two looks at the memory that is the program's own
LAST_LINES = 3
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes that an account of memory counts in


@dataclass(frozen=True)
class Usage:
    """Seconds; bytes resident at the peak, mapped files included; bytes at the peak without those. None: not told here."""

    seconds: float
    peak: int | None
    own: int | None


def run_measured(argv: Sequence[str], log: Path, given: str = "") -> Usage:
    """Run `argv` with `given` on its standard input; what it prints is appended to `log`.

    The peak is the kernel's own account of the process (wait4), where the system keeps one. That begins before the program
    replaces the copy of this process it was started from, so where it says no more than this process had, the highest value seen
    meanwhile counts. A program of Python imports nothing from the current folder, which may hold a stranger's files. The
    process is ended where this one is interrupted. Raises EdgespecError with the last lines of the log where it does not end
    with 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start, seen = time.monotonic(), {"VmHWM": 0, "RssAnon": 0}
    with open(log, "ab") as stream, TemporaryFile() as words:
        words.write(given.encode())
        words.seek(0)
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        process = Popen(argv, stdin=words, stdout=stream, stderr=STDOUT, env=environment)
        try:
            while (peak := _ended(process)) is None:
                _look(process.pid, seen)
                time.sleep(LOOK)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        how = killed(process.returncode) or f"ended with {process.returncode}"
        raise EdgespecError(f"{' '.join(argv[1:5])} ... {how}: {' / '.join(lines)}; its output is in {log}")
    if peak <= _peak_here():
        peak = seen["VmHWM"] or peak
    return Usage(time.monotonic() - start, peak or None, seen["RssAnon"] or None)


def _ended(process: Popen[bytes]) -> int | None:
    """Bytes of a process's peak once it has ended, 0 where the system keeps no account; None while it runs."""
    if not hasattr(os, "wait4"):
        return None if process.poll() is None else 0
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not pid:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return int(usage.ru_maxrss) * UNIT


def _peak_here() -> int:
    """Bytes of this process's own peak; 0 where the system keeps no account."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def _look(pid: int, seen: dict[str, int]) -> None:
    """Raise the bytes `seen` of a process's memory to what it has now, by name; nothing where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in seen:
                seen[name] = max(seen[name], int(value.split()[0]) * 1024)
