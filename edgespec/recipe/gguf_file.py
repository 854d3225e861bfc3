"""The GGUF file that a target's name stands for: its own path, or a file in a pip package that an alias names.

The package's code is never imported: pip's list of its files says where the file is.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.recipe.targets import TARGETS, PipFile, is_gguf


def gguf_of(name: str) -> Path | None:
    """The GGUF file that a target's name stands for; None for another kind of target.

    Raises InputError for a package of another version, or one whose file is gone.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        return path
    target = TARGETS.get(name)
    return None if target is None or target.package is None else file_in(target.package)


def file_in(package: PipFile) -> Path | None:
    """Where an installed package has its file; None where the package is not installed. Raises InputError as `gguf_of` does."""
    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    if found.version != package.version:
        raise InputError(
            f"{package.name} {found.version} is installed and {package.version} is wanted, whose model the drafter is made for: "
            f"{package.command}"
        )
    entry = next((file for file in found.files or () if file.as_posix() == package.file), None)
    path = None if entry is None else Path(str(found.locate_file(entry)))
    if path is None or not path.is_file():
        raise InputError(
            f"{package.name} {found.version} is installed without {package.file}: {package.command} --force-reinstall"
        )
    return path
