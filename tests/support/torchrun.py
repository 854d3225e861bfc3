"""Two processes on this machine, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
