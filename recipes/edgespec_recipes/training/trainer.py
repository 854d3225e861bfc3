"""The one training loop: transformers.Trainer with our schedule, our log, and checkpoints that survive a kill -9.

Knows nothing of what is learnt: the data come as a dataset of fixed-shape rows and the loss as a function of the model and all
micro-batches of an optimiser step, because a mean over tokens is one over the whole step.
A run that was killed and started again ends with the weights of an uninterrupted one (bit for bit in one process on one
CPU), because the order of the rows depends on the seed alone and a checkpoint carries optimizer, schedule and random states.
Several processes (torchrun) share every batch; their number and that of the micro-batches change rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import sync_file, writing
from edgespec.core.progress import progress
from edgespec.recipe.schema import TrainingOptions
from edgespec.stages.stage import CHECKPOINTS
from edgespec_recipes.data.token_rows import Batch
from edgespec_recipes.models.loading import quiet, save_model
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.memory import freed_memory_kept
from edgespec_recipes.parallel.precision import choose_precision
from edgespec_recipes.parallel.sharding import shard_on_cpu, to_train, trainer_settings, whole, whole_values
from edgespec_recipes.training import checkpoints
from edgespec_recipes.training.curves import plot_curves
from edgespec_recipes.training.training_log import LOG, TrainingLog, Watch, rows_until

LossFunction = Callable[[Any, Sequence[Batch]], Iterator[torch.Tensor]]
"""(model, the micro-batches of a step) -> a scalar for each of them, in order, computed when it is asked for: after the backward
pass of the one before. Their sum, averaged over the processes, is the step's loss."""

RECENT = 20  # losses that a diverged run's state.json shows
LOADERS = 4  # processes that make rows while an accelerator computes; on a CPU they would take its cores


class TrainingDiverged(EdgespecError):
    """The loss is no number any more."""


def warmup_decay(step: int, steps: int, warmup_steps: int, floor: float) -> float:
    """WarmupDecayLR as a factor of the peak rate: linear from 0 over `warmup_steps`, then linear to `floor` at the last step.

    `step` counts optimizer steps already taken. DeepSpeed's schedule of that name, with the minimum of direct alignment
    (appendix A.3: 1e-4 -> 1e-6).
    """
    warmup_steps = min(warmup_steps, steps - 1)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return 1.0 - (1.0 - floor) * min(1.0, done)


def collate(rows: list[Mapping[str, np.ndarray]]) -> Batch:
    """Stack rows of equal shape; integers become int64, floats and bools stay."""
    batch = {}
    for name in rows[0]:
        stacked = np.stack([row[name] for row in rows])
        batch[name] = torch.from_numpy(stacked.astype(np.int64) if stacked.dtype.kind in "ui" else stacked)
    return batch


class _Trainer(transformers.Trainer):  # type: ignore[misc]
    """What the base class does not have: a loss function of ours, WarmupDecayLR, marked checkpoints, rows read in order."""

    def __init__(
        self, loss_fn: LossFunction, options: TrainingOptions, out: Path, log: TrainingLog, **kwargs: Any
    ) -> None:
        self.loss_fn, self.options, self.out, self.training_log = loss_fn, options, out, log
        self.recent: list[float] = []
        self.waiting: list[Batch] = []  # the micro-batches of a step that has not begun
        self.losses: Iterator[torch.Tensor] = iter(())
        self.values: list[float] = []  # of the step's micro-batches so far
        # base class: a loss function of the caller's own has divided by the whole step; it does not divide once more
        super().__init__(compute_loss_func=loss_fn, **kwargs)
        self.precision = choose_precision(self.args.device)
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        peak, warmup_steps = self.options.learning_rate, self.options.warmup_steps
        floor = min(1.0, self.options.min_learning_rate / peak) if peak else 1.0
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer,
            lambda step: warmup_decay(step, num_training_steps, warmup_steps, floor),
        )
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Batch], None]:
        """The base class asks for all micro-batches of a step before the first one is computed."""
        self.waiting = super().get_batch_samples(*args, **kwargs)[0]
        return list(self.waiting), None

    def compute_loss(self, model: Any, inputs: Batch, *_: Any, **__: Any) -> torch.Tensor:
        with self.precision.autocast(self.args.device):
            if self.waiting:  # a step begins; only now are the random states those of a run that goes on
                self.losses = self.loss_fn(model, [self._prepare_inputs(batch) for batch in self.waiting])
                self.values, self.waiting = [], []
            loss = next(self.losses)
        value = float(processes.total(loss)) / processes.world()  # a NaN in one process stops them all
        if not math.isfinite(value):
            raise TrainingDiverged(self._diverged(value, inputs))
        self.values.append(value)
        if len(self.values) == self.args.gradient_accumulation_steps:
            self.losses = iter(())  # what it holds is free
            self.recent = [*self.recent[-RECENT + 1 :], sum(self.values)]
            self.training_log.losses.append(sum(self.values))
        self.training_log.fresh += inputs["input_ids"].numel() * processes.world()
        return loss

    def _diverged(self, value: float, batch: Batch) -> str:
        """Save what shows why, and say where it lies."""
        step = self.state.global_step + 1
        ids = processes.gathered(batch["row_id"]).tolist() if "row_id" in batch else []
        weights = whole(self.model_wrapped).state_dict()
        moments = whole_values(self.optimizer.state_dict()["state"])
        if not processes.rank():
            about = {
                "step": step,
                "loss": str(value),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "row_ids": ids,
                "recent_losses": self.recent,
            }
            checkpoints.keep_diverged(self.out, weights, moments, batch, about)
        processes.wait()  # the first one that ends has torchrun end the others
        named = f" on the rows {ids}" if ids else ""
        return (
            f"the loss is {value} at step {step} of {self.state.max_steps}{named}; model, optimizer and batch lie in "
            f"{self.out / checkpoints.DIVERGED}. Lower learning_rate (now {self.options.learning_rate:g}) or raise warmup_steps "
            f"(now {self.options.warmup_steps}), then start in a new folder"
        )

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the base class walks over all parameters for this, each step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Nothing: `TrainingLog` writes the log, and a growing history in every checkpoint is of no use."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with writing(self.args.output_dir):
            super()._save_checkpoint(*args, **kwargs)
            processes.wait()  # every process writes its random states
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            if self.args.should_save:
                sync_file(self.training_log.file)  # a run that goes on from here reads the rows up to here
                checkpoints.mark_complete(folder)
            processes.wait()


