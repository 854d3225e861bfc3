"""How a stage of a build is run, and the last three of them: export, verify, pack. They need two models, however these were made.

Each stage is in a folder of its own and knows what it reads; how it does its work is the rooms' business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from edgespec.building.pair import check_pair
from edgespec.core.errors import BundleError
from edgespec.core.files import read_json, read_object, write_text
from edgespec.core.manifest import open_manifest, read_manifest
from edgespec.core.options import to_mapping
from edgespec.core.output import step
from edgespec.core.shapes import ModelShape
from edgespec.core.table import duration, table
from edgespec.core.texts import obeys
from edgespec.model_folder.check import shape_in
from edgespec.planning.devices_fit import check_fit, fit, fitting
from edgespec.planning.export_costs import files_of
from edgespec.planning.plan_stages import TOGETHER
from edgespec.recipe.data_sources import BuildData
from edgespec.recipe.devices import device_of
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.read import RECIPE_FILE, dump_recipe
from edgespec.recipe.schema import GenerateOptions, Recipe
from edgespec.recipe.targets import FoundTarget
from edgespec.stages import sources
from edgespec.stages.own_gguf import OwnFile
from edgespec.stages.record import Reads, clear_if_inputs_changed
from edgespec.stages.stage import STAGE_FILE, Body, Processes, reopen, run_stage
from edgespec.stages.training_facts import training_of

# Replies that a target writes where its build has none: some 4,000 tokens, of which half are held out.
CALIBRATION_REPLIES, CALIBRATION_TOKENS = 64, 64


def _without_counts(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The derived figures of evaluation.json; the raw counts travel in that file. Nothing where nothing was measured."""
    if not evaluation:
        return {}
    settings = [
        {key: value for key, value in setting.items() if key not in ("counts", "teacher_forced")}
        for setting in evaluation["settings"]
    ]
    return {"prompts": evaluation["prompts"], "settings": settings, "comparisons": evaluation["comparisons"]}


@dataclass(frozen=True)
class Source:
    """The two models and what is known of them.

    evaluation: the file of what was measured in torch. responses: the folder of what the target wrote (default: the stage's own).
    training: what the drafter was trained on (training_facts.py; default: what the stages here tell). foreign: the drafter where
    edgespec has not trained it.
    """

    target: FoundTarget
    drafter: Path
    recipe: Recipe
    evaluation: Path | None = None
    responses: Path | None = None
    training: dict[str, Any] = field(default_factory=dict)
    foreign: FoundTarget | None = None


