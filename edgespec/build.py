"""Make a drafter for a target: plan, pretrain, let the target write, distil, evaluate, export, verify, bundle.

Every stage owns a folder under --out. Interrupt it at any point and run the same command: what is complete is skipped, what was
under way goes on.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from edgespec.drafter import DrafterShape, cost_ratios, derive, describe
from edgespec.errors import InputError, MissingExtra, did_you_mean
from edgespec.files import read_json, write_json, write_text
from edgespec.options import as_flags, knob, to_mapping
from edgespec.recipe import Recipe, load_recipe, resolve
from edgespec.report import duration, table
from edgespec.shapes import ModelShape
from edgespec.stages import run_stage

RECIPE_FILE = "recipe.resolved.yaml"


@dataclass(frozen=True)
class Options(Recipe):
    out: str = knob("", "folder for everything that is made (default: build/TARGET)")
    recipe: str = knob(
        "", "a YAML file, or the name of a shipped recipe (default: the target's own, if there is one)"
    )


OPTIONS = Options


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    spec = find_spec("edgespec_recipes")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml")) if not path.stem.startswith("target-")}


def _recipe_file(name: str, target: str) -> Path | None:
    shipped = shipped_recipes()
    if not name:
        return shipped.get(target)
    if name in shipped:
        return shipped[name]
    if Path(name).is_file():
        return Path(name)
    raise InputError(f"recipe {name!r} is neither a file nor a shipped recipe{did_you_mean(name, shipped)}")


def _read_options(given: dict[str, Any]) -> tuple[Recipe, Path]:
    flags = dict(given)
    out, name = flags.pop("out", ""), flags.pop("recipe", "")
    file = _recipe_file(name, flags["target"])
    recipe = resolve(load_recipe(file) if file else {}, flags)
    return recipe, Path(out) if out else Path("build") / Path(recipe.target).name


def _check_packages(recipe: Recipe) -> None:
    """Everything the last stage needs is asked for before the first one starts. Raises MissingExtra."""
    wanted = ["torch", "transformers", "accelerate"]
    wanted += ["onnx", "onnxruntime_genai"] if recipe.export.onnx else []
    wanted += ["gguf"] if recipe.export.gguf else []
    for package in wanted:
        if find_spec(package) is None:
            raise MissingExtra(package, "all", "Building a drafter")


def _claim(out: Path, recipe: Recipe) -> None:
    """Make `out` this recipe's folder, or refuse it where it is another's."""
    wanted = to_mapping(recipe)
    file = out / RECIPE_FILE
    if file.exists():
        seen = yaml.safe_load(file.read_text(encoding="utf-8"))
        if seen != wanted:
            raise InputError(
                f"{out} holds a build of another recipe ({_difference(seen, wanted)}); give another --out, or remove that folder"
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise InputError(
            f"{out} holds other files and no {RECIPE_FILE}; give an empty or new folder with --out"
        )
    write_text(file, yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True))


def _difference(seen: Any, wanted: Any, where: str = "") -> str:
    if isinstance(seen, dict) and isinstance(wanted, dict):
        for key in [*wanted, *seen]:
            if seen.get(key) != wanted.get(key):
                return _difference(seen.get(key), wanted.get(key), f"{where}.{key}" if where else str(key))
    return f"{where} is {seen!r} there and {wanted!r} here"


def _without_counts(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The derived figures of evaluation.json; the raw counts travel in that file."""
    settings = [
        {key: value for key, value in setting.items() if key not in ("counts", "teacher_forced")}
        for setting in evaluation["settings"]
    ]
    return {"prompts": evaluation["prompts"], "settings": settings, "comparisons": evaluation["comparisons"]}


