"""A pair of a real shape with random weights, made once and kept in the user's cache folder: target and drafter for one engine.

CACHE/synthetic/NAME-<hash of both shapes>/target-q4_0.gguf  drafter-q4_0.gguf     llama.cpp
                                           target-int4/      drafter-int4/         ONNX Runtime
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from edgespec_runtime.bench.synthetic import SyntheticPair

from edgespec.core.errors import InputError
from edgespec.core.folder_lock import held, remove_older
from edgespec.core.free_space import free_disk, free_memory
from edgespec.core.manifest import ROLES
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.devices_fit import LOADED, WORKING_MEMORY
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import TARGETS, shape_of_target
from edgespec.shell.environment import cache_folder
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.onnx.to_onnx import FAST_GRAPH, check_shape, write_fast_graph
from edgespec_export.synthetic import gguf_file, onnx_folder

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
    where it was. Engine and precision: of bench.synthetic's PRECISIONS. Raises InputError: unknown name, too little room on the
    disk or in memory (with numbers).
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
    # both models must fit in memory together, else every step would read from the disk
    running = LOADED * sum(kept for kept, _, _ in plans.values()) + WORKING_MEMORY
    cure = "close other programs, or choose a smaller --precision or target"
    _check_room(f"{what} takes about", running, "memory", free_memory(), cure)
    missing = [role for role in ROLES if not paths[role].exists()]
    if missing:
        if name in TARGETS:  # two folders of one name may have two shapes
            remove_older(folder, COMMAND)  # what other versions made of it
        kept, beside, memory = zip(*(plans[role] for role in missing), strict=True)
        cure = "make room, or set EDGESPEC_HOME to a folder on another disk"
        place = f"the disk of {folder}"
        _check_room(f"the files of {what} take", sum(kept) + max(beside), place, free_disk(folder), cure)
        cure = f"close other programs or choose --engine {LLAMACPP}"
        _check_room(f"making the files of {what} takes", max(memory), "memory", free_memory(), cure)
    has_fast = engine == ONNXRUNTIME and precision == "int4"
    fast = {role: path / FAST_GRAPH for role, path in paths.items() if has_fast}
    if missing or not all(graph.exists() for graph in fast.values()):
        with held(folder, COMMAND, wait=True):  # another bench may be making them
            missing = [role for role in ROLES if not paths[role].exists()]
            label = f"make {plain_name} {engine} {precision}"
            write = gguf_file.write_gguf if engine == LLAMACPP else onnx_folder.write_onnx
            with progress(label, len(ROLES), "files", done=len(ROLES) - len(missing)) as bar:
                for role in missing:
                    bar.set_postfix_str(role)
                    write(shapes[role], paths[role], precision, ROLES.index(role))
                    bar.update(1)
            for graph in fast.values():
                if not graph.exists():
                    write_fast_graph(graph.parent)
    files = [ExportedFile(role, engine, precision, path) for role, path in paths.items()]
    return SyntheticPair(
        name=plain_name,
        engine=engine,
        precision=precision,
        shapes=shapes,
        paths=paths,
        streamed_bytes={file.role: streamed_bytes(file) for file in files},
        fast_graphs=fast,
    )


def _plan(shape: ModelShape, engine: str, precision: str) -> tuple[int, int, int]:
    """Bytes, about: of what is kept, of what is on the disk only meanwhile, of memory while it is made.

    Raises InputError for widths that the engine or the exporter does not take.
    """
    if engine == LLAMACPP:
        return gguf_file.planned_bytes(shape, precision), 0, 0
    check_shape(shape, "a model", f"choose --engine {LLAMACPP}")
    template = onnx_folder.template_of(shape)
    beside = costs.file_bytes(template, engine, precision) + round(costs.exported_bytes(template, "bf16"))
    memory = onnx_folder.EXPORTER_MEMORY + costs.building_bytes(template, (precision,))
    return costs.file_bytes(shape, engine, precision), beside, memory


def _check_room(what: str, needed: float, kind: str, free: int | None, cure: str) -> None:
    """Raise InputError where less is free than is needed; `free` None: the system does not say."""
    if free is not None and needed > free:
        raise InputError(f"{what} {needed / GIB:.1f} GiB of {kind} and {free / GIB:.1f} GiB are free; {cure}")
