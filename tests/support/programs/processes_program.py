"""Trainings for one process or several: what test_several_processes.py runs under torchrun and in its own process, to compare.

One process distils in one pass a step, several in micro-batches of a row.

torchrun --nproc_per_node 2 processes_program.py MODELS OUT JOB ...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.token_rows import Batch, Rows, Shuffled
from edgespec_recipes.generating.response_shards import write_shard
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.parallel.sharding import sharded
from edgespec_recipes.training import distill as distilling
from edgespec_recipes.training import trainer
from edgespec_recipes.training.distill import DistillInputs, distill
from edgespec_recipes.training.pretrain import next_token_losses
from tiny_models import TRAINING_TEXT, make_model_folder

from edgespec.core.files import write_json
from edgespec.recipe.schema import DistillOptions, TrainingOptions

VOCABULARY = 511  # odd, so that the processes' parts of the embedding differ
STEPS = 12
TRAINING: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": 4,
    "context": 64,
    "learning_rate": 3e-3,
    "min_learning_rate": 1e-4,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "save_steps": 4,
}
DISTILLED = DistillOptions(**TRAINING, text_fraction=0.25, watch_steps=6, watch_rows=2)
DISTILLATIONS = {
    "fkl": replace(DISTILLED, divergence="fkl"),
    "tvd++": replace(DISTILLED, divergence="tvd++", tvdpp_scope="batch", mean="sequences"),
    "selected": replace(DISTILLED, divergence="fkl", select_fraction=0.4),
}


def make_models(folder: Path) -> None:
    """A target, a drafter, another drafter as reference, responses, and plain text."""
    make_model_folder(folder / "target", vocab_size=VOCABULARY)
    for seed, name in enumerate(("drafter", "reference"), 1):
        make_model_folder(folder / name, seed=seed, hidden=32, intermediate=64, vocab_size=VOCABULARY)
    generator = np.random.default_rng(0)
    rows = [
        {
            "id": number,
            "prompt_ids": generator.integers(4, VOCABULARY, 6).tolist(),
            "response_ids": generator.integers(4, VOCABULARY, 3 + number % 25).tolist(),  # unequal shares
        }
        for number in range(60)
    ]
    (folder / "responses").mkdir()
    write_shard(folder / "responses" / "shard-00000.jsonl", rows)
    (folder / "text.txt").write_text(TRAINING_TEXT.read_text(encoding="utf-8"), encoding="utf-8")


def pretraining(models: Path, out: Path, loss_fn: trainer.LossFunction) -> None:
    model = load_model(models / "drafter")
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (30, 32)).astype(np.uint16)
    rows = Rows({"input_ids": ids, "row_id": np.arange(len(ids))})
    order = Shuffled(rows, STEPS * TRAINING["batch_size"], 3)
    trainer.train(model, order, loss_fn, out, TrainingOptions(**TRAINING), seed=3, label="train")
    trainer.save_whole(model, models / "target", out / "model")


def float32(device: torch.device) -> Precision:
    """In place of trainer.choose_precision: bf16 would hide what is compared."""
    return Precision("float32", "to compare")


@contextmanager
def in_float64() -> Iterator[None]:
    """TVD++'s reward 1[p > q] is a step: float32's rounding turns one in some runs, and they part."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_model", "load_target"):
            load = getattr(distilling, name)
            patch.setattr(distilling, name, lambda *given, load=load: load(*given).double())
        yield


def slowly(model: Any, batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """So that there is time to be killed between two checkpoints: the eleventh step waits, which a second start has not."""
    slowly.calls += 1  # type: ignore[attr-defined]
    time.sleep(600 if slowly.calls == 11 else 0.15)  # type: ignore[attr-defined]
    return next_token_losses(model, batches)


def diverging(model: Any, batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """The last process meets a NaN in step 6, the others do not."""
    diverging.calls += 1  # type: ignore[attr-defined]
    broken = diverging.calls == 6 and processes.rank() == processes.world() - 1  # type: ignore[attr-defined]
    for loss in next_token_losses(model, batches):
        yield loss * (float("nan") if broken else 1.0)


def ranks(out: Path) -> None:
    """What the functions of processes.py gave this process: `out`/RANK.json."""
    rank = processes.rank()
    with processes.first():
        if not rank:
            time.sleep(0.2)
        with open(out / "order", "a") as stream:
            stream.write(str(rank))
    found = {
        "rank": rank,
        "pid": os.getpid(),
        "sharded": sharded(),
        "world": processes.world(),
        "total": processes.total(torch.tensor([rank + 1.0, 10.0])).tolist(),
        "gathered": processes.gathered(torch.arange(rank + 1)).tolist(),
    }
    write_json(out / f"{rank}.json", found)


def run(models: Path, out: Path, jobs: list[str]) -> None:
    processes.start()
    for job in jobs:
        place = out / job
        place.mkdir(parents=True, exist_ok=True)
        if job == "ranks":
            ranks(place)
        elif job == "pretrain":
            pretraining(models, place, next_token_losses)
        elif job == "slow":
            slowly.calls = 0  # type: ignore[attr-defined]
            pretraining(models, place, slowly)
        elif job == "diverging":
            diverging.calls = 0  # type: ignore[attr-defined]
            try:
                pretraining(models, place, diverging)
            except trainer.TrainingDiverged as error:
                write_json(place / f"{processes.rank()}.json", {"message": str(error)})
        else:
            inputs = DistillInputs(
                target=models / "target",
                drafter=models / "drafter",
                responses=models / "responses",
                text=str(models / "text.txt"),
                text_cache=place / "text",
                reference=models / "reference" if job == "selected" else None,
            )
            together = processes.world() > 1
            options = replace(DISTILLATIONS[job], micro_batch_size=1 if together else None)
            with in_float64() if job == "tvd++" else nullcontext():
                distill(place, inputs, options, seed=0)
        processes.wait()


if __name__ == "__main__":
    trainer.choose_precision = float32
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
