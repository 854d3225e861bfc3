"""Before a build starts: does what it will need fit on this disk and in this memory? Compares the estimate with what is free.

Only what is still to be written counts, since a build that goes on has its files already. The estimate is "at most" for text
and tokens, so `--force` goes on all the same. Arithmetic, and questions to the system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import shares_blocks
from edgespec.core.free_space import bytes_in, free_disk, free_memory, on_one_disk
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size
from edgespec.planning import costs
from edgespec.planning.devices_fit import check_fit, fit, fitting
from edgespec.planning.drafter_shape import drafter_shape
from edgespec.planning.estimate import StageCost, disk_peak
from edgespec.planning.plan_stages import (
    ON_HOST,
    PUBLISHED_BYTES,
    TOGETHER,
    TRAININGS,
    WRITING,
    own_bytes,
    stages_of,
    trainings,
    usable,
)
from edgespec.recipe.devices import device_of
from edgespec.recipe.schema import Recipe
from edgespec.recipe.targets import TARGETS, TINY_CHAT, find_shape, gguf_of, is_hub_id
from edgespec.shell.environment import HOME, cache_folder
from edgespec.stages.own_gguf import expanded
from edgespec.stages.stage import STAGE_FILE

RUNNING = 400 * 2**20
"""Bytes of the interpreter with torch and its libraries, measured as resident memory after importing them."""
WITHOUT_WRITER = ("target", "tune", "pretrain", *ON_HOST)
"""Stages that do not run the target as the recipe's `inference` says."""


@dataclass(frozen=True)
class Shortage:
    """One thing there is too little of. `what`: 'disk' or 'memory'; bytes. `cures`: what makes room for it."""

    what: str
    stage: str
    needed: int
    free: int
    where: str
    cures: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.stage} needs {byte_size(self.needed)} of {self.what} and {byte_size(self.free)} are free {self.where}"


@dataclass(frozen=True)
class Fetched:
    """What a target takes of a disk before the first stage: bytes in `place`. `cure`: what moves it."""

    what: str
    bytes: int
    place: Path
    cure: str

    def shortage(self) -> Shortage | None:
        free = free_disk(self.place)
        if self.bytes <= free:
            return None
        return Shortage("disk", self.what, self.bytes, free, f"in {self.place}", (self.cure,))


@dataclass(frozen=True)
class Room:
    """What a build may take. `memory` in bytes, None where it is not known; `on_gpu`: it is an accelerator's.

    `processes`: of the whole run; `sharing`: how many of them take from this memory.
    """

    disk: int
    memory: int | None
    on_gpu: bool = False
    processes: int = 1
    sharing: int = 1


def room_here(out: Path) -> Room:
    """The disk of `out` and this machine's memory, shared by the processes that torchrun started here."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return Room(free_disk(out), free_memory(), processes=world, sharing=local)


def shortages(
    stages: Sequence[StageCost], room: Room, place: Path, fetched: Fetched | None = None
) -> list[Shortage]:
    """What is too little for these stages: the disk for all of them together and what is fetched to it, memory for each."""
    found = []
    needed = disk_peak(stages)
    cures: tuple[str, ...] = ("--out on another disk", "fewer --pretrain.steps", "fewer precisions")
    largest = max(stages, key=lambda stage: stage.disk + stage.passing, default=None)
    name = "" if largest is None else largest.folder
    if largest is not None and len(stages) > 1:
        name = f"the build (of it {name} {byte_size(largest.disk + largest.passing)})"
    if fetched is not None and on_one_disk(place, fetched.place):
        needed, cures = needed + fetched.bytes, (fetched.cure, *cures)
        name = f"{name} with {fetched.what} ({byte_size(fetched.bytes)})" if name else fetched.what
    elif fetched is not None and (lack := fetched.shortage()):
        found.append(lack)
    if needed > room.disk:
        found.append(Shortage("disk", name, needed, room.disk, f"in {place.resolve()}", cures))
    if room.memory is not None:
        where = "on the GPU" if room.on_gpu else "on this machine"
        for stage in stages:
            if room.on_gpu and (stage.on_host or stage.stage in ON_HOST):
                continue
            sharing = room.sharing if stage.stage in TOGETHER else 1
            memory = sharing * (stage.memory + RUNNING + (stage.on_gpu if room.on_gpu else 0))
            if memory > room.memory:
                name = stage.folder + (f" in {sharing} processes" if sharing > 1 else "")
                lighter = _memory_cures(stage.folder)
                found.append(Shortage("memory", name, memory, room.memory, where, lighter))
    return found


def _memory_cures(stage: str) -> tuple[str, ...]:
    """What makes a stage take less memory, and what always helps."""
    batches = {
        "evaluate": "evaluate.batch-size",
        **dict.fromkeys(WRITING, "generate.batch-size"),
        **{name: f"{name}.micro-batch-size" for name in TRAININGS},
    }
    smaller = [f"a smaller --{batches[stage]}"] if stage in batches else []
    narrower = [] if stage in WITHOUT_WRITER else ["--inference.dtype bfloat16"]
    fewer = ["fewer precisions"] if stage in ("export", "verify") else []
    return (*smaller, *narrower, *fewer, "a larger machine")


def find_shortages(recipe: Recipe, out: Path, room: Room) -> list[Shortage]:
    """What the rest of a build in `out` will lack; [] where the target's shape is not known before it is fetched or looked at."""
    shapes = _known_shapes(recipe)
    if shapes is None:
        return []
    done = {"pack"} if shares_blocks(out) else set()  # its copies take no room
    made = (cache_folder() / "targets").glob(f"{TINY_CHAT}-*/model/config.json")
    if recipe.target == TINY_CHAT and any(made):
        done.add("target")
    left = [stage for stage in _left(recipe, out, *shapes, room.processes) if stage.folder not in done]
    return shortages(left, room, out, _fetched(recipe.target, out, shapes[0]))


