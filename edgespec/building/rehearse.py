"""Rehearse a build at a target's true size, before its weights are there: random weights of the same shape, every stage for real.

The target is written as bf16 shards and made a Q4_0 file, which writes responses. Then a build does what it does for any target:
it trains a drafter of the shape that a build would give it, measures it in torch, where the target's layers are read from the
disk, exports both as GGUF Q4_0 and ONNX int4, verifies every file and packs the bundle. Chat and bench run it on both engines.
Every stage is a process of its own, whose time and peak memory are in the table at the end. Run the same command again after an
interruption: what is done is not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.building.measured import run_measured
from edgespec.building.rehearse_stages import FILE, MEASURED, PLAN, WEIGHTS, RehearsalOptions
from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.files import read_json, read_object, write_json, write_text
from edgespec.core.folder_lock import held, refuse_other
from edgespec.core.free_space import bytes_in, free_disk, free_memory
from edgespec.core.options import to_mapping
from edgespec.core.output import step, write_result
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size, duration, table
from edgespec.planning.plan import UNMEASURED
from edgespec.recipe.drafter import derive, describe
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target
from edgespec.stages.record import Reads, clear_if_inputs_changed, run_id
from edgespec.stages.sources import model
from edgespec.stages.stage import STAGE_FILE

GIB = 2**30
TINY = ModelShape(256, 4, 4, 2, 64, 512, 2048, tied=False, context_length=512)


def _losses(found: dict[str, Any]) -> str:
    return f"{found['steps']} steps, {found['precision']}: loss {found['loss_first']:.2f} to {found['loss_last']:.2f}"


STAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    WEIGHTS: lambda found: (
        f"{byte_size(found['bytes'])} in {found['shards']} shards; tokenizer: {found['tokenizer']}"
    ),
    FILE: lambda found: byte_size(found["bytes"]),
    "pretrain": _losses,
    "generate": lambda found: (
        f"{found['responses']} responses, {found['response_tokens']} tokens, {found['tokens_per_second'] or '-'} tok/s"
    ),
    "store": lambda found: (
        f"{found['stored_positions']} positions in {found['stored_rows']} rows, top {found['top_k']}"
    ),
    "distill": _losses,
    "evaluate": lambda _: "torch read the target's layers from the disk",
    "export": lambda found: byte_size(sum(made["bytes"] for made in found["exported"].values())),
    "verify": lambda found: f"{found['files']} files, {found['positions']} positions",
    "pack": lambda found: f"{found['files']} files, {byte_size(found['bytes'])}",
}
"""In their order: what came out, in words. The first of a build go with `pretrain`: they look at data, models and shapes."""
TALKS = ("chat", "bench")


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

    Raises InputError where there is too little room or the folder is another's, MissingExtra without llama.cpp, CheckFailed where
    a bound is broken.
    """
    from edgespec_runtime.engines.llamacpp import load_library

    out = Path(options.out).expanduser()
    shape = TINY if options.shape == "tiny" else shape_of_target(options.shape or target)
    print(describe(shape, derive(shape, DrafterOptions())), end="\n\n")
    needed = _preflight(out, shape, options)
    if options.check_only:
        write_result(json, needed)
        return 0
    load_library()  # or says that it is missing: the target's file writes, and both of the pair run
    with held(out, command):
        _claim(out, target, options, shape)
        write_text(out / "command.txt", command + "\n")
        rows = _rehearse(out, options)
        write_result(json, rows)
        return _judge(rows, options)


