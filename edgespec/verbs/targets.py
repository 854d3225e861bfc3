"""List the targets edgespec knows by name, or show where the ones it made are kept.

Any hub id and any local folder in Hugging Face layout is a target too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.options import from_mapping, knob
from edgespec.core.table import table
from edgespec.core.texts import printable_json
from edgespec.recipe.targets import TARGETS, cache_folder


@dataclass(frozen=True)
class Options:
    action: str = knob(
        "list",
        "list: the table; path: the cache folder, or that of one made target",
        choices=("list", "path"),
        positional=True,
    )
    name: str = knob("", "with path: a target's alias", positional=True)
    json: bool = knob(False, "print JSON")


OPTIONS = Options


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    if options.action == "path":
        print(_path(options.name))
    elif options.json:
        print(printable_json([asdict(target) for target in TARGETS.values()]))
    else:
        rows = [
            (t.alias, t.parameters, t.repo or "made here", t.licence + (" (gated)" if t.gated else ""))
            for t in TARGETS.values()
        ]
        print(table(("target", "parameters", "hub id", "licence"), rows, left=4))
        print("\nAny hub id and any local folder in Hugging Face layout works too.")
    return 0


def _path(name: str) -> Path:
    """The cache folder of made targets, or the newest model folder of one of them."""
    folder = cache_folder() / "targets"
    if not name:
        return folder
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}{did_you_mean(name, TARGETS)}")
    if TARGETS[name].repo is not None:
        raise InputError(
            f"{name} comes from the hub and lies in the hub's own cache (hf cache ls); {folder} keeps what is made here"
        )
    made = sorted(folder.glob(f"{name}-*/model"), key=lambda path: path.stat().st_mtime)
    if not made:
        raise InputError(
            f"{name} has not been made on this machine yet; edgespec build-drafter --target {name} makes it"
        )
    return made[-1]