def disk_left(recipe: Recipe, out: Path) -> int:
    """Bytes that the stages of a build in `out` which are not done write, at most; 0 where that is not known."""
    shapes = _known_shapes(recipe)
    return 0 if shapes is None else disk_peak(_left(recipe, out, *shapes, 1))


def _known_shapes(recipe: Recipe) -> tuple[ModelShape, ModelShape] | None:
    """The target's shape and the drafter's, where the target's and a teacher's are known before they are fetched."""
    tune = recipe.tune
    try:
        target = find_shape(recipe.target)
        teacher = find_shape(tune.teacher) if tune.steps and tune.teacher else target
    except InputError:
        return None  # its own stage says what is wrong with it
    return None if target is None or teacher is None else (target, drafter_shape(target, recipe.drafter))


def _left(
    recipe: Recipe, out: Path, target: ModelShape, drafter: ModelShape, processes: int
) -> list[StageCost]:
    """The stages that are not done, each with what it still writes."""
    written = fitting(recipe, target, drafter, own_bytes(recipe))
    stages = stages_of(written, target, drafter, processes)
    return [
        replace(stage, disk=max(0, stage.disk - bytes_in(folder)))
        for stage in stages
        if not ((folder := out / stage.folder) / STAGE_FILE).exists()
    ]


def check_processes(recipe: Recipe, processes: int) -> None:
    """What a later stage would refuse after hours: work that does not divide among the processes. Raises InputError."""
    trained = trainings(recipe)
    odd = [name for name in trained if getattr(recipe, name).batch_size % processes]
    if odd:
        seen = " and ".join(f"{name}.batch_size is {getattr(recipe, name).batch_size}" for name in odd)
        raise InputError(
            f"{seen}; it must be a multiple of the {processes} processes: start {usable(recipe, processes)}, or give another"
        )
    for name in trained:
        options = getattr(recipe, name)
        share, micro = options.batch_size // processes, options.micro_batch_size
        if micro is not None and share % min(micro, share):
            raise InputError(
                f"{name}.micro_batch_size is {micro}; it must divide a process's share of {name}.batch_size, {share} sequences"
            )
    generate = recipe.generate
    shards = -(-generate.prompts // generate.shard_size)
    if shards < processes:
        raise InputError(
            f"{processes} processes cannot share {shards} shards of responses (generate.prompts {generate.prompts} / "
            f"generate.shard_size {generate.shard_size}); give --generate.shard-size {max(1, generate.prompts // processes)}"
        )


def check_device(recipe: Recipe) -> None:
    """What the plan would refuse after the target was fetched: a pair that the device has no memory for. Raises InputError."""
    device, shapes = device_of(recipe), _known_shapes(recipe)
    if device is not None and shapes is not None:
        check_fit(fit(device, *shapes, own_bytes(recipe)), recipe.target)


def _fetched(name: str, out: Path, target: ModelShape) -> Fetched | None:
    """A target still to come from the hub into its cache, or from a GGUF file into edgespec's; None for another."""
    from huggingface_hub import constants

    repo = TARGETS[name].repo if name in TARGETS else name if is_hub_id(name) else None
    if Path(name).is_dir() or (out / "target" / STAGE_FILE).exists():
        return None
    if (file := gguf_of(name)) is not None:
        return None if expanded(file) else expansion(name, costs.weight_bytes(target))
    if repo is None:
        return None
    place = Path(constants.HF_HUB_CACHE)
    if any((place / f"models--{repo.replace('/', '--')}").glob("snapshots/*/*.safetensors")):
        return None  # there, or under way: what is left of it cannot be told without the hub
    size = PUBLISHED_BYTES * target.parameters
    return Fetched(f"the download of {repo}", size, place, "HF_HOME on another disk")


def expansion(name: str | Path, size: int) -> Fetched:
    """The weights of a GGUF file as a model folder of `size` bytes."""
    return Fetched(f"the expanded weights of {name}", size, cache_folder(), f"{HOME} on another disk")


def told(found: Sequence[Shortage]) -> str:
    """Every shortage and what to do about it."""
    cures = dict.fromkeys(cure for shortage in found for cure in shortage.cures)
    return f"{'; '.join(map(str, found))}. Try {', '.join(cures)}"


def check_memory(needed: Mapping[str, int], place: Path, cure: str = "") -> None:
    """Refuse stages that take more bytes of memory than are free here. Raises InputError with both numbers.

    `cure`: what to do, where the verb has no options for it.
    """
    stages = [StageCost(stage, 0, 0.0, memory, 0) for stage, memory in needed.items()]
    found = shortages(stages, room_here(place), place)
    if found and cure:
        raise InputError(f"{'; '.join(map(str, found))}; {cure}")
    refuse(found)


def refuse(found: Sequence[Shortage]) -> None:
    """Raises InputError with every shortage and what to do about it; nothing where there is none."""
    if not found:
        return
    raise InputError(f"{told(found)}; `edgespec plan` shows every stage; --force starts anyway")
