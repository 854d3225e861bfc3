"""The things that stages read, each as `Reads`: model folders, the data that a recipe names, a target's exported file.

A model folder or responses inside the build are known by the stage that made them, all others by their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.manifest import MANIFEST
from edgespec.model_folder.chat_template import MORE_TEMPLATES
from edgespec.recipe.data_sources import (
    HUB,
    ROW_FILES,
    TEXT_FILES,
    BuildData,
    hub_revision,
    is_local,
    numbered,
    parse_hub,
    source_files,
)
from edgespec.recipe.schema import PYTHON_STDLIB, SELF, InferenceOptions, Recipe
from edgespec.stages.record import Reads, Source
from edgespec.stages.stage import STAGE_FILE

# config, tokenizer, chat templates
SETTINGS = ("*.json", "*.model", "*.txt", "*.jinja", f"{MORE_TEMPLATES}/*.jinja")
WEIGHTS = "*.safetensors"


def stages(out: Path, *names: str) -> Reads:
    """Other stages of the build in `out`."""
    return Reads(stages={name: out / name for name in names})


def model(purpose: str, folder: Path, out: Path, *, weights: bool = True) -> Reads:
    """A model folder: config, tokenizer and, unless told not to, weights."""
    return _made_or_found(purpose, folder, out, (*SETTINGS, WEIGHTS) if weights else SETTINGS)


def responses(folder: Path, out: Path) -> Reads:
    """What the target wrote; the checksums beside the shards stand for them."""
    return _made_or_found("responses", folder, out, ("shard-*.json",))


def _made_or_found(purpose: str, folder: Path, out: Path, patterns: Sequence[str]) -> Reads:
    if folder.is_relative_to(out):
        stage = folder if folder.parent == out else folder.parent
        return Reads(stages={stage.relative_to(out).as_posix(): stage})
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return _files(purpose, folder, sorted(found))


def one_file(purpose: str, file: Path) -> Reads:
    return _files(purpose, file, [file] if file.is_file() else [])


def _files(purpose: str, root: Path, files: Sequence[Path]) -> Reads:
    return Reads(files={purpose: Source(root, tuple(files))})


def text(purpose: str, source: str | Sequence[str]) -> Reads:
    """Plain text as `documents.read_documents` reads it."""
    return _all(purpose, source, TEXT_FILES)


def conversations(purpose: str, source: str | Sequence[str]) -> Reads:
    """Instructions or prompts as `instructions.read_conversations` reads them."""
    return _all(purpose, source, ROW_FILES)


def _all(purpose: str, source: str | Sequence[str], suffixes: Sequence[str]) -> Reads:
    named = numbered(purpose, source)
    return reduce(or_, (_data(name, one, suffixes) for name, one in named.items()), Reads())


def everything(data: BuildData) -> Reads:
    """All that a build or a study names."""
    texts = [text(name, source) for name, source in data.texts.items()]
    rows = {**data.prompts, **data.replies}
    return reduce(or_, [*texts, *(conversations(name, rows[name]) for name in rows)], Reads())


def _data(purpose: str, source: str, suffixes: Sequence[str]) -> Reads:
    """Files, or a hub dataset's revision; nothing for what comes with Python. What is wrong with them their reader says."""
    if source in ("", PYTHON_STDLIB):
        return Reads()
    root = Path(source).expanduser()
    if source.startswith(HUB):
        folder = parse_hub(source).folder
        if folder is None:
            return Reads(revisions={source: lambda: hub_revision(source)})
        root = folder
    try:
        return _files(purpose, root, source_files(source, suffixes))
    except InputError:
        return _files(purpose, root, [])


def exported(options: InferenceOptions) -> Reads:
    """The target's file where `inference` names one; a bundle's manifest stands for its files, which it holds checksums of."""
    if options.source != "file":
        return Reads()
    path = Path(options.file).expanduser()
    manifest = path / MANIFEST
    if manifest.is_file():
        return _files("inference.file", path, [manifest])
    found = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file())
    return _files("inference.file", path, found)


def data_of(recipe: Recipe, out: Path) -> BuildData:
    """What the build in `out` reads."""
    fixed = {"distill.fixed": recipe.distill.fixed} if recipe.distill.fixed_fraction else {}
    tuned = {"tune.conversations": recipe.tune.conversations} if recipe.tune.steps else {}
    written = numbered("generate.instructions", recipe.generate.instructions)
    texts = numbered("pretrain.text", recipe.pretrain.text) if recipe.drafter.kind == "model" else {}
    return BuildData(
        _left(texts, recipe, out),
        {**_left(written, recipe, out), **held_out_of(recipe, out).prompts},
        _left({**fixed, **tuned}, recipe, out),
    )


def held_out_of(recipe: Recipe, out: Path) -> BuildData:
    """What an export in `out` reads."""
    source = recipe.evaluate.prompts_file
    return BuildData(prompts={} if source == SELF else _left({"evaluate.prompts_file": source}, recipe, out))


def _left(found: Mapping[str, str], recipe: Recipe, out: Path) -> dict[str, str]:
    """Sources without those that are gone after their last reader has finished."""
    readers = {
        "pretrain.text": "distill" if recipe.distill.text_fraction else "pretrain",
        "generate.instructions": "generate",
        "evaluate.prompts_file": "pack",
        "distill.fixed": "distill",
        "tune.conversations": "tune",
    }
    return {
        name: source
        for name, source in found.items()
        if not (
            is_local(source)
            and not Path(source).expanduser().exists()
            and (out / readers[name.partition(" ")[0]] / STAGE_FILE).exists()
        )
    }
