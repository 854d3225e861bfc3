"""Checkpoints that a kill -9 cannot spoil, and the state a diverged run leaves behind. Knows folders, nothing of training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sync_file, whole_folder, write_json
from edgespec.model_folder.weights_files import read_header
from edgespec.stages.stage import CHECKPOINTS
from edgespec_recipes.parallel.sharding import sharded

COMPLETE = "complete.json"
DIVERGED = "diverged"
KEPT = 2  # the newest may be half-written when the process dies: the one before it must still be there
SHARDED = "pytorch_model_fsdp"  # what accelerate calls the weights of a model that was in parts


def mark_complete(folder: Path) -> None:
    """Name every file of a checkpoint with its size, once all of them are on the disk. Older ones than the one before it go.

    By their steps: by their times, a clock that is set back would make the newest the oldest.
    """
    sizes = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync_file(file)
        sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    write_json(folder / COMPLETE, sizes)
    for older in sorted(_checkpoints(folder.parent).items())[:-KEPT]:
        shutil.rmtree(older[1], ignore_errors=True)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Every checkpoint in a folder, whole or not, by its step."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    return {int(step): path for path, step in steps.items() if step.isdigit()}


def _is_complete(folder: Path) -> bool:
    if not (folder / COMPLETE).is_file():
        return False
    sizes = read_json(folder / COMPLETE)
    return bool(sizes) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def latest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run; what a killed run left half-written, and what is older, is deleted.

    Raises InputError where its processes shared the training in another way than these.
    """
    places = _checkpoints(out / CHECKPOINTS)
    newest = max((step for step, folder in places.items() if _is_complete(folder)), default=None)
    for step, folder in places.items():
        if step != newest:
            shutil.rmtree(folder, ignore_errors=True)
    if newest is None:
        return None
    found = places[newest]
    kinds = {True: "fsdp", False: "ddp"}
    seen, here = kinds[any(found.glob(f"{SHARDED}*"))], kinds[sharded()]
    if seen != here:
        raise InputError(
            f"{found} was made with --parallel {seen} and cannot be read with {here}; go on with --parallel "
            f"{seen} and as many processes as before, or remove that folder to begin anew"
        )
    return found


def check_size(checkpoint: Path, model: Any) -> None:
    """Raise InputError where a checkpoint has another number of weights than the model that is to go on from it.

    Names are not compared: a model may be saved with others than it has in memory. Tied tensors are saved and counted once.
    """
    file = checkpoint / "model.safetensors"
    if sharded() or not file.is_file():
        return
    stored = sum(prod(tensor.shape) for tensor in read_header(file).values())
    own = sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())
    if stored != own:
        raise InputError(
            f"{checkpoint} has {stored:,} weights and the model to train has {own:,}: it was begun with another model, by "
            f"another edgespec; remove {checkpoint.parent} and run the same command again, and this stage begins anew"
        )


def keep_diverged(
    out: Path,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    about: dict[str, Any],
) -> Path:
    """Write `out`/diverged: model.safetensors, optimizer.safetensors (moments by parameter number), batch.npz, state.json."""
    shutil.rmtree(out / DIVERGED, ignore_errors=True)
    with whole_folder(out / DIVERGED) as folder:
        for file, tensors in (("model", weights), ("optimizer", moments)):
            own = {name: value.detach().clone().cpu() for name, value in tensors.items()}
            save_file(own, folder / f"{file}.safetensors")
        arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in batch.items()}
        np.savez(folder / "batch.npz", **arrays)
        write_json(folder / "state.json", about)
    return out / DIVERGED
