"""The one training loop: transformers.Trainer with our schedule, our log, and checkpoints that survive a kill -9.

Knows nothing of what is learnt: the data come as a dataset of fixed-shape rows and the loss as a function of (model, batch).
A run that was killed and started again ends with the weights of an uninterrupted one (bit for bit in one process on one
CPU), because the order of the rows depends on the seed alone and a checkpoint carries optimizer, schedule and random states.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from edgespec.errors import EdgespecError, InputError
from edgespec.files import read_json, write_json, write_text, writing
from edgespec.progress import progress
from edgespec.recipe import TrainingOptions
from edgespec.report import count
from edgespec_recipes.data import Shuffled
from edgespec_recipes.loading import quiet
from edgespec_recipes.precision import Precision, choose_precision

Batch = dict[str, torch.Tensor]
LossFunction = Callable[[Any, Batch], torch.Tensor]

CHECKPOINTS = "checkpoints"
LOG = "log.jsonl"
COMPLETE = "complete.json"
LOG_STEPS = 10


class TrainingDiverged(EdgespecError):
    """The loss is no number any more."""


def warmup_decay(step: int, steps: int, warmup_steps: int, floor: float) -> float:
    """WarmupDecayLR as a factor of the peak rate: linear from 0 over `warmup_steps`, then linear to `floor` at the last step.

    `step` counts optimizer steps already taken. DeepSpeed's schedule of that name, with the minimum of direct alignment
    (section 4.1: 1e-4 -> 1e-6).
    """
    warmup_steps = min(warmup_steps, steps - 1)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return 1.0 - (1.0 - floor) * min(1.0, done)


def collate(rows: list[Mapping[str, np.ndarray]]) -> Batch:
    """Stack rows of equal shape; integers become int64, floats float32, bools stay."""
    batch = {}
    for name in rows[0]:
        stacked = np.stack([row[name] for row in rows])
        kind = stacked.dtype.kind
        batch[name] = torch.from_numpy(
            stacked.astype({"u": np.int64, "i": np.int64, "f": np.float32}.get(kind, stacked.dtype))
        )
    return batch


class _Trainer(transformers.Trainer):  # type: ignore[misc]
    """What the base class does not have: a loss function of ours, WarmupDecayLR, marked checkpoints, rows read in order."""

    def __init__(
        self, *, loss_fn: LossFunction, precision: Precision, warmup_steps: int, floor: float, **kwargs: Any
    ) -> None:
        self.loss_fn, self.precision, self.warmup_steps, self.floor = loss_fn, precision, warmup_steps, floor
        self.losses: list[float] = []  # since the last row of the log
        self.tokens = 0
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        if self.lr_scheduler is None:  # type: ignore[has-type]
            self.lr_scheduler = LambdaLR(
                optimizer if optimizer is not None else self.optimizer,
                lambda step: warmup_decay(step, num_training_steps, self.warmup_steps, self.floor),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def compute_loss(self, model: Any, inputs: Batch, *_: Any, **__: Any) -> torch.Tensor:
        with self.precision.autocast(self.args.device):
            loss = self.loss_fn(model, inputs)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"the loss is {value} at step {self.state.global_step + 1} of {self.state.max_steps}; lower learning_rate "
                f"(now {self.args.learning_rate:g}) or raise warmup_steps (now {self.warmup_steps}), then start in a new folder"
            )
        self.losses.append(value)
        self.tokens += inputs["input_ids"].numel() * self.args.world_size
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the base class walks over all parameters for this, each step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Nothing: `_Log` writes the log, and a growing history in every checkpoint is of no use."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with writing(self.args.output_dir):
            super()._save_checkpoint(*args, **kwargs)
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            if self.args.should_save:
                _mark_complete(folder)


class _Log(TrainerCallback):  # type: ignore[misc]
    """The progress bar and log.jsonl."""

    def __init__(self, trainer: _Trainer, file: Path, bar: Any, tokens: int, seconds: float) -> None:
        self.trainer, self.file, self.bar = trainer, file, bar
        self.tokens, self.seconds = tokens, seconds
        self.start = self.row_start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.bar.update(1)
        step = state.global_step
        if step % LOG_STEPS and step % args.save_steps and step != state.max_steps:
            return
        now = time.monotonic()
        rate = self.trainer.tokens / max(1e-9, now - self.row_start)
        loss = sum(self.trainer.losses) / len(self.trainer.losses)
        self.tokens += self.trainer.tokens
        row = {
            "step": step,
            "loss": round(loss, 6),
            "lr": kwargs["optimizer"].param_groups[0]["lr"],
            "tokens": self.tokens,
            "seconds": round(self.seconds + now - self.start, 2),
            "tokens_per_second": round(rate, 1),
        }
        with writing(self.file), open(self.file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        self.bar.set_postfix_str(f"loss {loss:.3f}, {count(rate)} tok/s", refresh=False)
        self.trainer.losses, self.trainer.tokens, self.row_start = [], 0, now


def _mark_complete(folder: Path) -> None:
    """Name every file of a checkpoint with its size, once all of them are on the disk."""
    sizes = {}
    for file in sorted(folder.iterdir()):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
        sizes[file.name] = file.stat().st_size
    write_json(folder / COMPLETE, sizes)


def _is_complete(folder: Path) -> bool:
    if not (folder / COMPLETE).is_file():
        return False
    sizes = read_json(folder / COMPLETE)
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def latest_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of a run; what a killed run left half-written, and what is older, is deleted."""
    found = {}
    for folder in (out / CHECKPOINTS).glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        if number.isdigit() and _is_complete(folder):
            found[int(number)] = folder
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not found:
        return None
    newest = max(found)
    for step, folder in found.items():
        if step != newest:
            shutil.rmtree(folder, ignore_errors=True)
    return found[newest]


