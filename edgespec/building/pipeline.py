"""The way from a target to a bundle: the stages of a build in their order, each in a folder of its own.

Knows what every stage needs of the ones before it; how a stage does its work is the rooms' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.building.pair import check_first_weights, find_target, gguf_target
from edgespec.building.pipeline_export import ExportStages, Source
from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.output import step
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.check import shape_in
from edgespec.model_folder.head import check_layers, check_target, shape_of_drafter
from edgespec.model_folder.weights_files import SINGLE
from edgespec.planning.drafter_shape import drafter_shape
from edgespec.recipe.check import context_problems
from edgespec.recipe.drafter import cost_ratios, describe
from edgespec.recipe.read import own_instructions, own_prompts, reference_options
from edgespec.recipe.schema import ROUNDED, SELF, SELF_INSTRUCTIONS, SELF_PROMPTS, SELF_TEXT, Recipe
from edgespec.recipe.targets import FoundTarget, gguf_of, gone
from edgespec.stages import sources
from edgespec.stages.own_gguf import own_file
from edgespec.stages.record import Reads
from edgespec.stages.sources import data_of
from edgespec.stages.stage import STAGE_FILE, Body

Train = Callable[[Path, Any, Path | None], dict[str, Any]]
"""Distils into a folder, as DistillOptions say, with AdaSPEC's reference where tokens are selected."""


def _with_own(names: Iterable[str], file: str) -> tuple[str, ...]:
    """Names of sources; for `self` the file that the target wrote."""
    return tuple(file if name == SELF else name for name in names)


def cost_ratio(target: Path, drafter: Path) -> float:
    """c by parameters, the paper's, of two folders; the drafter's text may have asked for fewer tokens than were planned."""
    return cost_ratios(shape_in(target / "config.json"), shape_of_drafter(drafter))["parameters"]


