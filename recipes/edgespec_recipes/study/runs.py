"""A study: every arm of it trained for every seed, everything counted that the report needs. What may be shared is made once.

    data         every row of text, instructions and prompts can be read
    target       found or made
    held-out     the target's responses to held-out prompts of every task and sampling
    responses    the target's answers to the seed instructions of all tasks in domain
    store/       its distributions there, for the arms that read them
    pretrain/    a drafter for each way to begin and each seed
    reference/   AdaSPEC's reference for each beginning, data mix and seed
    arms/        ARM/seed-N: one distillation
    counts/      ARM/seed-N.json: raw counts of that drafter; ARM/seed-N-step-NNNNNN.json of one kept on the way
    check/       real speculative decoding with the best arm

Every folder is a stage: killed at any moment and started again, a study goes on where it was. Knows the order and the sharing;
the stages do the work, numbers.py says what the counts mean.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from edgespec_runtime.engines.device import cpu_name
from edgespec_runtime.engines.engine import default_threads

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json, write_jsonl, write_text
from edgespec.core.options import to_mapping
from edgespec.core.output import step
from edgespec.core.shapes import ModelShape
from edgespec.core.table import duration
from edgespec.planning.drafter_shape import drafter_shape
from edgespec.recipe.data_sources import BuildData
from edgespec.recipe.drafter import cost_ratios
from edgespec.recipe.read import RECIPE_FILE, dump_recipe, reference_options
from edgespec.recipe.schema import DistillOptions, EvaluateOptions, GenerateOptions, Recipe
from edgespec.recipe.study_options import Arm, Study
from edgespec.recipe.targets import gone, is_gguf
from edgespec.stages import sources
from edgespec.stages.record import Reads, clear_if_inputs_changed
from edgespec.stages.stage import STAGE_FILE, run_stage
from edgespec_recipes.data.prompts import check_data, read_prompts
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.study.counts import Texts, count_drafters, read_texts, run_for_real, sample_texts
from edgespec_recipes.target_names.resolve import resolve_target
from edgespec_recipes.training.distill import DistillInputs, distill, store_responses
from edgespec_recipes.training.pretrain import pretrain

KEPT = "step-"


def digest(*options: Any) -> str:
    """Eight hex digits that name a choice of options."""
    plain = json.dumps([to_mapping(part) for part in options], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:8]


def machine() -> dict[str, Any]:
    """What the study ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu_name(), "cores": default_threads(), "threads": torch.get_num_threads(), "gpu": gpu}