class Build:
    """One run of the way from target to bundle; `run` is the order of the stages."""

    def __init__(self, recipe: Recipe, out: Path) -> None:
        self.recipe = recipe
        self.out = out
        self.times: list[tuple[str, float]] = []

    def stage(
        self, name: str, what: str, options: Any, body: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        folder = self.out / name
        done = (folder / "stage.json").exists()
        print(f"{'✓' if done else '▸'} {name}: {what}{' (done before)' if done else ''}", flush=True)
        counts = run_stage(folder, options if isinstance(options, dict) else to_mapping(options), body)
        self.times.append((name, float(read_json(folder / "stage.json")["seconds"])))
        return counts

    def run(self) -> Path:
        recipe, out, seed = self.recipe, self.out, self.recipe.seed
        target = self.stage(
            "target", f"find or make {recipe.target}", {"target": recipe.target}, self._target
        )
        folder = Path(target["folder"])
        if not (folder / "config.json").is_file():
            raise InputError(
                f"the target's folder {folder} is gone; remove {out / 'target'} and run the same command again"
            )
        target_shape = ModelShape.from_config(read_json(folder / "config.json"))
        shape = derive(target_shape, recipe.drafter)
        print(describe(target_shape, shape), flush=True)
        self.stage(
            "plan",
            "the drafter's shape",
            recipe.drafter,
            lambda place: self._plan(place, target_shape, shape),
        )

        from edgespec_recipes.datagen import generate
        from edgespec_recipes.distill import distill
        from edgespec_recipes.evaluation import evaluate
        from edgespec_recipes.evaluation_report import evaluation_table
        from edgespec_recipes.pretrain import pretrain

        self.stage(
            "pretrain",
            "next-token training on plain text",
            recipe.pretrain,
            lambda place: pretrain(place, folder, shape, recipe.pretrain, seed),
        )
        pretrained = out / "pretrain" / "model"
        self.stage(
            "generate",
            "the target writes responses",
            recipe.generate,
            lambda place: generate(place, folder, recipe.generate, seed),
        )
        self.stage(
            "distill",
            f"white-box distillation, {recipe.distill.divergence}",
            recipe.distill,
            lambda place: distill(
                place,
                folder,
                pretrained,
                out / "generate",
                recipe.pretrain.text,
                out / "pretrain" / "text",
                recipe.distill,
                seed,
            ),
        )
        drafter = out / "distill" / "model"
        ratio = cost_ratios(target_shape, shape)["parameters"]
        self.stage(
            "evaluate",
            "acceptance and block efficiency in torch, held-out prompts",
            recipe.evaluate,
            lambda place: evaluate(
                place, folder, {"pretrained": pretrained, "distilled": drafter}, recipe.evaluate, seed, ratio
            ),
        )
        print(evaluation_table(out / "evaluate" / "evaluation.json"), flush=True)

        from edgespec_export.bundle import write_bundle
        from edgespec_export.export import export_pair
        from edgespec_export.verify import verification_table, verify_pair

        self.stage(
            "export",
            "ONNX and GGUF",
            recipe.export,
            lambda place: export_pair(place, folder, drafter, recipe.export),
        )
        self.stage(
            "verify",
            "every file against torch",
            recipe.export,
            lambda place: verify_pair(
                place, out / "export", folder, drafter, self._verify_prompts(folder), recipe.export
            ),
        )
        print(verification_table(out / "verify" / "verify.json"), flush=True)

        def pack(place: Path) -> dict[str, Any]:
            evaluation = read_json(out / "evaluate" / "evaluation.json")
            return write_bundle(
                out / "bundle",
                out / "export",
                folder,
                drafter,
                recipe.export,
                target_name=target["name"],
                target_source=target["source"],
                prompts=self._held_out(recipe.export.bundle_prompts),
                evaluation=evaluation,
                verification=read_json(out / "verify" / "verify.json"),
                metrics=_without_counts(evaluation),
                provenance={
                    "recipe": to_mapping(recipe),
                    "command": (out / "command.txt").read_text(encoding="utf-8").strip(),
                    "seed": seed,
                    "seconds": dict(self.times),
                },
            )

        self.stage("pack", "manifest, checksums, model card", {}, pack)
        print(table(("stage", "time"), [(name, duration(seconds)) for name, seconds in self.times]))
        print(
            f"total {duration(sum(seconds for _, seconds in self.times))}; bundle: {out / 'bundle'}",
            flush=True,
        )
        return out / "bundle"

    def _held_out(self, limit: int) -> list[list[dict[str, str]]]:
        from edgespec_recipes.prompts import read_prompts

        return read_prompts(self.recipe.evaluate.prompts_file, "heldout")[:limit]

    def _verify_prompts(self, target_folder: Path) -> list[list[int]]:
        from edgespec_runtime.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer(target_folder)
        return [
            tokenizer.encode_chat(messages) for messages in self._held_out(self.recipe.export.verify_prompts)
        ]

    def _target(self, place: Path) -> dict[str, Any]:
        from edgespec_recipes.resolve import resolve_target

        target = resolve_target(self.recipe.target)
        return {"name": target.name, "folder": str(target.folder), "source": target.source}

    def _plan(self, place: Path, target: ModelShape, drafter: DrafterShape) -> dict[str, Any]:
        plan = {
            "target": asdict(target),
            "drafter": asdict(drafter),
            "cost_ratios": cost_ratios(target, drafter),
        }
        write_json(place / "drafter.json", plan)
        return plan


def run(given: dict[str, Any]) -> int:
    recipe, out = _read_options(given)
    _check_packages(recipe)
    fresh = not out.exists()
    _claim(out, recipe)
    try:
        write_text(out / "command.txt", shlex.join(["edgespec", "build-drafter", *as_flags(given)]) + "\n")
        Build(recipe, out).run()
    except Exception:
        if (
            fresh and not (out / "target" / "stage.json").exists()
        ):  # a target that cannot be had leaves nothing behind
            shutil.rmtree(out, ignore_errors=True)
        raise
    return 0
