"""What the estimate takes for a head's training: of the target its embedding alone, and a pass for each own step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.models.feature_head import FeatureHead
from edgespec_recipes.stored.top_k import Store, record_type
from edgespec_recipes.training.distill_head import HeadObjective, UnrolledHead
from edgespec_runtime.engines.vocabulary import Vocabulary
from training_steps import Meter, all_compared

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.estimate import StageCost, estimate
from edgespec.planning.export_costs import opened_bytes
from edgespec.planning.hardware import Hardware
from edgespec.planning.plan_stages import stage_times
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import load_recipe, recipe_file

ROWS, CONTEXT, VOCABULARY = 8, 128, 4096
TARGET = ModelShape(256, 3, 4, 2, 64, 768, VOCABULARY, True, 512)


class Even(Store):
    """Each position has the same eight likely tokens."""

    vocab_size = VOCABULARY

    def records(self, row: int) -> np.ndarray:
        found = np.zeros(CONTEXT - 1, record_type(8, VOCABULARY))
        found["ids"], found["log_p"], found["log_rest"] = np.arange(8), -3, -1
        return found


def recipe_of(**distill: Any) -> Recipe:
    values = {"steps": 1, "batch_size": ROWS, "context": CONTEXT, "watch_steps": 0, **distill}
    return resolve(
        load_recipe(recipe_file("smollm2-head")), {"distill": values, "drafter": {"vocabulary": 1024}}
    )


def stages(recipe: Recipe, target: ModelShape = TARGET) -> dict[str, StageCost]:
    return {cost.stage: cost for cost in estimate(recipe, target, derive(target, recipe.drafter))}


@pytest.mark.parametrize(
    "options",
    [
        {"unrolled_steps": 1},
        {"unrolled_steps": 3},
        {"unrolled_steps": 3, "micro_batch_size": 2},
        {"unrolled_steps": 3, "micro_batch_size": 2, "divergence": "tvd++"},
    ],
)
def test_a_step_fits_its_estimate(options: dict[str, Any]) -> None:
    recipe = recipe_of(**options)
    distill, drafter = recipe.distill, derive(TARGET, recipe.drafter)
    vocabulary = Vocabulary(VOCABULARY, np.arange(drafter.vocab_size))
    model = UnrolledHead(FeatureHead(drafter, vocabulary), torch.randn(VOCABULARY, TARGET.hidden))
    objective = HeadObjective(distill.unrolled_steps, None, distill, stops=[], seed=0, store=Even())
    rows = all_compared(ROWS, CONTEXT, VOCABULARY)
    rows["features"] = torch.randn(ROWS, CONTEXT, TARGET.hidden).half()
    micro = distill.micro_batch_size or ROWS
    batches = [
        {name: values[at : at + micro] for name, values in rows.items()} for at in range(0, ROWS, micro)
    ]
    with Meter(model) as meter:
        for loss in objective(model, batches):
            loss.backward()
    before = costs.training_bytes(drafter) - costs.weight_bytes(drafter)
    before += costs.FLOAT * TARGET.embedding_parameters
    most = stages(recipe)["distill"].memory - before
    assert 0.7 * most < meter.peak < most


def test_the_target_does_not_run() -> None:
    """A deeper one costs nothing more, whatever its fixed data is; the reference has the same steps of its own."""
    deep = replace(TARGET, layers=30)
    recipe = recipe_of(select_fraction=0.5, fixed_fraction=0.3, fixed="a.jsonl", watch_steps=1)
    recipe = replace(recipe, reference=replace(recipe.reference, steps=1))
    for stage in ("distill", "reference"):
        few, many = (stages(recipe, target)[stage] for target in (TARGET, deep))
        assert few == many
    one, three = (stages(replace(recipe, distill=replace(recipe.distill, unrolled_steps=n))) for n in (1, 3))
    for stage in ("distill", "reference"):
        assert three[stage].flops == pytest.approx(3 * one[stage].flops)


def test_a_head_is_measured_on_the_first_of_its_targets_files() -> None:
    """That may be the target's own. A build from a small file is not refused for the memory of the target in torch."""

    def measured(own: int | None = None, **files: list[str]) -> StageCost:
        export: dict[str, Any] = {"onnx": [], "gguf": [], **files}
        flags = {"export": export, "drafter": {"vocabulary": 1024}}
        recipe = resolve(load_recipe(recipe_file("smollm2-head")), flags)
        found = estimate(recipe, TARGET, derive(TARGET, recipe.drafter), own=own)
        return next(cost for cost in found if cost.stage == "evaluate")

    small, large = measured(onnx=["int4", "fp32"]), measured(onnx=["fp32", "int4"])
    opened = {name: opened_bytes(TARGET, [("onnxruntime", name)]) for name in ("int4", "fp32")}
    rest = small.memory - opened["int4"]
    assert rest == large.memory - opened["fp32"] > 0
    assert small.reading < large.reading
    assert measured(own=12345, gguf=["f16"]).memory == rest + 12345
    assert measured(own=12345, onnx=["int4"], gguf=["f16"]) == small


def test_a_head_is_measured_on_the_processor_whatever_trains_it() -> None:
    """The files run on no GPU: its memory is not asked for them."""
    recipe, card = recipe_of(), Hardware("a small card", 1, 1e12, 1e11, 2**20)
    found = stage_times(recipe, TARGET, derive(TARGET, recipe.drafter), card, 0.5, 0.5)
    fits = {time.cost.stage: time.fits for time in found}
    assert (fits["distill"], fits["evaluate"]) == (False, True)
