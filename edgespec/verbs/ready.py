"""Ready pairs: a drafter that comes with edgespec and a target that comes with pip make a bundle here, once, in the cache.

    edgespec chat smollm2-135m-instruct

`python -m edgespec.verbs.ready BUILD NAME` keeps the drafter of a finished build as the ready one of a target.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from edgespec.building.pair import gguf_target
from edgespec.building.pipeline_export import Source
from edgespec.core import __version__
from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import copy_file, sha256_file, write_json, write_text
from edgespec.core.folder_lock import held, remove_older
from edgespec.core.manifest import SCHEMA_VERSION, open_manifest
from edgespec.core.output import note, print_as_notes
from edgespec.model_folder.head import keep_in_bytes
from edgespec.recipe.read import RECIPE_FILE, resolve
from edgespec.recipe.shipped import in_recipes, load_recipe
from edgespec.recipe.targets import TARGETS, gguf_of
from edgespec.shell.environment import HOME, READY, cache_folder
from edgespec.stages.training_facts import TRAINING, read_training, training_of
from edgespec.verbs.export import Export

KEY = 12  # hex digits of a pair's key in its folder's name
EVALUATION = "evaluation.json"
EXPORT = {
    "onnx": ["int8"],
    "gguf": ["q4_1"],
    "verify_prompts": 2,
    "answer_replies": 8,
    "acceptance_prompts": 0,
}
"""What a ready bundle has: ONNX int8 and the target's own GGUF file, which is Q4_1. Its drafter was measured when it was made."""
EXPORTER = 4
"""Raised when export writes other files of the same inputs: a pair in the cache is then made again."""


def ready_folders() -> dict[str, Path]:
    """Target -> the folder of its ready drafter."""
    folders = sorted(in_recipes(READY).glob("*"))
    return {folder.name: folder for folder in folders if (folder / "head.json").is_file()}


def bundle_of(name: str) -> str:
    """The folder that a verb was given, or the bundle of a ready pair of that name, made now if need be.

    Any other name is a folder's, and the verb says what is wrong with it. Raises InputError where the target is not installed.
    """
    path = Path(name).expanduser()
    drafter = None if path.exists() else ready_folders().get(name)
    return str(path if drafter is None else _make(name, drafter))


def _make(name: str, drafter: Path) -> Path:
    file = gguf_of(name)
    if file is None:
        package = TARGETS[name].package
        command = package.command if package is not None else f"edgespec targets show {name}"
        raise InputError(
            f"the target {name} is not on this machine: {command}, then run the same command again"
        )
    out = folder_of(name, drafter, file)
    bundle = out / "bundle"
    copied = [out / "export", out / "verify"]  # the bundle has copies of what is in them
    if not _is_whole(bundle) or any(map(Path.exists, copied)):
        command = f"edgespec chat {name}"
        with held(out, command, wait=True), print_as_notes():
            if not _is_whole(bundle):  # another process may have made it meanwhile
                note(f"making the ready pair {name} (once; about 2 minutes)")
                _export(name, drafter, out)
            for folder in copied:
                shutil.rmtree(folder, ignore_errors=True)
            remove_older(out, command)  # what other versions made of the pair
    return bundle


def _is_whole(bundle: Path) -> bool:
    """Whether all of a bundle's files are there, in their sizes: what cleans up old files may take some of a cache's."""
    try:
        open_manifest(bundle, hashes=False)
    except BundleError:
        return False
    return True


def folder_of(name: str, drafter: Path, file: Path) -> Path:
    """Where the pair of a drafter and a target's file is in the cache, made or not."""
    made_of = [
        __version__,
        EXPORTER,
        SCHEMA_VERSION,
        EXPORT,
        *map(sha256_file, [file, *sorted(drafter.glob("*"))]),
    ]
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    return cache_folder() / READY / f"{name}-{key[:KEY]}"


def _export(name: str, drafter: Path, out: Path) -> None:
    found = gguf_target(name)
    assert found is not None
    recipe = resolve({"target": str(found.folder), "export": EXPORT}, {})
    write_text(out / "command.txt", f"edgespec chat {name}\n")
    training = read_training(drafter / TRAINING)
    source = Source(found, drafter, recipe, drafter / EVALUATION, training=training)
    Export(
        recipe,
        out,
        source=source,
        disk_cure=f"set {HOME} to a folder on another disk",
        memory_cure="close other programs, then run the same command again",
    ).run()


def keep(build: Path, name: str) -> Path:
    """Keep a build's drafter as the ready one of the target `name`, in this checkout. Raises InputError where it is not done."""
    head, evaluation = build / "distill" / "model", build / "evaluate" / EVALUATION
    for file in (head / "head.json", evaluation):
        if not file.is_file():
            raise InputError(f"{file} is missing; finish the build in {build} first")
    out = in_recipes(READY, name)
    keep_in_bytes(head, out)
    copy_file(evaluation, out / EVALUATION)
    recipe = load_recipe(build / RECIPE_FILE)
    write_json(out / TRAINING, {"target": name, **training_of(build, resolve(recipe, {}, made=True))})
    return out


if __name__ == "__main__":
    print(keep(Path(sys.argv[1]), sys.argv[2]))
