"""Export a target and its drafter: files for a device or in the formats you name, each compared with torch, packed as a bundle.

Give two model folders (--target, --drafter), or the folder of a build. Interrupt it at any point and run the same command: what
is complete is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.building.pair import gguf_target
from edgespec.building.pipeline_export import ExportStages, Source
from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import read_json, shares_blocks, write_text
from edgespec.core.folder_lock import held
from edgespec.core.free_space import bytes_in, free_disk
from edgespec.core.manifest import ROLES
from edgespec.core.options import command_line, from_mapping, knob, shell_line, to_mapping, with_default
from edgespec.core.output import json_knob, next_step, write_result
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size
from edgespec.model_folder.head import is_head, shape_of_drafter
from edgespec.model_folder.licence import licence_in
from edgespec.planning import costs
from edgespec.planning.export_costs import files_bytes, passing_bytes, stages_bytes
from edgespec.planning.preflight import check_memory
from edgespec.recipe.devices import FORMATS, profile
from edgespec.recipe.precisions import MIXED, PRECISIONS, precision_names
from edgespec.recipe.read import RECIPE_FILE, resolve
from edgespec.recipe.schema import SELF, SELF_PROMPTS, EvaluateOptions, ExportOptions, Recipe
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.targets import LOCAL, FoundTarget
from edgespec.shell.environment import API_KEY
from edgespec.stages.own_gguf import own_file
from edgespec.stages.sources import held_out_of
from edgespec.stages.stage import STAGE_FILE
from edgespec.stages.training_facts import TRAINING, training_of
from edgespec.verbs.build import check_packages, claim


@dataclass(frozen=True)
class Options:
    build: str = knob("", "folder of a build, instead of --target and --drafter", positional=True)
    target: str = knob(
        "", "model folder of the target (config.json, safetensors, tokenizer), or its GGUF file"
    )
    drafter: str = knob("", "model folder of the drafter, its GGUF file, or the folder of a head")
    out: str = knob("", "folder for the export (default: build/NAME, with the device's name)")
    device: str = with_default(Recipe, "device", "")
    context: int | None = with_default(ExportOptions, "context", None)
    formats: tuple[str, ...] = knob((), "formats to write (default: the device's, or all)", choices=FORMATS)
    precisions: tuple[str, ...] = knob(
        (),
        "precisions to write, of any format: {names} (default: the device's, or each format's usual)",
        names=precision_names,
    )
    bits: float | None = with_default(ExportOptions, "bits", None)
    size: str = with_default(ExportOptions, "size", "")
    quality: float | None = with_default(ExportOptions, "quality", None)
    prompts_file: str = with_default(EvaluateOptions, "prompts_file", "")
    verify_prompts: int = with_default(ExportOptions, "verify_prompts", ExportOptions().verify_prompts)
    bundle_prompts: int = with_default(ExportOptions, "bundle_prompts", ExportOptions().bundle_prompts)
    force: bool = knob(False, "start although the estimate says that memory will not suffice")
    json: str = json_knob()


@dataclass
class Export(ExportStages):
    """The last three stages of a build, on models that are there."""

    source: Source = field(kw_only=True)
    force: bool = field(default=False, kw_only=True)
    fit_flags = ("--context", "--precisions")
    disk_cure: str = "choose fewer --precisions"
    memory_cure: str = ""  # those of an export

    def run(self) -> Path:
        """Export, verify, pack; returns the bundle's folder."""
        from edgespec_export.bundle.write import check_same_tokenizer

        source = self.source
        models = source.target.folder, source.drafter
        self._check_data(held_out_of(self.recipe, self.out))
        target, drafter = map(shape_of_drafter, models)
        own = own_file(source.target.folder)
        self._drop_files_too_large(target, drafter, source.target.name, own)
        self._check_pair(*models)
        check_same_tokenizer(*models)
        if not (self.out / "export" / STAGE_FILE).exists():
            self._check_disk(target, drafter)
        if not self.force:
            check_memory(self._memory(target), self.out, self.memory_cure)
        self._export()
        return self._pack()

    def _check_disk(self, *shapes: ModelShape) -> None:
        """Refuse an export, new or half done, for which the disk has no room. Raises InputError with both numbers."""
        out, own = self.out, own_file(self.source.target.folder)
        files = files_bytes(self.recipe.export, shapes, None if own is None else own.bytes)
        checkpoint = (
            0 if self.recipe.device else costs.weight_bytes(shapes[1])
        )  # the bundle's, of the drafter
        copies = 0 if shares_blocks(out) else files + checkpoint
        # temporary files are gone before the bundle's copies come
        needed = files + max(copies, self._passing(*shapes)) - min(files, bytes_in(out / "export"))
        free = free_disk(out)
        if needed > free:
            raise InputError(
                f"the files, with the bundle's copies of them or what they are made from, take {byte_size(needed)} on the disk "
                f"and {out} has {byte_size(free)} free; make room, or {self.disk_cure}"
            )

    def _passing(self, *shapes: ModelShape) -> int:
        """Bytes of temporary files, at most, for the files that are not there yet."""
        from edgespec_export.formats.export import exported_files

        source, by_role = self.source, dict(zip(ROLES, shapes, strict=True))
        own, head = own_file(source.target.folder), is_head(source.drafter)
        files = exported_files(self.out / "export", self.recipe.export, own, head=head)
        if own is not None:  # that one is copied
            files = [file for file in files if (file.role, file.engine) != ("target", "llama.cpp")]
        left = [file for file in files if not file.is_head and not file.path.exists()]
        return max((passing_bytes(by_role[file.role], file.engine, file.held) for file in left), default=0)

    def _memory(self, target: ModelShape) -> dict[str, int]:
        """Bytes that the stages need which are not done."""
        from edgespec_export.onnx.by_layers import are_alike

        folder = self.source.target.folder
        own = None if (file := own_file(folder)) is None else file.bytes
        needed = stages_bytes(self.recipe.export, target, own, alike=are_alike(folder))
        return {stage: each for stage, each in needed.items() if not (self.out / stage / STAGE_FILE).exists()}

    def _calibration_texts(self) -> Any:
        """As a build does; but the user's key goes to no server that only the build's recipe names. Raises InputError."""
        from edgespec_export.bits.texts import written_texts

        url = self.recipe.inference.url
        if url and os.environ.get(API_KEY) and not written_texts(self._responses()):
            raise InputError(
                f"{self._responses()} has no text for the mixed files, so the server {url!r}, which the build's recipe names, "
                f"would write some, and the key in {API_KEY} would be sent to it; unset {API_KEY}, or put the responses back"
            )
        return super()._calibration_texts()