@dataclass
class Build(ExportStages):
    """One run of the way from target to bundle; `run` is the order of the stages."""

    def run(self) -> Path:
        """All stages; returns the bundle's folder."""
        self._check_data(data_of(self.recipe, self.out))
        found = self._find("target", self.recipe.target)
        shape = self._plan(found.folder)  # before tuning, which keeps the target's shape and tokenizer
        found = replace(found, folder=self._tune(found.folder))
        self._write_own_prompts(found.folder)
        evaluation = self.out / "evaluate" / "evaluation.json"
        self.source = Source(found, self.out / "distill" / "model", self.recipe, evaluation)
        self._train_and_export(found.folder, shape)
        return self._pack()

    def _train_and_export(self, target: Path, planned: ModelShape) -> None:
        """The drafter, trained, evaluated, exported and verified."""
        self._train(target, planned)
        self._evaluate_in_torch(target)
        self._export()

    def _find(self, stage: str, name: str) -> FoundTarget:
        """A model, found or made in a stage of its own (one process looks)."""

        def find(place: Path) -> dict[str, Any]:
            target = find_target(name)
            return {**asdict(target), "folder": str(target.folder)}

        file, reads = gguf_of(name), Reads()
        if file:
            reads = sources.one_file(stage, file)
        elif (folder := Path(name).expanduser()).is_dir():
            reads = self._model_reads(stage, folder)
        found = self.stage(stage, f"find or make {name}", {"target": name}, find, reads=reads)
        folder = Path(found["folder"])
        config, own = folder / "config.json", own_file(folder)
        there = config.is_file() and (folder / SINGLE).is_file()  # in the cache, which may be cleaned up
        if file and not (there and own is not None and own.path == file.resolve()):
            gguf_target(name)  # the cache was emptied, or another build has read a copy of the file
        if not config.is_file():
            raise gone(stage, found, name, self.out / stage)
        return FoundTarget(**{**found, "folder": folder})

    def _writer_reads(self, target: Path) -> Reads:
        """What stages read in which the target writes."""
        return self._model_reads("target", target) | sources.exported(self.recipe.inference)

    def _own_reads(self, stage: str, names: Iterable[str]) -> Reads:
        """The stage in which the target wrote, where a source is its own."""
        return sources.stages(self.out, *([stage] if SELF in names else []))

    def _check_source(self, target: Path) -> None:
        """Before pretraining takes hours: whether the target can write, and give distributions where they are stored."""
        if self.processes.rank or (self.out / "pretrain" / STAGE_FILE).exists():
            return
        from edgespec_recipes.generating.choose_writer import check_source

        distill = self.recipe.distill
        stored_later = distill.target_side == "stored"
        check_source(target, self.recipe.inference, distill.stored_top_k if stored_later else 0)

    def _tune(self, target: Path) -> Path:
        """The target's folder, after tuning where the recipe asks for it."""
        tune = self.recipe.tune
        if not tune.steps:
            return target

        from edgespec_recipes.training.tune import tune_target

        teacher = self._find("teacher", tune.teacher).folder if tune.teacher else None
        models = self._model_reads("target", target) | (
            self._model_reads("teacher", teacher) if teacher else Reads()
        )
        self.stage(
            "tune",
            f"the target learns from {tune.teacher or tune.conversations}",
            tune,
            lambda place: tune_target(place, target, teacher, tune, self.recipe.seed),
            reads=models | sources.conversations("tune.conversations", tune.conversations),
        )
        return self.out / "tune" / "model"

    def _plan(self, target: Path) -> ModelShape:
        options, target_shape = self.recipe.drafter, shape_in(target / "config.json")
        shape = drafter_shape(target_shape, options)
        print(describe(target_shape, shape), flush=True)
        self._drop_files_too_large(target_shape, shape, self.recipe.target, own_file(target))

        def plan(place: Path) -> dict[str, Any]:
            # what cannot be trained or exported is said now, and not after the target has written for hours
            self._check_pair(target, self._initial_drafter(target, shape))
            check_first_weights(target, shape, options)
            if problems := "; ".join(context_problems(self.recipe, target_shape)):
                raise InputError(problems)
            found = {
                "target": asdict(target_shape),
                "drafter": asdict(shape),
                "cost_ratios": cost_ratios(target_shape, shape),
            }
            write_json(place / "drafter.json", found)
            return found

        reads = self._model_reads("target", target) | self._checkpoint_reads()
        self.stage("plan", "the drafter's shape", options, plan, reads=reads)
        return shape

    def _checkpoint_reads(self) -> Reads:
        """The model that training starts from, where it is one of the user's."""
        checkpoint = self.recipe.drafter.checkpoint
        return self._model_reads("drafter.checkpoint", Path(checkpoint)) if checkpoint else Reads()

    def _initial_drafter(self, target: Path, shape: ModelShape) -> ModelShape | Path | None:
        """The checkpoint the drafter starts from, held against the target's tokens, or the planned shape; None for a head.

        A head has the target's widths.
        """
        options, checkpoint = self.recipe.drafter, Path(self.recipe.drafter.checkpoint)
        if options.kind == "head":
            check_layers(shape_in(target / "config.json"), options.features)
            if options.init == "checkpoint":
                check_target(checkpoint, target)
            return None
        if options.init != "checkpoint":
            return shape
        from edgespec_recipes.models.loading import check_same_vocabulary

        check_same_vocabulary(target, checkpoint, "the target and drafter.checkpoint")
        return checkpoint

    def _train(self, target: Path, shape: ModelShape) -> None:
        """Pretrain, have the target write, distil."""
        from edgespec_recipes.generating import target_store
        from edgespec_recipes.training.distill import DistillInputs, distill, store_responses
        from edgespec_recipes.training.pretrain import pretrain

        out, seed = self.out, self.recipe.seed
        writer = self._writer_reads(target)
        self._check_source(target)
        # stages run with these files, and record the recipe as it was given
        filled = self._write_own_data(target)
        self.stage(
            "pretrain",
            f"next-token training on plain text, first weights: {filled.drafter.init}",
            self.recipe.pretrain,
            lambda place: pretrain(place, target, shape, filled.drafter, filled.pretrain, seed),
            reads=self._model_reads(
                "target", target, weights=filled.drafter.init in ("subclone", "components")
            )
            | self._checkpoint_reads()
            | sources.text("pretrain.text", self.recipe.pretrain.text)
            | self._own_reads(SELF_TEXT, self.recipe.pretrain.text),
        )
        self._write_responses(target, filled)
        teacher, rounding = self._round_target(target)
        inputs = DistillInputs(
            target=teacher,
            drafter=out / "pretrain" / "model",
            responses=out / "generate",
            text=filled.pretrain.text,
            text_cache=out / "pretrain" / "text",
            store=out / "store" if filled.distill.target_side == "stored" else None,
            inference=filled.inference,
        )
        if inputs.store:
            self.stage(
                "store",
                f"the target's {filled.distill.stored_top_k} most probable tokens at every position",
                {"stored_top_k": filled.distill.stored_top_k, "context": filled.distill.context},
                lambda place: store_responses(place, inputs, filled.distill),
                reads=writer | sources.stages(out, "generate", *rounding),
                damaged=target_store.damaged_shards,
            )
        fixed = filled.distill.fixed if filled.distill.fixed_fraction else ""
        made = ("pretrain", "generate", *rounding, *(["store"] if inputs.store else []))
        self._teach(
            filled,
            ("drafter", "white-box distillation"),
            lambda place, options, reference: distill(
                place, replace(inputs, reference=reference), options, seed
            ),
            writer | sources.stages(out, *made) | sources.conversations("distill.fixed", fixed),
        )

    def _teach(self, recipe: Recipe, words: tuple[str, str], train: Train, reads: Reads) -> None:
        """Distil the drafter; where tokens are selected, AdaSPEC's reference comes first. `words`: what learns, and how."""
        options, reference = recipe.distill, None
        if options.select_fraction < 1:
            plain = reference_options(recipe)
            self.stage(
                "reference",
                f"AdaSPEC's reference: the {words[0]} distilled with forward KL",
                plain,
                lambda place: train(place, plain, None),
                reads=reads,
            )
            reads |= sources.stages(self.out, "reference")
            reference = self.out / "reference" / "model"
        self.stage(
            "distill",
            f"{words[1]}, {options.losses}",
            options,
            lambda place: train(place, options, reference),
            reads=reads,
        )

    def _round_target(self, target: Path) -> tuple[Path, list[str]]:
        """The model that the drafter is distilled against, and the stage that made it, where one did."""
        precision = self.recipe.distill.against
        if not precision:
            return target, []
        from edgespec_export.verify.rounded import write_rounded

        self.stage(
            ROUNDED,
            f"the target as its {precision} file rounds it",
            {"precision": precision},
            lambda place: write_rounded(target, place / "model", precision),
            reads=self._model_reads("target", target),
        )
        return self.out / ROUNDED / "model", [ROUNDED]

    def _write_own_prompts(self, target: Path) -> None:
        """Held-out prompts that the target writes, with a seed of their own; from here on the recipe names their file."""
        recipe = self.recipe
        if recipe.evaluate.prompts_file != SELF:
            return
        file = self._write_instructions(
            SELF_PROMPTS, target, own_prompts(recipe), "held-out prompts", SELF_PROMPTS
        )
        self.recipe = replace(recipe, evaluate=replace(recipe.evaluate, prompts_file=file))

    def _write_instructions(
        self, stage: str, target: Path, count: int, what: str = "instructions", purpose: str = "instructions"
    ) -> str:
        """The file of instructions that the target writes in a stage of its own; `what` they are, in words."""
        from edgespec_recipes.generating.self_written import INSTRUCTIONS, write_instructions

        options, seed, inference = self.recipe.generate, self.recipe.seed, self.recipe.inference
        openings = {"openings": list(options.self_openings)} if options.self_openings else {}
        held_out = self.out / SELF_PROMPTS / INSTRUCTIONS
        left_out = held_out if self.recipe.evaluate.prompts_file == str(held_out) else None
        self.stage(
            stage,
            f"the target writes {count:,} {what}",
            {"instructions": count, **openings},
            lambda place: write_instructions(
                place, target, count, options, seed, inference, purpose, left_out
            ),
            reads=self._writer_reads(target),
        )
        return str(self.out / stage / INSTRUCTIONS)

    def _write_responses(self, target: Path, filled: Recipe) -> None:
        """The target's responses. `filled`: the recipe with the files that the target wrote for it."""
        from edgespec_recipes.generating import datagen, response_shards

        kept = filled.distill.stored_top_k if filled.distill.target_side == "stored" else 0
        counts = self.stage(
            "generate",
            "the target writes responses",
            self.recipe.generate,
            lambda place: datagen.generate(
                place, target, filled.generate, filled.seed, filled.inference, kept
            ),
            reads=self._writer_reads(target)
            | sources.conversations("generate.instructions", self.recipe.generate.instructions)
            | self._own_reads(SELF_INSTRUCTIONS, self.recipe.generate.instructions),
            damaged=response_shards.damaged_shards,
        )
        if 2 * counts["ended"] < counts["responses"]:
            step(
                f"Note: {counts['ended']:,} of {counts['responses']:,} responses ended within {filled.generate.max_new_tokens} "
                "tokens; the drafter does not see how the others end, nor the answer of a target that thinks first: a build with "
                "a larger --generate.max-new-tokens does"
            )

    def _write_own_data(self, target: Path) -> Recipe:
        """The recipe with the files of what the target writes itself."""
        from edgespec_recipes.generating.self_written import TEXT, write_text

        recipe, pretrain, generate = self.recipe, self.recipe.pretrain, self.recipe.generate
        if SELF in pretrain.text and recipe.drafter.kind == "model":
            wanted = pretrain.self_tokens
            self.stage(
                SELF_TEXT,
                f"the target writes {wanted:,} tokens of running text",
                {"tokens": wanted},
                lambda place: write_text(place, target, wanted, generate, recipe.seed, recipe.inference),
                reads=self._writer_reads(target),
            )
            pretrain = replace(pretrain, text=_with_own(pretrain.text, str(self.out / SELF_TEXT / TEXT)))
        if SELF in generate.instructions:
            file = self._write_instructions(SELF_INSTRUCTIONS, target, own_instructions(generate))
            generate = replace(generate, instructions=_with_own(generate.instructions, file))
        return replace(recipe, pretrain=pretrain, generate=generate)

    def _evaluate_in_torch(self, target: Path) -> None:
        from edgespec_recipes.evaluation.evaluation import evaluate

        recipe, drafter = self.recipe, self.source.drafter
        c = cost_ratio(target, drafter)
        models = {"pretrained": self.out / "pretrain" / "model", "distilled": drafter}
        self._evaluate(
            "in torch",
            lambda place: evaluate(place, target, models, recipe.evaluate, recipe.seed, c, recipe.inference),
            self._model_reads("target", target) | sources.stages(self.out, "pretrain", "distill"),
        )

    def _evaluate(self, where: str, body: Body, reads: Reads) -> None:
        """The stage that measures the drafter, and the table of what came out."""
        from edgespec_recipes.evaluation.report import evaluation_table

        what = f"acceptance and block efficiency {where}, held-out prompts"
        self.stage("evaluate", what, self.recipe.evaluate, body, reads=reads | self._prompt_reads())
        print(evaluation_table(self.out / "evaluate" / "evaluation.json"), flush=True)
