"""What is slow to make is made once in a test run, also where several pytest processes share the tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.core.folder_lock import held


def of_the_run(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of the whole run; each of its processes has one of its own in it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` filled. Read-only: other tests, and other processes, use it too.

    The first who asks makes it and the others wait. Where `make` fails, the next one tries again in an empty folder.
    """
    folder = of_the_run(factory) / "once" / name
    lock = folder.with_name(f"{name}-lock")
    with held(lock, f"pytest, {name}", wait=True):
        if not (lock / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            (lock / "made").touch()
    return folder
