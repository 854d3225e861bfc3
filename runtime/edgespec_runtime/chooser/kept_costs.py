"""Measured costs, kept in the user's cache folder: found again by the files of a pair, or by the shapes of its models.

`doctor` and `chat` keep the costs of a bundle's own files, `bench --synthetic` those of random weights. What a pass costs depends
on nothing of a model but its shape, so a plan finds costs of a model that is not there yet.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.core import output
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.core.table import many
from edgespec.shell.environment import cache_folder
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.device import engine_version, free_share, this_device
from edgespec_runtime.engines.engine import default_threads

if TYPE_CHECKING:
    from edgespec_runtime.pair.bundle import Pair

FOLDER = "costs"
BUSY = 0.85  # of the processors' time: with less of it, what is measured is not kept
STALE = 1.5  # times the kept seconds of a plain step, or one over that: the machine was busy then, or is now
PROBE_SECONDS = 0.05  # to find that out: some ten turns of a step, and nobody notices


@dataclass(frozen=True)
class Subject:
    """What costs were measured on: those of one subject hold for no other.

    Attributes:
        shapes: `outline` of each model, by role.
        files: sha256 of every model file, by path; none for random weights of these shapes.
        flash_attention: None where the engine has no such choice.
        fast_graph: the target ran from its graph of the fast mode (ONNX Runtime).
    """

    shapes: dict[str, dict[str, Any]]
    files: dict[str, str]
    engine: str
    precision: str
    threads: int
    flash_attention: bool | None
    context_length: int
    fast_graph: bool = False

    def file(self) -> Path:
        """Where its costs are kept. This machine and the engine's version are part of the name: others find no costs here."""
        named = [asdict(self), asdict(this_device()), engine_version(self.engine)]
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        return cache_folder() / FOLDER / f"{self.engine}-{self.precision}-{digest[:16]}.json"


@dataclass(frozen=True)
class Kept:
    """Costs of one subject. `seconds`: given to measuring them."""

    subject: Subject
    costs: Costs
    seconds: float

    @property
    def source(self) -> str:
        """The threads, and the file that has them."""
        return f"{many(self.subject.threads, 'thread')}, {self.subject.file().name}"


def outline(shape: ModelShape | Mapping[str, Any]) -> dict[str, Any]:
    """What of a shape decides what a pass costs; None for what a manifest does not say."""
    values = asdict(shape) if isinstance(shape, ModelShape) else shape
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "tied")
    return {name: values.get(name) for name in names}


def subject_of(pair: Pair) -> Subject:
    """What measurements of a loaded pair are measurements of."""
    manifest = pair.manifest
    roles = {"target": manifest.target} | ({} if pair.draft is None else {"drafter": manifest.drafter})
    files: dict[str, str] = {}
    for role, model in roles.items():
        fast = pair.fast_graph or role == "drafter"  # a drafter runs from its fast graph in either mode
        found = manifest.files_of(role, pair.engine, pair.precision, fast=fast)
        files |= {name: file.sha256 for name, file in found.items()}
        if model.vocabulary is not None:
            files[model.vocabulary] = manifest.files[model.vocabulary].sha256
    shapes = {role: outline(model.shape) for role, model in roles.items()}
    context = pair.target.engine.context_length
    how = pair.backend, pair.precision, pair.threads, pair.flash_attention
    return Subject(shapes, files, *how, context, pair.fast_graph)


def store_costs(
    subject: Subject, costs: Costs, seconds: float, tell: Callable[[str], None] = output.note
) -> None:
    """Keep costs for the next time; `seconds`: given to measuring them. `tell` hears where they cannot be written."""
    try:
        write_json(subject.file(), {"subject": asdict(subject), "costs": asdict(costs), "seconds": seconds})
    except (InputError, OSError) as error:
        tell(f"the measured costs are not kept: {error}")


def load_costs(pair: Pair, note: Callable[[str], None], *, at_least_seconds: float = 0.0) -> Costs | None:
    """The costs of a pair that were kept on this machine and took `at_least_seconds` to measure; None where there are none.

    A damaged file is passed over, and `note` is told.
    """
    path = subject_of(pair).file()
    kept = _read(path, note) if os.path.exists(path) else None  # False also in a folder that is shut to us
    return kept.costs if kept is not None and kept.seconds >= at_least_seconds else None


def kept_for(target: ModelShape, drafter: ModelShape) -> list[Kept]:
    """Costs of these shapes on this machine: of each engine, precision and mode those measured longest, the latest of equals."""
    shapes = {"target": outline(target), "drafter": outline(drafter)}
    folder = cache_folder() / FOLDER
    # glob fails in a folder that is shut to us
    files = folder.glob("*.json") if os.path.isdir(folder) else ()
    paths = sorted(files, key=lambda path: path.stat().st_mtime)
    found = [kept for path in paths if (kept := _read(path, lambda _: None)) is not None]
    best = {
        (kept.subject.engine, kept.subject.precision, kept.subject.fast_graph): kept
        for kept in sorted(found, key=lambda kept: kept.seconds)
        if kept.subject.shapes == shapes
    }
    return [best[way] for way in sorted(best)]


def _read(path: Path, note: Callable[[str], None]) -> Kept | None:
    """What a kept file says, checked. None where it is damaged, and `note` is told; or of another machine or engine's version."""
    try:
        value = read_json(path)
        subject = Subject(**value["subject"])
        table = {name: _tuples(rows) for name, rows in value["costs"].items()}
        kept = Kept(subject, Costs(**table), float(value["seconds"]))
        return kept if subject.file() == path else None
    except (InputError, OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        note(f"{path} is damaged and not used ({type(error).__name__}: {str(error)[:200]})")
        return None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def costs_of(
    pair: Pair, how: CalibrateOptions, note: Callable[[str], None], *, fresh: bool = False, begin: str = ""
) -> tuple[Costs, bool]:
    """(costs of a pair, whether they were kept from an earlier time). Measured, and then kept, where none are or `fresh` is set.

    `begin`: told to `note` where none are kept, before they are measured.
    They are measured again where a plain step is now STALE times faster or slower; slower ones are then not kept, since that may
    pass, nor is what was measured beside other programs or threads. `note` is told. The caches are empty after.
    """
    kept, slower = None if fresh else load_costs(pair, note, at_least_seconds=how.seconds), 1.0
    if kept is not None:
        slower = step_seconds(pair.target) / kept.at(1).verify(1)
        if 1 / STALE < slower < STALE:
            return kept, True
        note(f"a plain step takes {slower:.2g} times what the kept costs say, so they are measured again")
    elif begin:
        note(begin)
    threads = min(pair.threads, default_threads())  # more than there are processors take time from each other
    share = free_share(threads)
    costs = calibrate(pair.target, pair.draft, how)
    share = min(free_share(threads), share)
    if share < BUSY:
        note(
            f"other programs or threads hold {1 - share:.0%} of the processors, so these costs are wrong and are not kept; "
            "close them and measure again"
        )
    elif slower < STALE:
        store_costs(subject_of(pair), costs, how.seconds, note)
    return costs, False


def step_seconds(target: CachedEngine) -> float:
    """Seconds of a plain step now, at the beginning of a context. The cache is empty after.

    Raises InputError where the context has no room for two tokens.
    """
    return calibrate(target, None, CalibrateOptions(PROBE_SECONDS, contexts=(1,)), longest=1).at(1).verify(1)
