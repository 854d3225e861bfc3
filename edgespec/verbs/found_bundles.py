"""The bundles that a person can choose from: here, in build folders, and ready pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.manifest import MANIFEST, open_manifest
from edgespec.core.options import path_word
from edgespec.core.table import count
from edgespec.recipe.targets import TARGETS, gguf_of
from edgespec.verbs.ready import folder_of, ready_folders

PLACES = (".", "*", "*/bundle", "build/*", "build/*/bundle")
"""Where a bundle lies below the current folder: pulled, exported or built there."""
MOST = 50  # bundles that are listed: more is no list to choose from
MOST_FOLDERS = 10_000
"""Folders that are looked through for each of PLACES, so that a huge one does not hold the chat up."""


@dataclass(frozen=True)
class Found:
    """A bundle. `name`: what to call it by; `about`: what it is; `missing`: what it still needs, '' for nothing."""

    name: str
    about: str
    missing: str = ""


def found() -> list[Found]:
    """The bundles in and below the current folder, the newest first, then the ready pairs."""
    manifests = [
        file
        for place in PLACES
        for file in islice(Path().glob(f"{place}/{MANIFEST}"), MOST_FOLDERS)
        if file.is_file()
    ]
    unique = {file.resolve(): file for file in reversed(manifests)}.values()
    newest = sorted(unique, key=_changed, reverse=True)
    here = [bundle for file in newest[:MOST] if (bundle := _described(file.parent)) is not None]
    return [*here, *(_ready(name, drafter) for name, drafter in ready_folders().items())]


def _changed(file: Path) -> float:
    """When a file was written; 0 where it is gone meanwhile."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _described(folder: Path) -> Found | None:
    """What a manifest says; None for a folder whose manifest is none of ours or broken."""
    try:
        manifest = open_manifest(folder, hashes=False)
    except EdgespecError:
        return None
    target, drafter = manifest.target, manifest.drafter
    about = (
        f"{target.name} ({count(target.parameters)}) with a drafter of {count(drafter.parameters)}, "
        f"{manifest.default['engine']} {manifest.default['precision']}"
    )
    name = path_word(folder)
    # a stranger's manifest must not write to the terminal
    return Found(name, about) if name.isprintable() and about.isprintable() else None


def _ready(name: str, drafter: Path) -> Found:
    about = f"ready pair, {TARGETS[name].parameters} target"
    package = TARGETS[name].package
    try:
        file = gguf_of(name)
    except InputError as error:  # another version of the package, or its file is gone
        return Found(name, f"{about}; not to be used as it is", str(error))
    if package is not None and file is None:
        return Found(name, f"{about}; needs {package.command}", f"first: {package.command}")
    if file is not None and (folder_of(name, drafter, file) / "bundle" / MANIFEST).is_file():
        return Found(name, about)
    return Found(name, f"{about}; its bundle is made once, in about 2 minutes")