def discard_checkpoints(out: Path) -> None:
    """Call when the trained model is safely on disk."""
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def _log_until(file: Path, step: int) -> list[dict[str, Any]]:
    """The rows up to the checkpoint; later ones (their steps will be taken again) and a torn last line are dropped."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if row["step"] <= step:
            rows.append(row)
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train(
    model: Any,
    dataset: Any,
    loss_fn: LossFunction,
    out: Path,
    options: TrainingOptions,
    *,
    seed: int,
    label: str,
    ordered: bool = False,
    max_grad_norm: float = 1.0,
) -> dict[str, Any]:
    """Train `model` in place and return counts; go on from `out`/checkpoints if a run was killed.

    `dataset[i]` is a mapping of arrays of one shape for all i, `input_ids` [context] among them. It is shuffled anew each
    epoch, from `seed`; with `ordered` it is read as it is, and must hold at least steps x batch_size rows. `loss_fn(model,
    batch)` gets stacked rows on the model's device under autocast and returns a scalar. AdamW (betas 0.9, 0.98; no decay on
    norms and biases).

    The caller saves the model, then calls `discard_checkpoints(out)`; until then the last checkpoint stays, so a kill in
    between costs nothing. Raises TrainingDiverged (naming the step) where the loss is NaN or infinite.
    """
    steps, batch_size = options.steps, options.batch_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if batch_size % world:
        raise InputError(f"batch_size is {batch_size}; it must be a multiple of the {world} processes")
    if ordered and len(dataset) < steps * batch_size:
        raise InputError(
            f"the data have {len(dataset)} rows; {steps} steps of {batch_size} need {steps * batch_size}"
        )
    quiet()
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = latest_checkpoint(out)
    done = int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0
    rows = _log_until(out / LOG, done)
    arguments = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=steps,
        per_device_train_batch_size=batch_size // world,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        adam_beta2=0.98,
        optim="adamw_torch_fused",
        max_grad_norm=max_grad_norm,
        seed=seed,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=2,  # the newest may be half-written when the process dies: the one before it must still be there
        logging_strategy="no",
        logging_nan_inf_filter=False,
        log_level="error",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    precision = choose_precision(arguments.device)
    use_cache = model.config.use_cache
    with progress(label, steps, done=done) as bar:
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=dataset if ordered else Shuffled(dataset, steps * batch_size, seed),
            data_collator=collate,
            loss_fn=loss_fn,
            precision=precision,
            warmup_steps=options.warmup_steps,
            floor=options.min_learning_rate / options.learning_rate if options.learning_rate else 1.0,
        )
        carried = rows[-1] if rows else {"tokens": 0, "seconds": 0.0}
        log = _Log(trainer, out / LOG, bar, int(carried["tokens"]), carried["seconds"])
        trainer.add_callback(log)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.config.use_cache = use_cache
    model.eval()
    rows = _log_until(out / LOG, steps)
    return {
        "steps": steps,
        "tokens": rows[-1]["tokens"],
        "train_seconds": rows[-1]["seconds"],
        "loss_first": rows[0]["loss"],
        "loss_last": rows[-1]["loss"],
        "precision": precision.name,
        "precision_reason": precision.reason,
    }