def _folder(path: str, what: str) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file() and not (what == "drafter" and is_head(folder)):
        raise InputError(
            f"the {what} {path!r} has no config.json; give a model folder in Hugging Face layout, or a GGUF file"
        )
    return folder


def find_source(options: Options) -> Source:
    """The models asked for. Raises InputError: neither or both ways of naming them, folders that hold no model."""
    if bool(options.build) == bool(options.target and options.drafter) or (
        options.build and options.target + options.drafter
    ):
        raise InputError(
            f"the models are build {options.build!r}, target {options.target!r}, drafter {options.drafter!r}; "
            "give either the folder of a build, or both --target and --drafter"
        )
    if options.build:
        return _source_of_build(Path(options.build).expanduser())
    found, drafter = _found(options.target, "target"), _found(options.drafter, "drafter")
    recipe = Recipe(target=str(found.folder))
    foreign = None if _trained(drafter.folder) else drafter
    return Source(found, drafter.folder, recipe, foreign=foreign)


def _found(name: str, what: str) -> FoundTarget:
    """A model by its folder or GGUF file."""
    found = gguf_target(name)
    if found is None:
        folder = _folder(name, what)
        found = FoundTarget(folder.resolve().name, folder, LOCAL, licence_in(folder))
    return found


def _trained(drafter: Path) -> bool:
    """Whether a folder is that of a drafter which edgespec has trained, as far as it tells: a head, or inside a build."""
    folder = drafter.resolve()
    return is_head(folder) or (folder / TRAINING).is_file() or (folder.parent / STAGE_FILE).is_file()


