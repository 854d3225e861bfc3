"""Progress bars with ETA on the terminal; plain lines now and then where the output is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(label: str, total: int | None, unit: str = "step", done: int = 0) -> Iterator[Any]:
    """A bar to `.update(n)` and `.set_postfix_str(text)`; starts at `done` when a stage resumes. `total`: None if not known.

    Of several processes only the first shows one.
    """
    from tqdm import tqdm

    interactive = sys.stderr.isatty()
    bar = tqdm(
        total=total,
        initial=done,
        desc=label,
        unit=f" {unit}",
        disable=os.environ.get("RANK", "0") != "0",
        dynamic_ncols=True,
        mininterval=0.1 if interactive else 20.0,
        maxinterval=10.0 if interactive else 60.0,
    )
    try:
        yield bar
    finally:
        bar.close()
