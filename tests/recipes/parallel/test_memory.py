"""What is freed stays with the process within, and goes back to the system afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from edgespec_recipes.parallel.memory import freed_memory_kept

HELD = """
import os, sys
from pathlib import Path
import numpy as np
from edgespec_recipes.parallel.memory import freed_memory_kept

def held():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

def made_and_freed():
    for _ in range(2):
        values = np.ones(2**24)  # 128 MiB
        del values

made_and_freed()
before = held()
with freed_memory_kept():
    made_and_freed()
    within = held()
print(within - before, held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_stays_within_and_goes_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    within, after = map(float, done.stdout.split())
    assert within > 100
    assert after < 20


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_nothing_is_asked_of_another_system(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: pytest.fail("a library was opened"))
    with freed_memory_kept():
        pass
