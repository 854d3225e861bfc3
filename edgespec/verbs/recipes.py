"""List, show, copy or check recipes: the YAML files that say how a drafter is made.

A recipe's name is that of a file that comes with edgespec; `check` takes files of yours too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import write_bytes
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, write_result
from edgespec.core.texts import harmless
from edgespec.recipe.check import problems
from edgespec.recipe.shipped import header, launch_files, recipe_file, shipped_recipes


@dataclass(frozen=True)
class Options:
    action: str = knob(
        "list",
        "list: the table; show: print one; copy: to a file or folder of yours; check: whether recipes can run",
        choices=("list", "show", "copy", "check"),
        positional=True,
    )
    names: tuple[str, ...] | None = knob(
        None, "show NAME; copy NAME DEST; check FILE... (files or names)", positional=True
    )
    json: str = json_knob()


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    names = options.names or ()
    if options.action == "list":
        _wanted(options, 0, "nothing")
        _list(options.json)
    elif options.action == "show":
        _wanted(options, 1, "the NAME of a recipe")
        text = _shipped(names[0]).read_text(encoding="utf-8")
        print(text, end="")
        write_result(options.json, {"name": names[0], "text": text})
    elif options.action == "copy":
        _wanted(options, 2, "the NAME of a recipe and where to, DEST")
        copied = _copy(names[0], Path(names[1]).expanduser(), names[1].endswith(("/", os.sep)))
        print(copied)
        write_result(options.json, {"name": names[0], "file": str(copied)})
    else:
        return _check(names, options.json)
    return 0


def _wanted(options: Options, count: int, what: str) -> None:
    names = options.names or ()
    if len(names) != count:
        raise InputError(f"recipes {options.action} takes {what}; it got {' '.join(names) or 'nothing'}")


def _shipped(name: str) -> Path:
    recipes = shipped_recipes() | launch_files()
    if name not in recipes:  # also whatever looks like a path
        raise InputError(f"no recipe {name!r} comes with edgespec{did_you_mean(name, recipes)}")
    return recipes[name]


def _list(json: str) -> None:
    rows = [{"name": name, **header(file), "file": str(file)} for name, file in shipped_recipes().items()]
    for row in rows:
        print(f"{row['name']}\n    {row['purpose']}\n    Cost: {row['cost']}")
    print(
        "\nedgespec recipes show NAME prints one; edgespec build-drafter --target TARGET --recipe NAME runs it."
        f"\nTo launch on several GPUs or nodes (show and copy know these too): {', '.join(launch_files())}."
    )
    write_result(json, rows)


def _copy(name: str, dest: Path, folder: bool) -> Path:
    """Write a shipped recipe to the file or into the folder `dest`. Raises InputError where a file is there already."""
    source = _shipped(name)
    if folder or dest.is_dir():
        dest = dest / source.name
    if dest.exists() or dest.is_symlink():
        raise InputError(f"{dest} is there already and stays as it is; give another DEST, or remove it")
    write_bytes(dest, source.read_bytes())
    return dest


def _check(names: tuple[str, ...], json: str) -> int:
    """0 where every recipe can run, else 1; raises InputError where one cannot be found."""
    if not names:
        raise InputError("recipes check takes one recipe or more: files, or names (edgespec recipes list)")
    files = [recipe_file(name) for name in names]
    found = {name: problems(file) for name, file in zip(names, files, strict=True)}
    for name, lines in found.items():
        print(f"{'FAIL' if lines else 'ok  '}  {name}")
        for line in lines:
            print(f"      {harmless(line)}")
    write_result(json, found)
    return int(any(found.values()))
