"""Two processes on this machine, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from repository import REPOSITORY


def torchrun(log: Path, *command: str, parallel: str = "ddp") -> subprocess.Popen[bytes]:
    """Two processes that run `command`; what they print goes to `log`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
        "EDGESPEC_PARALLEL": parallel,
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with open(log, "wb") as stream:
        return subprocess.Popen(
            [*start, *command], env=environment, cwd=REPOSITORY, stdout=stream, stderr=stream
        )


def two_processes(file: Path, *given: str) -> None:
    """Run a program in two processes to its end; what they print goes beside it."""
    log = file.with_suffix(".log")
    assert torchrun(log, str(file), *given).wait(timeout=300) == 0, log.read_text()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread, as torchrun's processes have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
