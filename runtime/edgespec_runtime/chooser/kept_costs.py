"""Kept tables of costs by the shapes they were measured on: what this machine knows of a model it may not have.

`doctor` keeps the costs of a bundle's own files and `bench --synthetic` those of random weights; both note the shapes, and the
cost of a pass depends on nothing else of a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.recipe.targets import cache_folder
from edgespec_runtime.chooser.pass_costs import FOLDER, SCHEMA, Costs, Subject, costs_in, write_costs
from edgespec_runtime.engines.device import engine_version, this_device

MOST_FILES = 4096
MAX_BYTES = 2**22  # of one table
# What of a shape a pass's cost depends on.
_FIELDS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "tied")


@dataclass(frozen=True)
class Kept:
    """A table measured on this machine. `source`: the threads, and the file that has it; `seconds`: spent on measuring."""

    engine: str
    precision: str
    costs: Costs
    source: str
    seconds: float


def outline(shape: ModelShape | Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields of a shape that decide what a pass costs, in a fixed order; None for one that is not given."""
    values = asdict(shape) if isinstance(shape, ModelShape) else shape
    return tuple(values.get(name) for name in _FIELDS)


def keep_synthetic(
    shapes: Mapping[str, ModelShape],
    engine: str,
    precision: str,
    costs: Costs,
    *,
    threads: int,
    flash_attention: bool | None,
    context_length: int,
    seconds: float,
) -> Path:
    """Keep what was measured on random weights of these shapes (by role). Returns the file."""
    digests = {
        f"synthetic {role}": hashlib.sha256(json.dumps(outline(shape)).encode()).hexdigest()
        for role, shape in shapes.items()
    }
    subject = Subject(
        models=digests,
        engine=engine,
        engine_version=engine_version(engine),
        precision=precision,
        threads=threads,
        flash_attention=flash_attention,
        context_length=context_length,
    )
    plain = {role: asdict(shape) for role, shape in shapes.items()}
    return write_costs(subject, this_device(), costs, seconds, plain)


def kept_for(
    target: ModelShape, drafter: ModelShape, note: Callable[[str], None] = lambda _: None
) -> list[Kept]:
    """Tables of these two shapes on this machine: of each engine and precision the one measured longest, the latest of equals.

    A file that cannot be used is passed over and `note` told why.
    """
    folder = cache_folder() / FOLDER
    found: dict[tuple[str, str], tuple[float, float, Kept]] = {}
    device = asdict(this_device())
    wanted = {"target": outline(target), "drafter": outline(drafter)}
    for path in sorted(folder.glob("*.json"))[:MOST_FILES] if folder.is_dir() else []:
        try:
            value = read_json(path, limit=MAX_BYTES)
            shapes = value.get("shapes") or {}
            known = {role: outline(shapes.get(role, {})) for role in wanted}
            if value["schema"] != SCHEMA or value["device"] != device or known != wanted:
                continue
            subject, seconds = value["subject"], float(value["seconds"])
            if engine_version(str(subject["engine"])) != subject["engine_version"]:
                continue
            engine, precision = str(subject["engine"]), str(subject["precision"])
            source = f"{int(subject['threads'])} threads, {path.name}"
            kept = Kept(engine, precision, costs_in(value), source, seconds)
            rank = (seconds, path.stat().st_mtime)
        except (InputError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            note(f"{path} is damaged and not used ({type(error).__name__}: {str(error)[:200]})")
            continue
        if (engine, precision) not in found or rank > found[engine, precision][:2]:
            found[engine, precision] = (*rank, kept)
    return [kept for *_, kept in found.values()]
