"""Recipes and device profiles that come with the package: where they lie, and what the comment at a recipe's head says.

A recipe is a document. Its head is one line that says what it is and four fields, each of one or more comment lines:

    # NAME: what it is.
    #
    # Purpose: ...
    # Needs:   ...
    # Cost:    ...
    # Command: edgespec build-drafter ...

Knows the files, not what their values mean (read.py, devices.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import read_bounded
from edgespec.core.texts import parse_yaml

MOST_BYTES = 2**20  # of a file that people write by hand
FIELDS = ("purpose", "needs", "cost", "command")
_NAMES = "|".join(map(str.capitalize, FIELDS))
# with the lines that go on with it
_FIELD = re.compile(rf"^# ({_NAMES}):[ \t]+(.*(?:\n#  +.*)*)", re.MULTILINE)
_MORE = re.compile(r"[ \t\\]*\n#  +")


def in_recipes(*parts: str) -> Path:
    """A place in the package edgespec_recipes, which is found without being imported."""
    spec = find_spec("edgespec_recipes")
    assert spec is not None  # it comes in edgespec's own wheel
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes of build-drafter that come with the package."""
    files = sorted(in_recipes("configs").glob("*.yaml"))
    return {path.stem: path for path in files if not path.stem.startswith("target-")}


def launch_files() -> dict[str, Path]:
    """launch/NAME -> file: configs of accelerate launch and sbatch scripts that come with the package."""
    files = sorted(in_recipes("configs", "launch").iterdir())
    return {f"launch/{path.stem}": path for path in files if path.suffix in (".yaml", ".sbatch")}


def made_target(alias: str) -> Mapping[str, Any]:
    """The options of a target that edgespec makes itself: its shape and its training. Raises InputError where there are none."""
    return load_recipe(in_recipes("configs", f"target-{alias}.yaml"))


@cache
def device_entries() -> dict[str, dict[str, Any]]:
    """Name -> values of every device profile, in the file's order."""
    import yaml

    file = Path(__file__).with_name("devices.yaml")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return entries


def load_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file (YAML, plain types only). Raises InputError that names the file."""
    if not path.exists():
        raise InputError(f"recipe {path} does not exist; give a YAML file")
    values = parse_yaml(read_bounded(path, limit=MOST_BYTES), f"recipe {path}")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(f"recipe {path} holds {type(values).__name__}; it must be a mapping of options")
    return values


def recipe_file(name: str) -> Path:
    """A shipped recipe's name, or the path of a file -> the file. Raises InputError."""
    return file_named(name, shipped_recipes(), "recipe")


def file_named(name: str, shipped: Mapping[str, Path], what: str) -> Path:
    """One of the files that come with the package, or the user's own. Raises InputError."""
    if name in shipped:
        return shipped[name]
    if (path := Path(name).expanduser()).is_file():
        return path
    raise InputError(f"{what} {name!r} is neither a file nor a shipped {what}{did_you_mean(name, shipped)}")


def header(file: Path) -> dict[str, str]:
    """The four fields at the head of a recipe, in lower case, each on one line; one that is missing is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    head = "".join(takewhile(lambda line: line.startswith("#"), lines))
    return {field[1].lower(): _MORE.sub(" ", field[2]).rstrip() for field in _FIELD.finditer(head)}
