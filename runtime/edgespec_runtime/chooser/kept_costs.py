"""Measured costs, kept in the user's cache folder: found again by the files of a pair, or by the shapes of its models.

`doctor` and `chat` keep the costs of a bundle's own files, `bench --synthetic` those of random weights. All note the shapes: the
cost of a pass depends on nothing else of a model, so a plan finds costs of a model that is not there yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import median
from edgespec.core.shapes import ModelShape
from edgespec.recipe.targets import cache_folder
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.device import engine_version, free_share, this_device
from edgespec_runtime.engines.session import CachedEngine

if TYPE_CHECKING:
    from edgespec_runtime.pair.bundle import Pair

SCHEMA = 1
FOLDER = "costs"
MOST_FILES, MAX_BYTES = 4096, 2**22  # files that are looked through; bytes of one
BUSY = 0.85  # of the processors' time: with less of it, what is measured is not kept
# Kept costs hold while a plain step takes less than this many times more or less: else the machine was busy then, or is now.
STALE, PROBES, PROBE_SECONDS = 1.5, 3, 0.05
# What of a shape a pass's cost depends on.
_FIELDS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "tied")


@dataclass(frozen=True)
class Subject:
    """What costs were measured on. `models`: sha256 of every file, by path; `flash_attention`: None where there is no choice."""

    models: dict[str, str]
    engine: str
    engine_version: str
    precision: str
    threads: int
    flash_attention: bool | None
    context_length: int

    def file(self) -> Path:
        """Where its costs are kept: one file for all machines and engine versions, so that one replaces the other."""
        named = {key: value for key, value in asdict(self).items() if key != "engine_version"}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        return cache_folder() / FOLDER / f"{self.engine}-{self.precision}-{digest[:16]}.json"


@dataclass(frozen=True)
class Kept:
    """What a file says that was written on this machine.

    `shapes`: outlines of target and drafter; `seconds`: spent on measuring; `written`: when, in seconds since 1970.
    """

    subject: Subject
    shapes: tuple[tuple[Any, ...], ...]
    costs: Costs
    seconds: float
    written: float

    @property
    def source(self) -> str:
        """The threads, and the file that has them."""
        return f"{self.subject.threads} threads, {self.subject.file().name}"


def subject_of(pair: Pair) -> Subject:
    """What measurements of a loaded pair are measurements of."""
    manifest = pair.manifest
    models: dict[str, str] = {}
    for role in ("target",) if pair.draft is None else ("target", "drafter"):
        fast = pair.fast_graph or role == "drafter"  # a drafter runs from its fast graph in either mode
        files = manifest.files_of(role, pair.engine, pair.precision, fast=fast)
        models |= {name: file.sha256 for name, file in files.items()}
        if (vocabulary := getattr(manifest, role).vocabulary) is not None:
            models[vocabulary] = manifest.files[vocabulary].sha256
    version, context = engine_version(pair.engine), pair.target.engine.context_length
    return Subject(models, pair.engine, version, pair.precision, pair.threads, pair.flash_attention, context)


def outline(shape: ModelShape | Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields of a shape that decide what a pass costs, in a fixed order; None for one that is not given."""
    values = asdict(shape) if isinstance(shape, ModelShape) else shape
    return tuple(values.get(name) for name in _FIELDS)


def store_costs(pair: Pair, costs: Costs, seconds: float) -> Path:
    """Keep the costs of a pair for the next time; `seconds`: the time that measuring was given. Returns the file."""
    return _keep(subject_of(pair), pair.manifest.target.shape, pair.manifest.drafter.shape, costs, seconds)


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
    models = {
        f"synthetic {role}": hashlib.sha256(json.dumps(outline(shape)).encode()).hexdigest()
        for role, shape in shapes.items()
    }
    version = engine_version(engine)
    subject = Subject(models, engine, version, precision, threads, flash_attention, context_length)
    return _keep(subject, asdict(shapes["target"]), asdict(shapes["drafter"]), costs, seconds)


def _keep(
    subject: Subject, target: Mapping[str, Any], drafter: Mapping[str, Any], costs: Costs, seconds: float
) -> Path:
    """Write costs, whole or not at all."""
    value = {"device": asdict(this_device()), "subject": asdict(subject), "seconds": seconds}
    value |= {"costs": asdict(costs), "shapes": {"target": dict(target), "drafter": dict(drafter)}}
    path = subject.file()
    write_json(path, {"schema": SCHEMA, **value})
    return path


