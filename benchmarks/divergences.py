"""Which divergence aligns a drafter best: the same pretrained drafter distilled with each, on the responses of a finished build.

    python benchmarks/divergences.py BUILD [--steps 300] [--out FOLDER]

BUILD is a folder of `edgespec build-drafter`. One seed, equal steps and data for every variant; intervals are over held-out
prompts. It resumes: a variant that is there is not trained again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec_recipes.distill import distill
from edgespec_recipes.evaluation import evaluate
from edgespec_recipes.evaluation_report import evaluation_table

from edgespec.files import read_json
from edgespec.recipe import load_recipe, resolve
from edgespec.stages import run_stage

VARIANTS: dict[str, dict[str, Any]] = {
    "fkl": {"divergence": "fkl"},
    "tvd": {"divergence": "tvd"},
    "tvd++ exact batch": {"tvdpp_estimator": "exact", "tvdpp_scope": "batch"},
    "tvd++ exact position": {"tvdpp_estimator": "exact", "tvdpp_scope": "position"},
    "tvd++ sampled batch": {"tvdpp_estimator": "sampled", "tvdpp_scope": "batch"},
    "tvd++ uniform position": {"tvdpp_estimator": "uniform", "tvdpp_scope": "position"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("build") / "divergences")
    given = parser.parse_args()
    build: Path = given.build
    recipe = resolve(load_recipe(build / "recipe.resolved.yaml"), {})
    target = Path(read_json(build / "target" / "stage.json")["counts"]["folder"])
    ratio = read_json(build / "plan" / "drafter.json")["cost_ratios"]["parameters"]
    pretrained = build / "pretrain" / "model"
    drafters = {"pretrained": pretrained}
    for name, changes in VARIANTS.items():
        options = replace(recipe.distill, steps=given.steps, **{"divergence": "tvd++", **changes})
        folder = given.out / name.replace(" ", "-")
        print(name, flush=True)

        def train(place: Path, options: Any = options) -> dict[str, Any]:
            responses, text = build / "generate", build / "pretrain" / "text"
            return distill(
                place, target, pretrained, responses, recipe.pretrain.text, text, options, recipe.seed
            )

        run_stage(folder, {"steps": given.steps, **changes}, train)
        drafters[name] = folder / "model"
    evaluation = given.out / "evaluate"
    evaluate(evaluation, target, drafters, recipe.evaluate, recipe.seed, ratio)
    print(evaluation_table(evaluation / "evaluation.json", markdown=True))


if __name__ == "__main__":
    main()