@dataclass
class ExportStages:
    """The stages in the folder `out`, and how long each took."""

    recipe: Recipe
    out: Path
    processes: Processes = field(default_factory=Processes)
    times: list[tuple[str, float]] = field(default_factory=list)
    room: float = math.inf
    """Bytes of memory that verify may take, though more be free."""
    source: Source = field(init=False, repr=False)
    """What is exported; set before that."""
    fit_flags: ClassVar[tuple[str, str] | None] = None
    """A verb's own flags for what `devices_fit.Fit.cure` names; a recipe's where there are none."""

    def stage(
        self,
        name: str,
        what: str,
        options: Any,
        body: Body,
        *,
        reads: Reads,
        damaged: Callable[[Path], list[str]] | None = None,
    ) -> dict[str, Any]:
        """Run one stage unless it is done and what it `reads` is as it was.

        One with `damaged` files that are still to be read is opened again for them.
        """
        folder = self.out / name
        if not self.processes.rank and (why := clear_if_inputs_changed(folder, reads)):
            step(f"! {name}: {why}: running again")
        still_read = not self.processes.rank and not (self.out / "distill" / STAGE_FILE).exists()
        files = damaged(folder) if damaged and still_read else []
        if files:
            step(f"! {name}: damaged: {', '.join(files)}; only that is made again")
            reopen(folder)
        done = (folder / STAGE_FILE).exists()
        step(f"{'✓' if done else '▸'} {name}: {what}{' (done before)' if done else ''}")
        mapping = options if isinstance(options, dict) else to_mapping(options)
        counts = run_stage(folder, mapping, body, self.processes, together=name in TOGETHER)
        if not self.processes.rank and not (folder / RECIPE_FILE).exists():
            write_text(folder / RECIPE_FILE, dump_recipe(self.recipe))
        self.times.append((name, float(read_json(folder / STAGE_FILE)["seconds"])))
        return counts

    def summary(self) -> dict[str, Any]:
        """What is printed at the end, as JSON: the bundle, each stage's seconds, what was measured."""
        return {
            "bundle": str(self.out / "bundle"),
            "seconds": dict(self.times),
            "evaluation": _without_counts(self._evaluation()),
            "verification": read_json(self.out / "verify" / "verify.json"),
        }

    def _model_reads(self, purpose: str, folder: Path, *, weights: bool = True) -> Reads:
        return sources.model(purpose, folder, self.out, weights=weights)

    def _prompt_reads(self) -> Reads:
        return sources.conversations("evaluate.prompts_file", self.recipe.evaluate.prompts_file)

    def _check_data(self, data: BuildData) -> None:
        """Data that cannot be read stop a build before its first training step: InputError naming file and row, MissingExtra."""
        from edgespec_recipes.data.prompts import check_data

        if data:
            self.stage(
                "data",
                "every row of text, instructions and prompts can be read",
                {"strict": self.recipe.data.strict},
                lambda place: check_data(data, self.recipe.data.strict),
                reads=sources.everything(data),
            )

    def _check_pair(self, target: Path, drafter: ModelShape | Path | None) -> None:
        """What a later stage would refuse, said before anything is written; notes on the files. Raises as `check_pair` does."""
        for text in check_pair(target, drafter, self.recipe.export):
            step(f"Note: {text}")

    def _drop_files_too_large(
        self, target: ModelShape, drafter: ModelShape, name: str, own: OwnFile | None = None
    ) -> None:
        """Where the files are for a device: show the memory they take there, and leave out those that it has no room for.

        `own`: the target's own GGUF file. Raises InputError where what is to run takes too much.
        """
        device = device_of(self.recipe)
        if device is None:
            return
        size = None if own is None else own.bytes
        found = fit(device, target, drafter, size)
        print(f"\n{found.table()}", flush=True)
        check_fit(found, name, self.fit_flags)
        before, self.recipe = self.recipe.export, fitting(self.recipe, target, drafter, size)
        kept = files_of(self.recipe.export)
        if left := [name for engine, name in files_of(before) if (engine, name) not in kept]:
            print(f"Note: {device.name} has no memory for {', '.join(left)}; not written", flush=True)

    def _export(self) -> None:
        from edgespec_export.answers.replies import questions_of
        from edgespec_export.formats.export import export_pair
        from edgespec_export.verify.exported_pair import Trials
        from edgespec_export.verify.pair import verify_pair
        from edgespec_export.verify.report import verification_table
        from edgespec_runtime.text.tokenizer import ChatTokenizer

        options, out, seed = self.recipe.export, self.out, self.recipe.seed
        target, drafter = self.source.target.folder, self.source.drafter
        models = self._model_reads("target", target) | self._model_reads("drafter", drafter)
        self.stage(
            "export",
            "the files of each format",
            options,
            lambda place: export_pair(
                place, target, drafter, options, self._calibration_rows, self._calibration_texts
            ),
            reads=models | self._calibration_reads(),
        )

        def verify(place: Path) -> dict[str, Any]:
            answered, decoded = options.answer_replies, options.acceptance_prompts
            chats = self._held_out(max(options.verify_prompts, answered, decoded))
            tokenizer = ChatTokenizer(target)
            prompts = [tokenizer.encode_chat(messages) for messages in chats]
            return verify_pair(
                place,
                out / "export",
                target,
                drafter,
                prompts[: options.verify_prompts],
                options,
                trials=Trials(prompts[:decoded], tokenizer.stop_ids, seed=seed),
                questions=questions_of(target, chats[:answered], seed=seed),
                most=self.room,
            )

        reads = models | sources.stages(out, "export") | self._prompt_reads()
        self.stage("verify", "every file against torch", options, verify, reads=reads)
        print(verification_table(out / "verify" / "verify.json", colour=obeys(sys.stdout)), flush=True)

    def _pack(self) -> Path:
        """The bundle's folder, after a table of how long each stage took."""
        from edgespec_export.bundle.default_choice import default_report
        from edgespec_export.bundle.write import write_bundle

        source, recipe, out = self.source, self.recipe, self.out
        device = device_of(recipe)

        def pack(place: Path) -> dict[str, Any]:
            evaluation, training = self._evaluation(), source.training or training_of(out, recipe)
            return write_bundle(
                out / "bundle",
                out / "export",
                source.target,
                source.drafter,
                recipe.export,
                foreign=source.foreign,
                prompts=self._held_out(recipe.export.bundle_prompts),
                evaluation=evaluation,
                verification=read_json(out / "verify" / "verify.json"),
                metrics=_without_counts(evaluation),
                device=device,
                provenance={
                    "recipe": to_mapping(recipe),
                    "command": (out / "command.txt").read_text(encoding="utf-8").strip(),
                    "seed": recipe.seed,
                    "seconds": dict(self.times),
                    **({"training": training} if training else {}),
                },
            )

        if not self.processes.rank and (out / "pack" / STAGE_FILE).exists():
            try:
                open_manifest(out / "bundle", hashes=False)
            except BundleError as error:
                step(f"! pack: {error}: running again")
                (out / "pack" / STAGE_FILE).unlink(missing_ok=True)
        reads = sources.stages(out, "export", "verify") | sources.evaluation(source.evaluation, out)
        reads |= self._prompt_reads()
        self.stage("pack", "manifest, checksums, model card", {}, pack, reads=reads)
        print(default_report(read_manifest(out / "bundle"), colour=obeys(sys.stdout)), flush=True)
        print(table(("stage", "time"), [(name, duration(seconds)) for name, seconds in self.times]))
        total = duration(sum(seconds for _, seconds in self.times))
        print(f"total {total}; bundle: {out / 'bundle'}", flush=True)
        return out / "bundle"

    def _evaluation(self) -> dict[str, Any]:
        """What was measured in torch, raw counts and all."""
        file = self.source.evaluation
        return read_object(file) if file is not None and file.is_file() else {}

    def _held_out(self, limit: int) -> list[list[dict[str, str]]]:
        """The first held-out prompts, with turns joined where the chat template refuses them: the runtime joins none.

        Raises InputError for one that it refuses joined, too.
        """
        from edgespec_recipes.data.prompts import accepted, read_prompts
        from edgespec_recipes.models.loading import load_tokenizer

        tokenizer = load_tokenizer(self.source.target.folder)
        prompts = read_prompts(self.recipe.evaluate.prompts_file, "heldout")[:limit]
        return [accepted(tokenizer, messages)[0] for messages in prompts]

    def _calibration_rows(self) -> list[list[int]]:
        """Text for the ranges of integer activations: the target's own responses, else the held-out prompts."""
        from edgespec_export.bits.texts import written_rows
        from edgespec_runtime.text.tokenizer import ChatTokenizer

        if rows := written_rows(self._responses()):
            return rows
        encode = ChatTokenizer(self.source.target.folder).encode_chat
        return [encode(messages) for messages in self._held_out(self.recipe.export.verify_prompts)]

    def _calibration_texts(self) -> Any:
        """What the target wrote for its drafter; where there is nothing, it writes some now."""
        from edgespec_export.bits.texts import written_texts

        if found := written_texts(self._responses()):
            return found
        from edgespec_recipes.generating.datagen import generate

        target = self.source.target.folder
        longest = shape_in(target / "config.json").context_length // 2
        some = GenerateOptions(
            prompts=CALIBRATION_REPLIES, max_new_tokens=min(CALIBRATION_TOKENS, longest), batch_size=16
        )
        folder = self.out / "calibration"
        clear_if_inputs_changed(folder, self._model_reads("target", target))
        generate(folder, target, some, self.recipe.seed, self.recipe.inference)
        return written_texts(folder)

    def _calibration_reads(self) -> Reads:
        """What the calibration reads, where static graphs have integers or a file's tensors get bits of their own."""
        files = self.recipe.export
        if files.npu or {*MIXED.values()} & {*files.onnx, *files.gguf}:
            return sources.responses(self._responses(), self.out) | self._prompt_reads()
        return Reads()

    def _responses(self) -> Path:
        """Where the target's responses lie, if it wrote some."""
        return self.source.responses or self.out / "generate"