class Runs:
    """The runs of one study in a folder. `everything` makes what is missing."""

    def __init__(self, study: Study, out: Path, resolve: Callable[[str], Any] = resolve_target) -> None:
        """`resolve`: gives a target's name, folder and source by its name."""
        self.study, self.out, self.resolve = study, out, resolve
        self.target = Path()
        self.trained: dict[Path, float] = {}  # seconds of every distillation

    # stages -----------------------------------------------------------------------------------------------------------

    def stage(
        self,
        folder: Path,
        options: dict[str, Any],
        body: Callable[[Path], dict[str, Any]],
        reads: Reads,
        *,
        recipe: Recipe | None = None,
        knobs: type[Any] | None = None,
    ) -> dict[str, Any]:
        """Run a stage unless it has been and what it `reads` is as it was.

        recipe: what it follows, if not the base. knobs: the section that `options` holds; a folder that is older than one of them
        has its default.
        Raises InputError where the folder was begun with other options.
        """
        file, wanted = folder / "options.json", json.loads(json.dumps(options))
        usual = to_mapping(knobs()) if knobs else {}
        if file.exists() and (seen := {**usual, **read_json(file)}) != wanted:
            name = next((key for key in [*wanted, *seen] if wanted.get(key) != seen.get(key)), "options")
            raise InputError(
                f"{folder} was made with other options ({name} is {seen.get(name)!r} there and {wanted.get(name)!r} here); "
                "give another --out, or remove that folder"
            )
        self._settle(folder, reads)
        if not file.exists():
            write_text(folder / RECIPE_FILE, dump_recipe(recipe or self.study.recipe))
            write_json(file, wanted)
        return run_stage(folder, wanted, body)

    def _settle(self, result: Path, reads: Reads, record: Path | None = None) -> None:
        if why := clear_if_inputs_changed(result, reads, record):
            step(f"! {result.relative_to(self.out).as_posix()}: {why}: running again")

    def _model(self, folder: Path, *, weights: bool = True) -> Reads:
        purpose = "target" if folder == self.target else "model"
        return sources.model(purpose, folder, self.out, weights=weights)

    def readable(self) -> None:
        """Data that cannot be read stop a study before its first training step."""
        data, base = self.study.data, self.study.recipe
        if data:
            step("▸ every row of text, instructions and prompts can be read")
            folder = self.out / "data" / digest(data, base.data)  # other arms may read other files
            options = {"strict": base.data.strict}
            self.stage(
                folder,
                options,
                lambda place: check_data(data, base.data.strict),
                sources.everything(data),
            )

    def prepared(self) -> None:
        """The target, its held-out texts, its responses."""
        base, out, tasks = self.study.recipe, self.out, self.study.tasks
        named = {"target": base.target}

        def find(place: Path) -> dict[str, Any]:
            found = self.resolve(base.target)
            return {"name": found.name, "folder": str(found.folder), "source": found.source}

        file = Path(base.target).expanduser()  # of a folder each stage knows the files
        reads = sources.one_file("target", file) if is_gguf(file) else Reads()
        target = self.stage(out / "target", named, find, reads)
        self.target = Path(target["folder"])
        if not (self.target / "config.json").is_file():
            raise gone("target", target, base.target, out / "target")
        held_out = {f"tasks.{name}.held_out": task.held_out for name, task in tasks.items()}
        asked = {f"tasks.{name}.instructions": task.instructions for name, task in tasks.items()}
        plain = {name: to_mapping(task) for name, task in tasks.items()}
        options, samplings = base.evaluate, list(self.study.options.samplings)
        step("▸ held-out texts of the target")
        self.stage(
            out / "held-out",
            {**named, **to_mapping(options), "tasks": plain, "samplings": samplings, "seed": base.seed},
            lambda place: sample_texts(place, self.target, tasks, samplings, options, base.seed),
            self._model(self.target) | sources.everything(BuildData(prompts=held_out)),
            knobs=EvaluateOptions,
        )
        step("▸ the target's responses to the seed instructions")
        answered = [task.instructions for task in tasks.values() if task.domain == "in"]

        def answer(place: Path) -> dict[str, Any]:
            file = place / "instructions.jsonl"
            write_jsonl(file, [{"messages": messages} for messages in read_prompts(answered, "seed")])
            return generate(place, self.target, replace(base.generate, instructions=(str(file),)), base.seed)

        self.stage(
            out / "responses",
            {**named, **to_mapping(base.generate), "instructions": answered, "seed": base.seed},
            answer,
            self._model(self.target) | sources.everything(BuildData(prompts=asked)),
            knobs=GenerateOptions,
        )

    def shape(self, arm: Arm) -> ModelShape:
        return drafter_shape(self._target_shape(), arm.recipe.drafter)

    def _target_shape(self) -> ModelShape:
        return ModelShape.from_config(read_json(self.target / "config.json"))

    def _pretrained(self, arm: Arm, seed: int) -> Path:
        return self.out / "pretrain" / digest(arm.recipe.drafter, arm.recipe.pretrain) / f"seed-{seed}"

    def _arm(self, name: str, seed: int) -> Path:
        """Where an arm's drafter lies; that of an arm without distillation is the pretrained one."""
        arm = self.study.arms[name]
        if not arm.recipe.distill.steps:
            return self._pretrained(arm, seed)
        return self.out / "arms" / name / f"seed-{seed}"

    def beginning(self, arm: Arm, seed: int) -> Path:
        """The folder of the pretrained drafter an arm begins with."""
        recipe = arm.recipe
        options = {"drafter": to_mapping(recipe.drafter), **to_mapping(recipe.pretrain), "seed": seed}
        folder = self._pretrained(arm, seed)
        self.stage(
            folder,
            options,
            lambda place: pretrain(
                place, self.target, self.shape(arm), recipe.drafter, recipe.pretrain, seed
            ),
            self._model(self.target, weights=recipe.drafter.init in ("subclone", "components"))
            | (self._model(Path(recipe.drafter.checkpoint)) if recipe.drafter.checkpoint else Reads())
            | sources.text("pretrain.text", recipe.pretrain.text),
            recipe=replace(recipe, seed=seed),
        )
        return folder

    def _inputs(self, arm: Arm, seed: int) -> DistillInputs:
        recipe, begun = arm.recipe, self.beginning(arm, seed)
        inputs = DistillInputs(
            target=self.target,
            drafter=begun / "model",
            responses=self.out / "responses",
            text=recipe.pretrain.text,
            text_cache=begun / "text",
        )
        if recipe.distill.target_side == "stored":
            kept = {"context": recipe.distill.context, "stored_top_k": recipe.distill.stored_top_k}
            store = self.out / "store" / f"{kept['context']}-top-{kept['stored_top_k']}"
            inputs = replace(inputs, store=store)
            self.stage(
                store,
                kept,
                lambda place: store_responses(place, inputs, recipe.distill),
                self._model(self.target) | sources.stages(self.out, "responses"),
            )
        if recipe.distill.select_fraction < 1:
            options = reference_options(recipe)
            made_by = digest(recipe.drafter, recipe.pretrain, options)
            folder = self.out / "reference" / made_by / f"seed-{seed}"
            self._distil(folder, replace(recipe, distill=options), inputs, seed)
            inputs = replace(inputs, reference=folder / "model")
        return inputs

    def _distil(self, folder: Path, recipe: Recipe, inputs: DistillInputs, seed: int, **more: Any) -> None:
        """One distillation as the recipe says; its options say `more`, too."""
        options = recipe.distill
        models = [self.target, inputs.drafter, *([inputs.reference] if inputs.reference else [])]
        stored = [inputs.store.relative_to(self.out).as_posix()] if inputs.store else []
        fixed = options.fixed if options.fixed_fraction else ""
        made = sources.stages(self.out, "responses", *stored)
        self.stage(
            folder,
            {**to_mapping(options), **more, "seed": seed},
            lambda place: distill(place, inputs, options, seed),
            reduce(or_, map(self._model, models), made | sources.conversations("distill.fixed", fixed)),
            recipe=replace(recipe, seed=seed),
            knobs=DistillOptions,
        )

    def drafter(self, name: str, seed: int) -> Path:
        """The folder of an arm's drafter: `model` in it, and `kept` where some were kept on the way."""
        arm, folder = self.study.arms[name], self._arm(name, seed)
        if not arm.recipe.distill.steps:
            return self.beginning(arm, seed)
        inputs = self._inputs(arm, seed)
        self._distil(folder, arm.recipe, inputs, seed, begun=inputs.drafter.parent.parent.name)
        self.trained[folder] = float(read_json(folder / STAGE_FILE)["seconds"])
        return folder

    # counts -----------------------------------------------------------------------------------------------------------

    def _models(self, name: str, seed: int) -> dict[int, Path]:
        """The drafters of an arm: 0 is its own, the others it kept on the way, by their steps."""
        folder = self.drafter(name, seed)
        places = sorted((folder / "kept").glob(f"{KEPT}*"))
        kept = {int(place.name.removeprefix(KEPT)): place for place in places}
        kept.pop(self.study.arms[name].recipe.distill.steps, None)  # its own once more
        return {0: folder / "model", **kept}

    def _counts_file(self, name: str, seed: int, kept: int) -> Path:
        behind = f"-{KEPT}{kept:06d}" if kept else ""
        return self.out / "counts" / name / f"seed-{seed}{behind}.json"

    def counts(self) -> dict[tuple[str, int], list[Any]]:
        """(arm, step of one kept on the way or 0) -> what was counted with each seed."""
        found: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for name in self.study.arms:
            for seed in self.study.options.seeds:
                for kept in self._models(name, seed):
                    found[name, kept].append(read_json(self._counts_file(name, seed, kept)))
        return found

    def _texts(self) -> list[Texts]:
        return read_texts(self.out / "held-out", list(self.study.tasks), self.study.options.samplings)

    def _count(self, seed: int) -> None:
        wanted: dict[Path, Path] = {}
        for name in self.study.arms:
            for kept, model in self._models(name, seed).items():
                file = self._counts_file(name, seed, kept)
                self._settle_counts(file, self._arm(name, seed))
                wanted[file] = model
        count_drafters(self.target, wanted, self._texts(), self.study.recipe.evaluate)

    def _settle_counts(self, file: Path, drafter: Path) -> None:
        """Counts of a drafter or of texts that were made again since are counted again."""
        reads = sources.stages(self.out, "held-out", drafter.relative_to(self.out).as_posix())
        self._settle(file, reads | self._model(self.target), file.with_suffix(".inputs.json"))

    def everything(self) -> None:
        """All runs of all seeds, and their counts; a line says which one is under way and how long the rest takes."""
        self.readable()
        self.prepared()
        arms = list(self.study.arms)
        runs = [(seed, name) for seed in self.study.options.seeds for name in arms]
        for place, (seed, name) in enumerate(runs):
            done = self.is_done(name, seed)
            left = sum(not self.is_done(other, at) for at, other in runs[place:])
            rest = ""
            if self.trained and left:
                mean = sum(self.trained.values()) / len(self.trained)
                rest = f" (about {duration(left * mean)} left)"
            step(f"{'✓' if done else '▸'} run {place + 1} of {len(runs)}: {name}, seed {seed}{rest}")
            self.drafter(name, seed)
            if name == arms[-1]:
                self._count(seed)

    def is_done(self, name: str, seed: int) -> bool:
        return (self._arm(name, seed) / STAGE_FILE).exists()

    def checked(self, name: str, draft_length: int) -> list[list[dict[str, Any]]]:
        """Real speculative decoding with an arm on the tasks in domain: for each seed, counts of every text."""
        tasks = [task for task, options in self.study.tasks.items() if options.domain == "in"]
        texts = [text for text in self._texts() if text.task in tasks]
        found = []
        for seed in self.study.options.seeds:
            file = self.out / "check" / f"{name}-g{draft_length}-seed-{seed}.json"
            folder = self.drafter(name, seed)
            self._settle_counts(file, folder)
            if not file.exists():
                step(f"▸ check by real speculative decoding: {name}, seed {seed}")
                options = self.study.recipe.evaluate
                write_json(
                    file, run_for_real(self.target, folder / "model", texts, options, draft_length, seed)
                )
            found.append(read_json(file))
        return found

    # what is said of it -----------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Models, data and time: what the report says beside the counts."""
        study, out = self.study, self.out
        found = read_json(out / "target" / STAGE_FILE)["counts"]
        seconds: dict[str, float] = defaultdict(float)
        for marker in sorted(out.rglob(STAGE_FILE)):
            seconds[marker.relative_to(out).parts[0]] += read_json(marker)["seconds"]
        first = next(iter(study.options.seeds))
        arms = {}
        for name, arm in study.arms.items():
            folder = self.drafter(name, first)
            # its text may have asked for fewer tokens
            shape = ModelShape.from_config(read_json(folder / "model" / "config.json"))
            counts = read_json(folder / STAGE_FILE)["counts"]
            arms[name] = {
                "groups": list(arm.options.groups),
                "shows": arm.options.shows,
                "changes": arm.changes,
                "parameters": shape.parameters,
                "cost_ratio": cost_ratios(self._target_shape(), shape)["parameters"],
                "trained_tokens": counts.get("tokens", 0) if arm.recipe.distill.steps else 0,
                "distill": asdict(arm.recipe.distill),
            }
        return {
            "study": study.name,
            "machine": machine(),
            "versions": read_json(out / "responses" / STAGE_FILE)["versions"],
            "seconds": {part: round(value, 1) for part, value in seconds.items()},
            "target": {
                **{name: found[name] for name in ("name", "source")},  # not where it lies on this machine
                "parameters": self._target_shape().parameters,
            },
            "responses": read_json(out / "responses" / STAGE_FILE)["counts"],
            "held_out": read_json(out / "held-out" / STAGE_FILE)["counts"],
            "tasks": {name: {**asdict(task), "domain": task.domain} for name, task in study.tasks.items()},
            "groups": dict(study.groups),
            "recipe": to_mapping(study.recipe),
            "arms": arms,
        }
