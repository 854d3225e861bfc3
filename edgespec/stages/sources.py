"""The things that stages read, each as `Reads`: model folders, the data that a recipe names, a target's exported file.

A model folder or responses inside the build are known by the stage that made them, all others by their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
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
from edgespec.recipe.schema import PYTHON_STDLIB, InferenceOptions, Recipe
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


def evaluation(file: Path | None, out: Path) -> Reads:
    """What was measured of the drafter in torch."""
    if file is None:
        return Reads()
    return stages(out, file.parent.name) if file.is_relative_to(out) else one_file("evaluation", file)


def text(purpose: str, source: str | Sequence[str]) -> Reads:
    """Plain text as `documents.read_documents` reads it."""
    return _data(purpose, source, TEXT_FILES)


def conversations(purpose: str, source: str | Sequence[str]) -> Reads:
    """Instructions or prompts as `instructions.read_conversations` reads them."""
    return _data(purpose, source, ROW_FILES)


def everything(data: BuildData) -> Reads:
    """All that a build or a study names."""
    texts = [text(name, source) for name, source in data.texts.items()]
    rows = {**data.prompts, **data.replies}
    return reduce(or_, [*texts, *(conversations(name, rows[name]) for name in rows)], Reads())


def _data(purpose: str, source: str | Sequence[str], suffixes: Sequence[str]) -> Reads:
    """Files, or a hub dataset's revision; nothing for what comes with Python. What is wrong with them their reader says."""
    files: dict[str, Source] = {}
    revisions: dict[str, Callable[[], str | None]] = {}
    for name, one in numbered(purpose, source).items():
        root = parse_hub(one).folder if one.startswith(HUB) else Path(one).expanduser()
        if root is None:
            revisions[one] = partial(hub_revision, one)
        elif one not in ("", PYTHON_STDLIB):
            files[name] = Source(root, ())
            with suppress(InputError):
                files[name] = Source(root, tuple(source_files(one, suffixes)))
    return Reads(files, revisions=revisions)


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
    distill = recipe.distill
    texts = numbered("pretrain.text", recipe.pretrain.text) if recipe.drafter.kind == "model" else {}
    written = numbered("generate.instructions", recipe.generate.instructions)
    fixed = {"distill.fixed": distill.fixed} if distill.fixed_fraction else {}
    tuned = {"tune.conversations": recipe.tune.conversations} if recipe.tune.steps else {}
    return BuildData(
        _left(texts, out / ("distill" if distill.text_fraction else "pretrain")),
        {**_left(written, out / "generate"), **held_out_of(recipe, out).prompts},
        {**_left(fixed, out / "distill"), **_left(tuned, out / "tune")},
    )


def held_out_of(recipe: Recipe, out: Path) -> BuildData:
    """What an export in `out` reads."""
    found = numbered("evaluate.prompts_file", recipe.evaluate.prompts_file)
    return BuildData(prompts=_left(found, out / "pack"))


def _left(found: Mapping[str, str], reader: Path) -> dict[str, str]:
    """Sources without those that are gone after their last reader, a stage, has finished."""
    done = (reader / STAGE_FILE).exists()
    return {
        name: source
        for name, source in found.items()
        if not (done and is_local(source) and not Path(source).expanduser().exists())
    }