def _rehearse(out: Path, options: RehearsalOptions) -> list[dict[str, Any]]:
    """Run all stages; a row of the table for each, which is shown as far as it goes where one fails. Then what verify found."""
    from edgespec_export.verify.report import verification_table

    tokenizer = Path(options.tokenizer).expanduser()
    given = model("tokenizer", tokenizer, out, weights=False) if options.tokenizer else Reads()
    if why := clear_if_inputs_changed(out / WEIGHTS, given):
        step(f"! {WEIGHTS}: {why}: running again")
    rows: list[dict[str, Any]] = []
    try:
        for name in STAGES:
            program = [sys.executable, "-m", "edgespec.building.rehearse_stages", str(out.resolve()), name]
            rows.append(_stage(out, name, program))
        for verb in TALKS:
            for engine, precision in UNMEASURED:
                rows.append(_talk(out, verb, engine, precision, options))
    finally:
        if rows:
            print(f"\n{_table(rows)}", flush=True)
    print(f"\n{verification_table(out / 'verify' / 'verify.json')}", flush=True)
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
    plan = {"target": target, "options": asked, "shape": asdict(shape)}
    if (out / PLAN).exists():
        if (seen := read_object(out / PLAN)) != plan:
            before = {"target": seen.get("target"), **seen.get("options", {})}
            other = [name for name, value in {"target": target, **asked}.items() if before.get(name) != value]
            raise InputError(
                f"{out} holds a rehearsal of something else ({', '.join(other) or 'another shape'}); give another "
                "--rehearsal.out, or remove that folder"
            )
        return
    refuse_other(out, PLAN, "--rehearsal.out")
    write_json(out / PLAN, plan)


def _stage(out: Path, name: str, argv: Sequence[str], given: str = "") -> dict[str, Any]:
    """Run one stage unless it is done; its row of the table. All follow from the weights, by the seed."""
    record, marker = out / MEASURED / f"{name}.json", out / name / STAGE_FILE
    seen = read_json(record) if record.exists() else {}
    done = seen.get(WEIGHTS) == run_id(out / WEIGHTS) and (name not in STAGES or marker.exists())
    step(f"{'✓' if done else '▸'} {name}")
    if not done:
        usage = run_measured(argv, record.with_suffix(".txt"), given)
        seen = {WEIGHTS: run_id(out / WEIGHTS), **asdict(usage)}
        write_json(record, seen)
    made = read_json(marker) if name in STAGES else {"seconds": seen["seconds"], "counts": {}}
    row = {"stage": name, "peak": seen["peak"], "own": seen["own"]}
    return {**row, "found": made["counts"], "seconds": float(made["seconds"])}


def _talk(out: Path, verb: str, engine: str, precision: str, options: RehearsalOptions) -> dict[str, Any]:
    name = f"{verb}-{precision}"
    argv = [sys.executable, "-m", "edgespec", verb, str(out / "bundle"), "--engine", engine]
    argv += ["--precision", precision, "--context", str(options.run_context)]
    argv += ["--max-new-tokens", str(options.max_new_tokens)]
    if verb == "chat":
        return _stage(out, name, [*argv, "--draft-length", "3"], "What is a list?\n")
    argv += ["--draft-lengths", "3", "--no-choose", "--seconds", "0", "--max-prompts", "3"]
    return _stage(out, name, [*argv, "--json", str(out / MEASURED / f"{name}-report.json")])


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Time and peak memory of every stage; `own` is the part of the peak that is no mapped file's."""
    lines = []
    for row in rows:
        memory = ("-" if row[name] is None else byte_size(row[name]) for name in ("peak", "own"))
        words = STAGES[row["stage"]](row["found"]) if row["stage"] in STAGES else ""
        lines.append((row["stage"], duration(row["seconds"]), *memory, words))
    total = duration(sum(row["seconds"] for row in rows))
    lines.append(("in all", total, byte_size(_peak(rows)) if _peak(rows) else "-", "", ""))
    return table(("stage", "time", "peak memory", "own", "what came out"), lines)


def _peak(rows: Sequence[dict[str, Any]]) -> int:
    """Bytes of the largest stage; 0 where the system tells none."""
    return max(row["peak"] or 0 for row in rows)


def _judge(rows: Sequence[dict[str, Any]], options: RehearsalOptions) -> int:
    """0 where all bounds hold. Raises CheckFailed naming those that do not."""
    seconds, peak, broken = sum(row["seconds"] for row in rows), _peak(rows), []
    if seconds > 60 * options.minutes:
        broken.append(f"{duration(seconds)} in all; {duration(60 * options.minutes)} at most")
    if peak > GIB * options.memory:
        broken.append(f"a peak of {byte_size(peak)}; {options.memory:g} GiB at most")
    if broken:
        raise CheckFailed("the rehearsal ran through, and: " + "; ".join(broken))
    return 0