def _source_of_build(build: Path) -> Source:
    """What a build has made so far. Raises InputError where its drafter is not done."""
    for stage in ("target", "distill"):
        if not (build / stage / STAGE_FILE).is_file():
            raise InputError(
                f"{build} has no finished stage {stage!r}; give the folder of a build that has come so far (build-drafter --out)"
            )
    found = read_json(build / "target" / STAGE_FILE)["counts"]
    recipe = resolve(load_recipe(build / RECIPE_FILE), {}, made=True)
    if recipe.evaluate.prompts_file == SELF:
        written = str(build / SELF_PROMPTS / "instructions.jsonl")
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, prompts_file=written))
    target = build / "tune" / "model" if recipe.tune.steps else Path(found["folder"])
    drafter = build / "distill" / "model"
    if not (target / "config.json").is_file():  # moved, or the cache that it was in was emptied
        command = shell_line("edgespec", "export", "--target", "TARGET", "--drafter", drafter)
        raise InputError(
            f"the target's folder {target} is gone, of which {build} was made; put it back, or give the folder or GGUF file that "
            f"the target is now: {command}"
        )
    return Source(
        FoundTarget(**{**found, "folder": target}),
        _folder(str(drafter), "drafter"),
        recipe,
        build / "evaluate" / "evaluation.json",
        build / "generate",
        training_of(build, recipe),
    )


def choose_files(options: Options, usual: ExportOptions) -> dict[str, list[str]]:
    """Precisions by format: those named, else the device's, else the usual ones; of the formats named alone.

    Raises InputError for a precision of no format, or one whose format was not named.
    """
    chosen_by = profile(options.device) if options.device else usual
    formats = options.formats or FORMATS
    home = {one: name for name in reversed(formats) for one in PRECISIONS[name]}  # fp32 alone is ONNX's
    for precision in options.precisions:
        if precision not in home:
            raise InputError(
                f"precision {precision!r} is of none of {', '.join(formats)}{did_you_mean(precision, home)}"
            )
    budget = options.bits is not None or options.size or options.quality is not None
    if budget and options.precisions and not {*MIXED.values()} & {*options.precisions}:
        raise InputError(
            f"--bits, --size and --quality are for mixed files, and --precisions names {', '.join(options.precisions)}; add "
            f"{' or '.join(MIXED.values())}, or leave --precisions out"
        )
    if options.precisions:
        chosen = {name: [one for one in options.precisions if home[one] == name] for name in formats}
    elif budget:
        chosen = {name: [MIXED[name]] for name in formats if name in MIXED}
    else:
        chosen = {name: list(getattr(chosen_by, name)) for name in formats}
    if not any(chosen.values()):
        asked = options.device or options.build or "an export without --device"
        raise InputError(
            f"nothing is to be written: {asked} has no files in {', '.join(formats)}; give --precisions"
        )
    return {name: chosen.get(name, []) for name in FORMATS}


def export_recipe(options: Options, source: Source, given: Collection[str] = ()) -> Recipe:
    """The recipe of the export: the build's own or the defaults, with the files and the device asked for.

    given: the knobs that a flag names; for others that a recipe has too, its value holds.
    """
    export = choose_files(options, source.recipe.export) | {
        name: getattr(options, name) for name in ExportOptions.__dataclass_fields__ if name in given
    }
    values: dict[str, Any] = {"export": export, "device": options.device}
    if options.prompts_file:
        values["evaluate"] = {"prompts_file": options.prompts_file}
    return resolve(to_mapping(source.recipe), values, made=True)


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    source = find_source(options)
    recipe = export_recipe(options, source, given)
    check_packages(recipe, trains=False)
    ending = f"-{options.device}" if options.device else "-export"
    out = Path(options.out).expanduser() if options.out else Path("build") / f"{source.target.name}{ending}"
    command = command_line("export", Options, given)
    with held(out, command):
        claim(out, replace(recipe, target=str(source.target.folder)))
        write_text(out / "command.txt", command + "\n")
        export = Export(recipe, out, source=source, force=options.force)
        export.run()
        write_result(options.json, export.summary())
        next_step("edgespec", "chat", out / "bundle")
    return 0
