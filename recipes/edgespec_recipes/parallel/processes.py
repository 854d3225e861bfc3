"""Several processes that run the same program: who am I, wait for the others, sums over all. Knows nothing of models or files.

`torchrun --nproc_per_node N -m edgespec ...` starts N of them; they find each other through the environment it sets. Alone, every
function here is trivial, so callers have one path.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from edgespec.core.errors import InputError

# A process waits while another one reads a text: for the 600B tokens of the paper's recipe a week, at a million a second.
PATIENCE = datetime.timedelta(days=14)
_failed = 0  # the exit code of a process that ends with an error


def world() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def device() -> torch.device:
    """The accelerator of this process, else the CPU. Where there are fewer accelerators than processes, they share them."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def backend() -> str:
    """torch.distributed's backend for these processes: NCCL takes one process for each GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cuda:nccl,cpu:gloo" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo"


def start() -> None:
    """Join the others; a second call does nothing."""
    if world() > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(device())
        dist.init_process_group(backend(), timeout=PATIENCE)
        atexit.register(_leave)


def fail(code: int) -> None:
    """This process will end with an error, `code`, whatever the others do."""
    global _failed
    _failed = code


def _leave() -> None:
    """A process that ends with the group's threads still running is at times aborted (SIGABRT) after its work is done.

    NCCL takes leave of all processes together. One that fails alone must not wait for the others: they wait for it, and torchrun
    ends them only when one has ended.
    """
    if _failed:
        os._exit(_failed)
    else:
        dist.destroy_process_group()


def wait() -> None:
    """Return when every process has come here. Raises InputError where one has ended: what it met is its own to say."""
    if world() > 1:
        start()
        try:
            dist.barrier()
        except RuntimeError as error:
            said = str(error).partition("\n")[0][:200]
            raise InputError(
                f"another process of this run has ended; its message says why ({said})"
            ) from error


@contextmanager
def first() -> Iterator[None]:
    """The body runs in process 0 before it runs in the others: for files that one makes and all read."""
    if rank():
        wait()
    yield
    if not rank():
        wait()


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without gradient."""
    value = value.detach().clone()
    if world() > 1:
        start()
        dist.all_reduce(value)
    return value


def gathered(values: Tensor) -> Tensor:
    """1-D tensors of any lengths, one of each process, in order of rank."""
    values = values.detach()
    if world() == 1:
        return values
    start()
    pieces: list[Tensor] = [values] * world()
    dist.all_gather_object(pieces, values.cpu())
    return torch.cat(pieces).to(values.device)
