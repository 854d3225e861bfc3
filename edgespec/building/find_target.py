"""A target by any of its names: where its model folder is. A GGUF file becomes one first; all else is the recipes' resolve.py."""

from __future__ import annotations

from edgespec.core.errors import MissingExtra
from edgespec.recipe.targets import TARGETS, FoundTarget, gguf_of


def gguf_target(name: str) -> FoundTarget | None:
    """The target that a GGUF file is, with its model folder (made on first use); None for another kind of target.

    Raises InputError and BundleError as `gguf_target.model_folder.folder_of` does, MissingExtra without the package gguf.
    """
    file = gguf_of(name)
    if file is None:
        return None
    try:
        from edgespec_export.gguf_target.model_folder import folder_of
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "gguf", "export", "A GGUF file as target") from error
    folder = folder_of(file)
    target = TARGETS.get(name)
    if target is None or target.package is None:
        return FoundTarget(file.stem, folder, f"GGUF file {file.name}", "see the file")
    package = target.package
    return FoundTarget(name, folder, f"pip {package.name}=={package.version}", target.licence)


def find_target(name: str) -> FoundTarget:
    """A target's checked model folder, found, fetched or made. Raises what `gguf_target` and `resolve_target` raise."""
    from edgespec_recipes.models.loading import check_model_folder
    from edgespec_recipes.offline_target.resolve import resolve_target

    found = gguf_target(name)
    if found is not None:
        check_model_folder(found.folder)
        return found
    return resolve_target(name)
