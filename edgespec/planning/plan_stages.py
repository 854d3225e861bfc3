"""How long the stages of a recipe take on given hardware, how much of an accelerator's memory they fill, and what is on the disk.

Time is the longer of two: FLOPs at the share of the peak that trainings reach, and bytes of weights and caches that are read for
one token after another, at the share of the bandwidth that decoding reaches. Both shares are the user's to set. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.core.shapes import ModelShape
from edgespec.planning.estimate import StageCost, disk_peak, estimate
from edgespec.planning.hardware import Hardware
from edgespec.recipe.schema import (
    READ,
    ROUNDED,
    SELF_INSTRUCTIONS,
    SELF_PROMPTS,
    SELF_TEXT,
    STATES,
    Recipe,
    TrainingOptions,
)
from edgespec.recipe.targets import gguf_of, has_alike_layers

TRAININGS = ("tune", "pretrain", "reference", "distill")
WRITING = (SELF_PROMPTS, SELF_TEXT, SELF_INSTRUCTIONS, "generate")
"""Stages in which the target writes."""
TOGETHER = (*TRAININGS, *WRITING, STATES, READ, "store")
"""Stages that all processes work on; the others are one process's."""
ON_HOST = (ROUNDED, "export", "verify", "pack")
"""Stages that take the machine's memory and not an accelerator's."""
DISK_RATE = 0.5e9
"""Assumed bytes a second of reading weights and writing files, for stages that do little else."""
PUBLISHED_BYTES = 2
"""Of a weight as the hub has it (bf16 or f16)."""


@dataclass(frozen=True)
class StageTime:
    """A stage on hardware: seconds, memory of one device in bytes, and whether that fits. `binds`: what the time is spent on."""

    cost: StageCost
    devices: int
    seconds: float
    memory: int
    fits: bool
    binds: str


def for_processes(recipe: Recipe, processes: int) -> Recipe:
    """The recipe as one of several processes meets it: a share of every batch is its own, in passes no larger than before."""
    shares: dict[str, Any] = {}
    for name in TRAININGS:
        options: TrainingOptions = getattr(recipe, name)
        own = math.ceil(options.batch_size / processes)
        shares[name] = replace(options, micro_batch_size=min(options.micro_batch_size or own, own))
    return replace(recipe, **shares)


def own_bytes(recipe: Recipe) -> int | None:
    """Bytes of the target's own GGUF file, which the bundle has as it is; None without one, and where tuning changes the target.

    Raises InputError as `gguf_of` does.
    """
    file = None if recipe.tune.steps else gguf_of(recipe.target)
    return file.stat().st_size if file is not None and file.is_file() else None


def stages_of(recipe: Recipe, target: ModelShape, drafter: ModelShape, processes: int) -> list[StageCost]:
    """The recipe's stages in so many processes, with what its target's files say of them."""
    alike = has_alike_layers(recipe.target)
    own = own_bytes(recipe)
    return estimate(for_processes(recipe, processes), target, drafter, processes, own, alike=alike)


def trainings(recipe: Recipe) -> list[str]:
    """The trainings that this recipe has."""
    selects = recipe.distill.select_fraction < 1
    return [name for name in TRAININGS if getattr(recipe, name).steps and (selects or name != "reference")]


def usable(recipe: Recipe, count: int) -> int:
    """Processes that can share the recipe: the most of `count` that divide every training's batch."""
    batches = [getattr(recipe, name).batch_size for name in trainings(recipe)]
    return max(n for n in range(1, count + 1) if all(batch % n == 0 for batch in batches))


def stage_times(
    recipe: Recipe,
    target: ModelShape,
    drafter: ModelShape,
    hardware: Hardware,
    mfu: float,
    bandwidth_share: float,
) -> list[StageTime]:
    """Every stage in order. FLOPs of a stage are all processes' together; its memory is one process's.

    `mfu`: share of the peak FLOP/s that training reaches; `bandwidth_share`: of the bandwidth that decoding reaches.
    """
    if hardware.measured:
        mfu = bandwidth_share = 1.0  # a measured rate is no peak
    found = []
    for cost in stages_of(recipe, target, drafter, hardware.count):
        devices = hardware.count if cost.stage in TOGETHER else 1
        computing = cost.flops / (devices * hardware.flops * mfu)
        reading = cost.reading / (hardware.bandwidth * bandwidth_share)
        read = max(cost.memory, PUBLISHED_BYTES * target.parameters) if cost.memory else 0
        writing = (cost.disk + cost.passing + read) / DISK_RATE if cost.stage in ON_HOST else 0.0
        seconds, binds = max((computing, "arithmetic"), (reading, "memory"), (writing, "disk"))
        elsewhere = (cost.on_host or cost.stage in ON_HOST) and not hardware.measured
        memory = cost.memory + (0 if hardware.measured else cost.on_gpu)
        fits = elsewhere or not hardware.memory or memory <= hardware.memory
        found.append(StageTime(cost, devices, seconds, memory, fits, binds))
    return found


@dataclass(frozen=True)
class Storage:
    """Bytes: the target as published, what each stage leaves at its largest, the bundle alone, and temporary files on top."""

    download: int
    stages: dict[str, int]
    bundle: int
    passing: int

    @property
    def total(self) -> int:
        return self.download + sum(self.stages.values()) + self.passing


def storage(times: Sequence[StageTime], target: ModelShape, *, hub: bool) -> Storage:
    """What the whole build takes on disks. `hub`: the target is still to be downloaded."""
    stages = {time.cost.stage: time.cost.disk for time in times if time.cost.disk}
    passing = disk_peak(time.cost for time in times) - sum(stages.values())
    return Storage(PUBLISHED_BYTES * target.parameters * hub, stages, stages.get("pack", 0), passing)
