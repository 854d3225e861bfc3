"""Rehearse a build at a target's true size, before its weights are there: random weights of the same shape, every stage for real.

The target is written as bf16 shards, exported to GGUF Q4_0 and ONNX int4, and run: as a Q4_0 file it writes responses and gives
distributions. The drafter has the shape a build would give it, is trained for a few steps and exported. Every file is checked;
chat and bench run on both engines. Every stage is a process of its own, whose time and peak memory are in the table at the end.
Run the same command again after an interruption: what is done is not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.building.measured import run_measured
from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.files import read_json, read_object, write_json
from edgespec.core.folder_lock import held, refuse_other
from edgespec.core.free_space import bytes_in, free_disk, free_memory
from edgespec.core.options import knob, to_mapping
from edgespec.core.output import step, write_result
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size, duration, table
from edgespec.planning.plan import UNMEASURED
from edgespec.recipe.drafter import derive, describe
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target
from edgespec.stages.record import Reads, clear_if_inputs_changed
from edgespec.stages.sources import model, stages
from edgespec.stages.stage import STAGE_FILE, run_stage

PLAN = "rehearsal.json"
GIB = 2**30
TINY = ModelShape(256, 4, 4, 2, 64, 512, 2048, tied=False, context_length=512)
STAGES = (
    ("weights", "random bf16 weights of the target, shard by shard; tokenizer, text, prompts"),
    ("pretrain", "the drafter learns from text"),
    ("gguf", "the target as GGUF Q4_0"),
    ("onnx", "the target as ONNX int4, two layers at a time"),
    ("generate", "the Q4_0 target writes responses"),
    ("store", "the Q4_0 target's distributions on them"),
    ("distill", "the drafter learns them"),
    ("drafter", "the drafter as GGUF Q4_0 and ONNX int4"),
    ("offload", "the target in torch, bf16, its layers read from the disk"),
    ("check-gguf", "the Q4_0 target against its weights and torch, layer by layer"),
    ("check-onnx", "the int4 target the same way"),
    ("bundle", "both pairs, checksums"),
)
TALKS = ("chat", "bench")


@dataclass(frozen=True)
class RehearsalOptions:
    out: str = knob("build/rehearsal", "folder for everything that is made")
    shape: str = knob("", "rehearse this alias's shape instead, or tiny: a shape of a few seconds")
    tokenizer: str = knob("", "folder with the target's tokenizer (default: one of its size is made)")
    context: int = knob(2048, "tokens in a row of both trainings", at_least=64)
    pretrain_steps: int = knob(20, "steps of the drafter's pretraining", at_least=1)
    distill_steps: int = knob(5, "steps of its distillation", at_least=1)
    responses: int = knob(4, "responses that the target writes", at_least=1)
    max_new_tokens: int = knob(32, "longest response in tokens", at_least=2)
    run_context: int = knob(
        512, "context of the engines; the cache of a full one takes gigabytes", at_least=128
    )
    minutes: float = knob(60.0, "most minutes in all; more is a failed check", at_least=0.0)
    memory: float = knob(
        20.0, "most GiB that a stage may have at its peak; more is a failed check", at_least=0.1
    )
    check_only: bool = knob(False, "say what it needs and what is there, and make nothing")


def target_shape(target: str, options: RehearsalOptions) -> ModelShape:
    return TINY if options.shape == "tiny" else shape_of_target(options.shape or target)


def needed_disk(shape: ModelShape) -> int:
    """Bytes on the disk at the worst moment: the bf16 weights, the Q4_0 and int4 files, and what lies beside them.

    That is a slice with its export, or the bundle's copies of the files.
    """
    tables = shape.embedding_parameters * (2 - shape.tied)
    slices = 2 * shape.layer_parameters + tables
    files = (0.5625 + 0.625) * shape.parameters + 4 * shape.embedding_parameters
    return round(2 * shape.parameters + files + max(9 * slices, files) + GIB / 4)


def needed_memory(shape: ModelShape, context: int) -> int:
    """Bytes of the largest stage, about: the engines with both models, or the export of a slice."""
    cache = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim * context
    running = round(0.75 * shape.parameters) + 4 * shape.embedding_parameters + cache
    slices = 9 * (2 * shape.layer_parameters + shape.embedding_parameters * (2 - shape.tied))
    return max(running, slices) + GIB


def run(target: str, options: RehearsalOptions, command: str, json: str = "") -> int:
    """Rehearse a build of `target`, an alias or a folder with a config.json; `command`: what the folder's lock says;
    `json`: where every stage's time and memory go as JSON.

    Raises InputError where there is too little room or the folder is another's, CheckFailed where a bound is broken.
    """
    out, shape = Path(options.out).expanduser(), target_shape(target, options)
    print(describe(shape, derive(shape, DrafterOptions())), end="\n\n")
    needed = _preflight(out, shape, options)
    if options.check_only:
        write_result(json, needed)
        return 0
    with held(out, command):
        _claim(out, target, options, shape)
        rows = _rehearse(out, options)
        write_result(json, [{"stage": name, **row} for name, row in rows])
        return _judge(rows, options)


def _rehearse(out: Path, options: RehearsalOptions) -> list[tuple[str, dict[str, Any]]]:
    """Run all stages; a line of the table for each, which is shown as far as it goes where one fails."""
    tokenizer = Path(options.tokenizer).expanduser()
    given = model("tokenizer", tokenizer, out, weights=False) if options.tokenizer else Reads()
    if why := clear_if_inputs_changed(out / "weights", given):
        step(f"! weights: {why}: running again")
    rows: list[tuple[str, dict[str, Any]]] = []
    try:
        for name, what in STAGES:
            program = [sys.executable, "-m", "edgespec.building.rehearse_stages", str(out), name]
            rows.append(_stage(out, name, what, program))
        for verb in TALKS:
            for engine, precision in UNMEASURED:
                rows.append(_talk(out, verb, engine, precision, options))
    finally:
        if rows:
            print(f"\n{_table(rows)}", flush=True)
    return rows


def _preflight(out: Path, shape: ModelShape, options: RehearsalOptions) -> dict[str, Any]:
    """Say what is needed and what is there, and return it: bytes of disk and memory. Raises InputError where it is not enough."""
    disk, memory = max(0, needed_disk(shape) - bytes_in(out)), needed_memory(shape, options.run_context)
    free, available = free_disk(out), free_memory()
    print(
        f"needs about {byte_size(disk)} on the disk ({byte_size(free)} free) and {byte_size(memory)} of memory "
        f"({'not known how much is free' if available is None else f'{byte_size(available)} free'})",
        flush=True,
    )
    if disk > free:
        raise InputError(
            f"the rehearsal needs {byte_size(disk)} more on the disk of {out}; {byte_size(free)} are free: make room or give "
            "another --rehearsal.out"
        )
    if available is not None and memory > available:
        raise InputError(
            f"the rehearsal needs {byte_size(memory)} of memory and {byte_size(available)} are free; close other programs or "
            "give a smaller --rehearsal.shape"
        )
    return {"disk": {"needed": disk, "free": free}, "memory": {"needed": memory, "free": available}}


def _claim(out: Path, target: str, options: RehearsalOptions, shape: ModelShape) -> None:
    """Make `out` this rehearsal's folder. Raises InputError where it is another's."""
    own = ("out", "minutes", "memory", "check_only")
    asked = {name: value for name, value in to_mapping(options).items() if name not in own}
    plan = {"options": {"target": target, **asked}, "shape": asdict(shape)}
    if (out / PLAN).exists():
        if (seen := read_object(out / PLAN)) != plan:
            other = [
                name for name, value in plan["options"].items() if seen.get("options", {}).get(name) != value
            ]
            raise InputError(
                f"{out} holds a rehearsal of something else ({', '.join(other) or 'another shape'}); give another "
                "--rehearsal.out, or remove that folder"
            )
        return
    refuse_other(out, PLAN, "--rehearsal.out")
    write_json(out / PLAN, plan)


def _stage(
    out: Path, name: str, what: str, argv: Sequence[str], given: str = ""
) -> tuple[str, dict[str, Any]]:
    """Run one stage unless it is done; its line of the table."""
    folder = out / name
    if name != "weights":  # all follow from the weights, by the seed
        clear_if_inputs_changed(folder, stages(out, "weights"))
    step(f"{'✓' if (folder / 'stage.json').exists() else '▸'} {name}: {what}")

    def body(place: Path) -> dict[str, Any]:
        usage = run_measured(argv, place / "log.txt", given)
        found = read_json(place / "found.json") if (place / "found.json").exists() else {}
        return {"peak": usage.peak, "own": usage.own, "found": found}

    counts = run_stage(folder, {}, body)
    return name, {**counts, "seconds": float(read_json(folder / STAGE_FILE)["seconds"])}


def _talk(
    out: Path, verb: str, engine: str, precision: str, options: RehearsalOptions
) -> tuple[str, dict[str, Any]]:
    argv = [sys.executable, "-m", "edgespec", verb, str(out / "bundle" / "pair"), "--engine", engine]
    argv += ["--precision", precision, "--context", str(options.run_context)]
    if verb == "chat":
        argv += ["--draft-length", "3", "--max-new-tokens", str(options.max_new_tokens)]
        return _stage(out, f"chat-{precision}", f"a reply on {engine}", argv, "What is a list?\n")
    report = out / f"bench-{precision}" / "bench.json"
    argv += ["--draft-lengths", "3", "--no-choose", "--max-new-tokens", str(options.max_new_tokens)]
    argv += ["--seconds", "0", "--max-prompts", "3", "--json", str(report)]
    return _stage(out, f"bench-{precision}", f"plain against speculative on {engine}", argv)


def _table(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Time and peak memory of every stage; `own` is the part of the peak that is no mapped file's."""
    lines = [
        (
            name,
            duration(row["seconds"]),
            *("-" if row[name] is None else byte_size(row[name]) for name in ("peak", "own")),
            str(row["found"].get("in words", "")),
        )
        for name, row in rows
    ]
    total = duration(sum(row["seconds"] for _, row in rows))
    lines.append(("in all", total, byte_size(_peak(rows)) if _peak(rows) else "-", "", ""))
    return table(("stage", "time", "peak memory", "own", "what came out"), lines)


def _peak(rows: Sequence[tuple[str, dict[str, Any]]]) -> int:
    """Bytes of the largest stage; 0 where the system tells none."""
    return max(row["peak"] or 0 for _, row in rows)


def _judge(rows: Sequence[tuple[str, dict[str, Any]]], options: RehearsalOptions) -> int:
    """0 where all bounds hold. Raises CheckFailed naming those that do not."""
    seconds, peak = sum(row["seconds"] for _, row in rows), _peak(rows)
    broken = [f"{name}: {line}" for name, row in rows for line in row["found"].get("broken", ())]
    if seconds > 60 * options.minutes:
        broken.append(f"{duration(seconds)} in all; {duration(60 * options.minutes)} at most")
    if peak > GIB * options.memory:
        broken.append(f"a peak of {byte_size(peak)}; {options.memory:g} GiB at most")
    if broken:
        raise CheckFailed("the rehearsal ran through, and: " + "; ".join(broken))
    return 0
