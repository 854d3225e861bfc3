"""The way from a target to a bundle: the stages of a build in their order, each in a folder of its own.

Knows what every stage needs of the ones before it; how a stage does its work is the rooms' business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgespec.devices import device_of
from edgespec.devices_fit import check_fit, fit
from edgespec.drafter import DrafterShape, cost_ratios, derive, describe
from edgespec.errors import InputError
from edgespec.files import read_json, write_json, write_text
from edgespec.options import to_mapping
from edgespec.recipe import Recipe, reference_options
from edgespec.recipe_check import context_problems
from edgespec.report import duration, table
from edgespec.shapes import ModelShape
from edgespec.stages import Body, Crew, run_stage

Damaged = Callable[[Path], list[str]]

RECIPE_FILE = "recipe.resolved.yaml"


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every knob with the value it had."""
    return yaml.safe_dump(to_mapping(recipe), sort_keys=False, allow_unicode=True)


def _without_counts(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The derived figures of evaluation.json; the raw counts travel in that file. Nothing where nothing was measured."""
    if not evaluation:
        return {}
    settings = [
        {key: value for key, value in setting.items() if key not in ("counts", "teacher_forced")}
        for setting in evaluation["settings"]
    ]
    return {"prompts": evaluation["prompts"], "settings": settings, "comparisons": evaluation["comparisons"]}


@dataclass
class Build:
    """One run of the way from target to bundle; `run` is the order of the stages."""

    recipe: Recipe
    out: Path
    crew: Crew = field(default_factory=Crew)
    times: list[tuple[str, float]] = field(default_factory=list)

    def stage(
        self,
        name: str,
        what: str,
        options: Any,
        body: Body,
        *,
        together: bool = False,
        damaged: Damaged | None = None,
    ) -> dict[str, Any]:
        """Run one stage unless it is done; one with `damaged` files that are still to be read is opened again for them."""
        folder = self.out / name
        still_read = not self.crew.rank and not (self.out / "distill" / "stage.json").exists()
        files = damaged(folder) if damaged and still_read else []
        if files:
            print(f"! {name}: damaged: {', '.join(files)}; only that is made again", flush=True)
            (folder / "stage.json").unlink(missing_ok=True)
        done = (folder / "stage.json").exists()
        print(f"{'✓' if done else '▸'} {name}: {what}{' (done before)' if done else ''}", flush=True)
        mapping = options if isinstance(options, dict) else to_mapping(options)
        counts = run_stage(folder, mapping, body, self.crew, together=together)
        if not self.crew.rank and not (folder / RECIPE_FILE).exists():
            write_text(folder / RECIPE_FILE, dump_recipe(self.recipe))
        self.times.append((name, float(read_json(folder / "stage.json")["seconds"])))
        return counts

    def run(self) -> Path:
        """All stages; returns the bundle's folder."""
        found = self._find("target", self.recipe.target)
        folder = Path(found["folder"])
        folder = self._tuned(folder)
        target, shape = self._planned(folder)
        pretrained, drafter = self._trained(folder, shape)
        self._evaluated(folder, pretrained, drafter, cost_ratios(target, shape)["parameters"])
        self._exported(folder, drafter)
        self._packed(folder, drafter, found)
        print(table(("stage", "time"), [(name, duration(seconds)) for name, seconds in self.times]))
        total = duration(sum(seconds for _, seconds in self.times))
        print(f"total {total}; bundle: {self.out / 'bundle'}", flush=True)
        return self.out / "bundle"

    def _find(self, stage: str, name: str) -> dict[str, Any]:
        """Name, folder and source of a model, found or made in a stage of its own (one process looks)."""

        def find(place: Path) -> dict[str, Any]:
            from edgespec_recipes.resolve import resolve_target

            target = resolve_target(name)
            return {
                "name": target.name,
                "folder": str(target.folder),
                "source": target.source,
                "licence": target.licence,
            }

        found = self.stage(stage, f"find or make {name}", {"target": name}, find)
        if not (Path(found["folder"]) / "config.json").is_file():
            raise InputError(
                f"the {stage}'s folder {found['folder']} is gone; remove {self.out / stage} and run the same command again"
            )
        return found

    def _tuned(self, target: Path) -> Path:
        """The target's folder, after tuning where the recipe asks for it."""
        tune = self.recipe.tune
        if not tune.steps:
            return target

        from edgespec_recipes.tune import tune_target

        teacher = Path(self._find("teacher", tune.teacher)["folder"]) if tune.teacher else None
        self.stage(
            "tune",
            f"the target learns from {tune.teacher or tune.conversations}",
            tune,
            lambda place: tune_target(place, target, teacher, tune, self.recipe.seed),
            together=True,
        )
        return self.out / "tune" / "model"

    def _planned(self, target: Path) -> tuple[ModelShape, DrafterShape]:
        options = self.recipe.drafter
        target_shape = ModelShape.from_config(read_json(target / "config.json"))
        if options.init == "checkpoint":
            from edgespec_recipes.initialise import checkpoint_shape

            shape = checkpoint_shape(Path(options.checkpoint), options.vocabulary)
        else:
            shape = derive(target_shape, options)
        print(describe(target_shape, shape), flush=True)
        self._fitted(target_shape, shape, self.recipe.target)

        def plan(place: Path) -> dict[str, Any]:
            from edgespec_export.possible import check_possible
            from edgespec_recipes.prompts import read_prompts

            # what cannot be read or exported is said now, and not after hours of pretraining
            for note in check_possible(target, shape, self.recipe.export):
                print(f"Note: {note}", flush=True)
            read_prompts(self.recipe.generate.instructions, "seed")
            read_prompts(self.recipe.evaluate.prompts_file, "heldout")
            if problems := context_problems(self.recipe, target_shape):
                raise InputError("; ".join(problems))
            found = {
                "target": asdict(target_shape),
                "drafter": asdict(shape),
                "cost_ratios": cost_ratios(target_shape, shape),
            }
            write_json(place / "drafter.json", found)
            return found

        self.stage("plan", "the drafter's shape", options, plan)
        return target_shape, shape

    def _fitted(self, target: ModelShape, drafter: ModelShape, name: str) -> None:
        """Where the files are for a device: show the memory they take there. Raises InputError where it is too much."""
        device = device_of(self.recipe)
        if device is None:
            return
        found = fit(device, target, drafter)
        print(f"\n{found.table()}", flush=True)
        check_fit(found, name)

    def _trained(self, target: Path, shape: DrafterShape) -> tuple[Path, Path]:
        """(pretrained drafter, distilled drafter)."""
        from edgespec_recipes import datagen, stored
        from edgespec_recipes.datagen import generate
        from edgespec_recipes.distill import DistillInputs, distill, store_responses
        from edgespec_recipes.pretrain import pretrain

        recipe, out, seed = self.recipe, self.out, self.recipe.seed
        self.stage(
            "pretrain",
            f"next-token training on plain text, first weights: {recipe.drafter.init}",
            recipe.pretrain,
            lambda place: pretrain(place, target, shape, recipe.drafter, recipe.pretrain, seed),
            together=True,
        )
        self.stage(
            "generate",
            "the target writes responses",
            recipe.generate,
            lambda place: generate(place, target, recipe.generate, seed, recipe.inference),
            together=True,
            damaged=datagen.damaged_shards,
        )
        inputs = DistillInputs(
            target=target,
            drafter=out / "pretrain" / "model",
            responses=out / "generate",
            text=recipe.pretrain.text,
            text_cache=out / "pretrain" / "text",
            store=out / "store" if recipe.distill.target_side == "stored" else None,
            reference=out / "reference" / "model" if recipe.distill.select_fraction < 1 else None,
            inference=recipe.inference,
        )
        if inputs.store:
            self.stage(
                "store",
                f"the target's {recipe.distill.stored_top_k} most probable tokens at every position",
                {"stored_top_k": recipe.distill.stored_top_k, "context": recipe.distill.context},
                lambda place: store_responses(place, inputs, recipe.distill),
                together=True,
                damaged=stored.damaged_shards,
            )
        if inputs.reference:
            options = reference_options(recipe)
            self.stage(
                "reference",
                "AdaSPEC's reference: the drafter distilled with forward KL",
                options,
                lambda place: distill(place, inputs, options, seed),
                together=True,
            )
        self.stage(
            "distill",
            f"white-box distillation, {recipe.distill.divergence}",
            recipe.distill,
            lambda place: distill(place, inputs, recipe.distill, seed),
            together=True,
        )
        return inputs.drafter, out / "distill" / "model"

    def _evaluated(self, target: Path, pretrained: Path, drafter: Path, cost_ratio: float) -> None:
        from edgespec_recipes.evaluation import evaluate
        from edgespec_recipes.evaluation_report import evaluation_table

        options = self.recipe.evaluate
        self.stage(
            "evaluate",
            "acceptance and block efficiency in torch, held-out prompts",
            options,
            lambda place: evaluate(
                place,
                target,
                {"pretrained": pretrained, "distilled": drafter},
                options,
                self.recipe.seed,
                cost_ratio,
                self.recipe.inference,
            ),
        )
        print(evaluation_table(self.out / "evaluate" / "evaluation.json"), flush=True)

    def _exported(self, target: Path, drafter: Path) -> None:
        from edgespec_export.export import export_pair
        from edgespec_export.verify import verify_pair
        from edgespec_export.verify_report import verification_table

        options, out = self.recipe.export, self.out
        self.stage(
            "export",
            "the files of each format",
            options,
            lambda place: export_pair(
                place, target, drafter, options, lambda: self._calibration_rows(target)
            ),
        )
        self.stage(
            "verify",
            "every file against torch",
            options,
            lambda place: verify_pair(
                place,
                out / "export",
                target,
                drafter,
                self._verify_prompts(target, options.verify_prompts),
                options,
                trials=self._trials(target, options.acceptance_prompts),
            ),
        )
        print(verification_table(out / "verify" / "verify.json"), flush=True)

    def _packed(self, target: Path, drafter: Path, found: dict[str, Any]) -> None:
        from edgespec_export.bundle import write_bundle

        recipe, out = self.recipe, self.out
        device = device_of(recipe)

        def pack(place: Path) -> dict[str, Any]:
            evaluation = self._evaluation()
            return write_bundle(
                out / "bundle",
                out / "export",
                target,
                drafter,
                recipe.export,
                target_name=found["name"],
                target_source=found["source"],
                licence=found.get("licence", ""),  # builds of before have none
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
                },
            )

        self.stage("pack", "manifest, checksums, model card", {}, pack)

    def _evaluation(self) -> dict[str, Any]:
        """What was measured in torch, raw counts and all."""
        measured: dict[str, Any] = read_json(self.out / "evaluate" / "evaluation.json")
        return measured

    def _held_out(self, limit: int) -> list[list[dict[str, str]]]:
        from edgespec_recipes.prompts import read_prompts

        return read_prompts(self.recipe.evaluate.prompts_file, "heldout")[:limit]

    def _calibration_rows(self, target: Path) -> list[list[int]]:
        """Text for the ranges of integer activations: the target's own responses, else the held-out prompts."""
        from edgespec_export.qdq_rows import written_rows

        return written_rows(self._responses()) or self._verify_prompts(
            target, self.recipe.export.verify_prompts
        )

    def _responses(self) -> Path:
        """Where the target's responses lie, if it wrote some."""
        return self.out / "generate"

    def _trials(self, target: Path, count: int) -> Any:
        """What the exported pairs decode; None for nothing."""
        from edgespec_export.exported_pair import Trials
        from edgespec_runtime.tokenizer import ChatTokenizer

        if not count:
            return None
        stop = ChatTokenizer(target).stop_ids
        return Trials(self._verify_prompts(target, count), stop, seed=self.recipe.seed)

    def _verify_prompts(self, target: Path, count: int) -> list[list[int]]:
        from edgespec_runtime.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer(target)
        return [tokenizer.encode_chat(messages) for messages in self._held_out(count)]