def load_costs(pair: Pair, note: Callable[[str], None], *, at_least_seconds: float = 0.0) -> Costs | None:
    """The costs of a pair that were kept on this machine and took `at_least_seconds` to measure; None where there are none.

    A file that is there and cannot be used is passed over, and `note` is told why.
    """
    subject = subject_of(pair)
    path = subject.file()
    kept = _read(path, note) if path.exists() else None
    if kept is None:
        return None
    if reason := _difference(asdict(kept.subject), asdict(subject)):
        note(f"{path} is not used: {reason}")
        return None
    return kept.costs if kept.seconds >= at_least_seconds else None


def kept_for(target: ModelShape, drafter: ModelShape) -> list[Kept]:
    """Costs of these two shapes on this machine: of each engine and precision those measured longest, the latest of equals."""
    paths = sorted((cache_folder() / FOLDER).glob("*.json"))[:MOST_FILES]
    found = [kept for path in paths if (kept := _read(path, lambda _: None)) is not None]
    best: dict[tuple[str, str], Kept] = {}
    for kept in sorted(found, key=lambda kept: (kept.seconds, kept.written)):
        engine, precision = str(kept.subject.engine), str(kept.subject.precision)
        same = kept.shapes == (outline(target), outline(drafter))
        if same and kept.subject.engine_version == engine_version(engine):
            best[engine, precision] = kept
    return [best[way] for way in sorted(best)]


def _read(path: Path, note: Callable[[str], None]) -> Kept | None:
    """What a kept file of this machine says, checked. None where it is another machine's or damaged; `note` is told which."""
    try:
        value = read_json(path, limit=MAX_BYTES)
        wanted = {"schema": SCHEMA, **asdict(this_device())}
        if reason := _difference({"schema": value["schema"], **value["device"]}, wanted):
            note(f"{path} is not used: {reason}")
            return None
        shapes = value.get("shapes") or {}
        value["costs"].pop("draft_read2_seconds", None)  # earlier versions measured it
        return Kept(
            Subject(**value["subject"]),
            tuple(outline(shapes.get(role, {})) for role in ("target", "drafter")),
            Costs(**{key: _tuples(row) for key, row in value["costs"].items()}),
            float(value["seconds"]),
            path.stat().st_mtime,
        )
    except (InputError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        note(f"{path} is damaged and not used ({type(error).__name__}: {str(error)[:200]})")
        return None


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first field in which a file is of something else; '' where there is none."""
    for name, wanted in here.items():
        if there.get(name) != wanted:
            if name == "models":
                return "it was measured on other model files"
            return f"it was measured with {name.replace('_', ' ')} {there.get(name)!r}, and here that is {wanted!r}"
    return ""


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def costs_of(
    pair: Pair, how: CalibrateOptions, note: Callable[[str], None], *, fresh: bool = False
) -> tuple[Costs, bool]:
    """(costs of a pair, whether they were kept from an earlier time). Measured, and then kept, where none are or `fresh` is set.

    They are measured again where a plain step is now STALE times faster or slower; slower ones are then not kept, since that may
    pass, nor is what was measured beside other programs. `note` is told. The caches are empty after.
    """
    kept, slower = None if fresh else load_costs(pair, note, at_least_seconds=how.seconds), 1.0
    if kept is not None:
        slower = step_seconds(pair.target) / kept.verify(1, 1)
        if 1 / STALE < slower < STALE:
            return kept, True
        note(f"a plain step takes {slower:.2g} times what the kept costs say, so they are measured again")
    share = free_share(pair.threads)
    costs = calibrate(pair.target, pair.draft, how)
    share = min(free_share(pair.threads), share)
    if share < BUSY:
        note(
            f"other programs hold {1 - share:.0%} of the processors, so these costs are wrong and are not kept; "
            "close them and measure again"
        )
    elif slower < STALE:
        try:
            store_costs(pair, costs, how.seconds)
        except (InputError, OSError) as error:
            note(f"the measured costs are not kept: {error}")
    return costs, False


def step_seconds(target: CachedEngine) -> float:
    """Median seconds of a plain step now, at the beginning of a context. The cache is empty after.

    The first steps after loading wait for threads to wake up, so at least `PROBE_SECONDS` are looked at. Raises InputError where
    the context has no room for two tokens.
    """
    try:
        target.rewind(0)
        target.forward([0])  # reads the weights from the disk, the first time
        times: list[float] = []
        while len(times) < PROBES or sum(times) < PROBE_SECONDS:
            start = perf_counter()
            target.forward([0])
            times.append(perf_counter() - start)
            target.rewind(1)
        return median(times)
    finally:
        target.rewind(0)
