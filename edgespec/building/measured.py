"""Run a program and say how long it took and how much memory it had at its peak. Knows nothing of what it runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen
from tempfile import TemporaryFile

from edgespec.core.errors import EdgespecError

LOOK = 0.1  # seconds between two looks at the memory that is the program's own
LAST_LINES = 3


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
    meanwhile counts. Raises EdgespecError with the last lines of the log where it does not end with 0. The process is ended where
    this one is interrupted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start, looks = time.monotonic(), _Looks()
    with open(log, "ab") as stream, TemporaryFile() as words:
        words.write(given.encode())
        words.seek(0)
        process = Popen(argv, stdin=words, stdout=stream, stderr=STDOUT)
        try:
            while (peak := _ended(process)) is None:
                looks.at(process.pid)
                time.sleep(LOOK)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        raise EdgespecError(
            f"{' '.join(argv[1:5])} ... ended with {process.returncode}: {' / '.join(lines)}; its output is in {log}"
        )
    if peak <= _peak_here() and looks.peak is not None:
        peak = looks.peak
    return Usage(time.monotonic() - start, peak or None, looks.own)


def _ended(process: Popen[bytes]) -> int | None:
    """Bytes of a process's peak once it has ended, 0 where the system keeps no account; None while it runs."""
    if not hasattr(os, "wait4"):
        return None if process.poll() is None else 0
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not pid:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return int(usage.ru_maxrss) * _unit()


def _peak_here() -> int:
    """Bytes of this process's own peak; 0 where the system keeps no account."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _unit()


def _unit() -> int:
    """Bytes that an account of memory counts in."""
    return 1 if sys.platform == "darwin" else 1024


class _Looks:
    """Highest values seen of a process's memory, in bytes: all that was resident, and what of it is no file's."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self.own: int | None = None

    def at(self, pid: int) -> None:
        """One look; nothing where the system does not tell."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
            seen = {
                name: int(value.split()[0]) * 1024
                for name, _, value in (line.partition(":") for line in lines)
                if name in ("VmHWM", "RssAnon")
            }
        except (OSError, ValueError, IndexError):
            return
        self.peak = max(self.peak or 0, seen.get("VmHWM", 0))
        self.own = max(self.own or 0, seen.get("RssAnon", 0))