class _Keep(TrainerCallback):  # type: ignore[misc]
    """Calls back every so many steps: for checkpoints that are results of their own."""

    def __init__(self, keep: Callable[[int, Any], None], steps: int) -> None:
        self.keep, self.steps = keep, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.keep(state.global_step, kwargs["model"])


def _arguments(out: Path, options: TrainingOptions, seed: int) -> TrainingArguments:
    share = options.batch_size // processes.world()
    micro = min(options.micro_batch_size or share, share)
    if options.batch_size % processes.world():
        raise InputError(
            f"batch_size is {options.batch_size}; it must be a multiple of the {processes.world()} processes"
        )
    if share % micro:
        raise InputError(
            f"micro_batch_size is {micro}; it must divide a process's share of a step, {share} rows"
        )
    arguments = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=options.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        adam_beta2=0.98,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        seed=seed,
        save_strategy="steps",
        save_steps=options.save_steps,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        log_level="error",
        log_level_replica="error",  # of the other processes
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=LOADERS if torch.cuda.is_available() else 0,
        **trainer_settings(),
    )
    # One device for each process. Without torchrun the base class would take all GPUs of a machine and give each a part of every
    # batch, and our losses need it whole.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def train(
    model: Any,
    dataset: Any,
    loss_fn: LossFunction,
    out: Path,
    options: TrainingOptions,
    *,
    seed: int,
    label: str,
    watch: Watch | None = None,
    watch_steps: int = 0,
    keep: Callable[[int, Any], None] | None = None,
    keep_steps: int = 0,
) -> dict[str, Any]:
    """Train `model` in place and return counts; go on from `out`/checkpoints if a run was killed.

    `dataset[i]` is a mapping of arrays of one shape for all i, `input_ids` [context] among them. It is read in its order,
    and must hold at least steps x batch_size rows. `loss_fn` (see LossFunction) gets stacked rows on the model's device under
    autocast; what its `scalars()` gives (if it has that) goes into the log. Every `watch_steps` steps `watch(model)` is measured,
    every `keep_steps` steps `keep(step, model)` is called, both in every process. AdamW (betas 0.9, 0.98; no decay on norms and
    biases).

    The caller ends with `save_whole`; the last checkpoint stays until `run_stage` has marked the stage as done, so a kill in
    between costs nothing. Raises TrainingDiverged where the loss is NaN or infinite: it names the step and
    the rows, and model, optimizer and batch lie in `out`/diverged.
    """
    steps, batch_size = options.steps, options.batch_size
    if not steps:
        return {"steps": 0, "tokens": 0, "train_seconds": 0.0}
    if len(dataset) < steps * batch_size:
        raise InputError(
            f"the data have {len(dataset)} rows; {steps} steps of {batch_size} need {steps * batch_size}"
        )
    quiet()
    processes.start()
    out.mkdir(parents=True, exist_ok=True)
    with processes.first():
        checkpoint = checkpoints.latest_checkpoint(out)
    if checkpoint:
        checkpoints.check_size(checkpoint, model)
    done = int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0
    rows = rows_until(out / LOG, done)
    arguments = _arguments(out, options, seed)
    use_cache = model.config.use_cache
    with progress(label, steps, done=done) as bar:
        scalars = getattr(loss_fn, "scalars", dict)
        log = TrainingLog(out / LOG, bar, rows, scalars=scalars, watch=watch, watch_steps=watch_steps)
        trainer = _Trainer(
            loss_fn,
            options,
            out,
            log,
            model=to_train(model),
            args=arguments,
            train_dataset=dataset,
            data_collator=collate,
            callbacks=[log, *([_Keep(keep, keep_steps)] if keep and keep_steps else [])],
        )
        with closing(log), freed_memory_kept():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        whole(trainer.model)
    model.config.use_cache = use_cache
    model.eval()
    rows = rows_until(out / LOG, steps)
    if not processes.rank():
        plot_curves(out / LOG, out / "curves.png", f"{label}, seed {seed}")
    return {
        "steps": steps,
        "tokens": rows[-1]["tokens"],
        "train_seconds": rows[-1]["seconds"],
        "loss_first": rows[0]["loss"],
        "loss_last": rows[-1]["loss"],
        "alpha_last": rows[-1].get("alpha"),  # of the held-out rows, where they are watched: the last step is
        "processes": processes.world(),
        "precision": trainer.precision.name,
        "precision_reason": trainer.precision.reason,
    }


def save_whole(model: Any, tokenizer_folder: Path, out: Path) -> None:
    """Write a model folder of a model in training; every process must call it, process 0 writes."""
    plain = whole(model)
    if not processes.rank():
        save_model(plain, tokenizer_folder, out)
    processes.wait()
