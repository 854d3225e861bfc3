"""Stages of a build: a folder that holds `stage.json` is complete and is skipped; one without it is resumed by its stage.

Knows nothing of what a stage does.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json, write_json, writing

STAGE_FILE = "stage.json"
"""Written last: a stage that has it is complete."""
CHECKPOINTS = "checkpoints"
"""What a stage resumes from; it goes when the stage is done, and not before."""
_CLOCK = "clock.json"  # what the runs of a stage that is not done took
_PACKAGES = ("edgespec", "torch", "transformers", "onnxruntime", "onnxruntime-genai", "gguf", "numpy")

Body = Callable[[Path], dict[str, Any]]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a result."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True)
class Processes:
    """The processes that run a stage: this one's number, and a call that returns when all have come to it."""

    rank: int = 0
    wait: Callable[[], None] = lambda: None


def run_stage(
    folder: Path,
    options: dict[str, Any],
    body: Body,
    processes: Processes | None = None,
    *,
    together: bool = False,
) -> dict[str, Any]:
    """Run `body(folder)` unless it has completed before; return the counts it returned.

    `body` leaves everything it needs to resume inside `folder`, and in its CHECKPOINTS what nothing else needs. `stage.json`
    records the options, the counts, the package versions and the seconds spent (summed over interrupted runs as far as they were
    recorded). Of several processes all run the body where they work `together`, else the first one alone; all return the same
    counts. Raises NoRoom where the disk is full, whichever library met that.
    """
    processes = processes or Processes()
    marker = folder / STAGE_FILE
    processes.wait()
    done = marker.exists()
    processes.wait()  # nobody writes the marker before everybody has looked
    if not done:
        if not processes.rank:
            _run(folder, marker, options, body)
        elif together:
            with writing(folder, within=True):
                body(folder)
        processes.wait()
    if not processes.rank:  # a run that was killed behind its marker has left them, too
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    counts: dict[str, Any] = read_json(marker)["counts"]
    return counts


def reopen(folder: Path) -> None:
    """Have a stage that is done run again for a part of its result. What it took counts on; of one that is not done, nothing."""
    marker = folder / STAGE_FILE
    if marker.exists():
        write_json(folder / _CLOCK, {"seconds": read_json(marker)["seconds"]})
        marker.unlink()


def _run(folder: Path, marker: Path, options: dict[str, Any], body: Body) -> None:
    clock = folder / _CLOCK
    folder.mkdir(parents=True, exist_ok=True)
    before = float(read_json(clock)["seconds"]) if clock.exists() else 0.0
    start = time.monotonic()
    try:
        with writing(folder, within=True):
            counts = body(folder)
    except BaseException:
        with suppress(EdgespecError):  # where the disk is full, what is full is the news
            write_json(clock, {"seconds": before + time.monotonic() - start})
        raise
    seconds = round(before + time.monotonic() - start, 2)
    write_json(marker, {"seconds": seconds, "options": options, "counts": counts, "versions": versions()})
    clock.unlink(missing_ok=True)
