"""A pair of a real shape with random weights, made once and kept in the user's cache folder: target and drafter for one engine.

CACHE/synthetic/NAME-<hash of both shapes>/target-q4_0.gguf  drafter-q4_0.gguf     llama.cpp
                                           target-int4/      drafter-int4/         ONNX Runtime
                                           sizes.json        bytes that a token reads of each
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec_runtime.bench.synthetic import SyntheticPair

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import read_json, write_json
from edgespec.core.folder_lock import held, remove_older
from edgespec.core.free_space import free_disk, free_memory
from edgespec.core.manifest import ROLES
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.planning.devices_fit import LOADED, WORKING_MEMORY
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import TARGETS, shape_of_target
from edgespec.shell.environment import cache_folder

SCHEMA = 1  # of the files; a change makes new ones
GIB = 2**30
COMMAND = "edgespec bench --synthetic"


def full_name(name: str) -> str:
    """The alias that `name` begins, where there is exactly one: llama-2-7b is llama-2-7b-chat."""
    longer = [alias for alias in TARGETS if alias.startswith(f"{name}-")]
    return longer[0] if name not in TARGETS and len(longer) == 1 and not Path(name).is_dir() else name


def build(name: str, engine: str, precision: str) -> SyntheticPair:
    """Make what is missing of the pair and say where it lies. `name`: an alias or its beginning, a folder with a config.json.

    The drafter has the shape that build-drafter would give it. Every file is whole or absent, so an interrupted run goes on
    where it was. Raises InputError: unknown name or precision, too little room on the disk or in memory (with numbers).
    """
    name = full_name(name)
    target = shape_of_target(name)
    shapes: dict[str, ModelShape] = {"target": target, "drafter": derive(target, DrafterOptions())}
    key = json.dumps([SCHEMA, *map(asdict, shapes.values())]).encode()
    plain_name = re.sub(r"[^\w.-]+", "-", Path(name).name) or "model"
    folder = cache_folder() / "synthetic" / f"{plain_name}-{hashlib.sha256(key).hexdigest()[:8]}"
    suffix = ".gguf" if engine == LLAMACPP else ""
    paths = {role: folder / f"{role}-{precision}{suffix}" for role in ROLES}
    plans = {role: _plan(shape, engine, precision) for role, shape in shapes.items()}
    what = f"{plain_name} on {engine} in {precision}"
    _check_memory(what, [plan.kept for plan in plans.values()])
    missing = [role for role in ROLES if not paths[role].exists()]
    if missing and name in TARGETS:  # two folders of one name may have two shapes
        remove_older(folder, COMMAND)  # what other versions made of it
    _check_room(folder, what, [plans[role] for role in missing])
    fast: dict[str, Path] = {}
    if engine == ONNXRUNTIME and precision == "int4":
        from edgespec_export.onnx.to_onnx import FAST_GRAPH, write_fast_graph

        fast = {role: path / FAST_GRAPH for role, path in paths.items()}
    sizes = folder / "sizes.json"
    made = not missing and all(graph.exists() for graph in fast.values())
    if not made or not _known(sizes, paths):
        with held(folder, COMMAND, wait=True):  # another bench may be making them
            missing = [role for role in ROLES if not paths[role].exists()]
            label = f"make {plain_name} {engine} {precision}"
            with progress(label, len(ROLES), "files", done=2 - len(missing)) as bar:
                for role in missing:
                    bar.set_postfix_str(role)
                    _write(shapes[role], engine, precision, paths[role], seed=ROLES.index(role))
                    bar.update(1)
            for graph in fast.values():
                if not graph.exists():
                    write_fast_graph(graph.parent)
            _measure(sizes, engine, precision, paths)
    return SyntheticPair(
        name=plain_name,
        engine=engine,
        precision=precision,
        shapes=shapes,
        paths=paths,
        streamed_bytes=_known(sizes, paths),
        fast_graphs=fast,
    )


@dataclass(frozen=True)
class _Plan:
    """Bytes: of what is kept, of what is on the disk only meanwhile, of memory while it is made."""

    kept: int
    scratch: int
    memory: int


def _plan(shape: ModelShape, engine: str, precision: str) -> _Plan:
    if engine == LLAMACPP:
        from edgespec_export.synthetic import gguf_file

        return _Plan(gguf_file.planned_bytes(shape, precision), 0, 0)
    if engine != ONNXRUNTIME:
        raise InputError(f"unknown engine {engine!r}{did_you_mean(engine, (ONNXRUNTIME, LLAMACPP))}")
    from edgespec_export.synthetic import onnx_folder

    return _Plan(*onnx_folder.planned_bytes(shape, precision), onnx_folder.build_memory(shape))


def _check_memory(what: str, sizes: list[int]) -> None:
    """Both models must fit in memory together, else every step would read from the disk."""
    available, needed = free_memory(), int(LOADED * sum(sizes)) + WORKING_MEMORY
    if available is not None and needed > available:
        raise InputError(
            f"{what} takes about {needed / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB are free; close other programs, "
            "or choose a smaller --precision or target"
        )


def _check_room(folder: Path, what: str, plans: list[_Plan]) -> None:
    """What is still to be made must fit on the disk, and its making in memory."""
    if not plans:
        return
    free = free_disk(folder)
    needed = sum(plan.kept for plan in plans) + max(plan.scratch for plan in plans)
    if needed > free:
        raise InputError(
            f"the files of {what} take {needed / GIB:.1f} GiB and the disk of {folder} has {free / GIB:.1f} GiB free; "
            "make room, or set EDGESPEC_HOME to a folder on another disk"
        )
    available, memory = free_memory(), max(plan.memory for plan in plans)
    if available is not None and memory > available:
        raise InputError(
            f"making the files of {what} takes {memory / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB are free; "
            f"close other programs or choose --engine {LLAMACPP}"
        )


def _write(shape: ModelShape, engine: str, precision: str, path: Path, seed: int) -> None:
    if engine == LLAMACPP:
        from edgespec_export.synthetic.gguf_file import write_gguf

        write_gguf(shape, path, precision, seed)
    else:
        from edgespec_export.synthetic.onnx_folder import write_onnx

        write_onnx(shape, path, precision, seed)


def _known(file: Path, paths: dict[str, Path]) -> dict[str, int]:
    """Bytes that a token reads of each file, as `_measure` kept them; nothing where one was not measured."""
    known: dict[str, Any] = read_json(file) if file.exists() else {}
    measured = all(path.name in known for path in paths.values())
    return {role: int(known[path.name]) for role, path in paths.items()} if measured else {}


def _measure(file: Path, engine: str, precision: str, paths: dict[str, Path]) -> None:
    from edgespec_export.formats.export import ExportedFile, streamed_bytes

    known: dict[str, Any] = read_json(file) if file.exists() else {}
    for role, path in paths.items():
        known[path.name] = streamed_bytes(ExportedFile(role, engine, precision, path))
    write_json(file, known)
