"""What a drafter was trained on: told from the stages of a build, carried by its bundle, shown by the report. Trains nothing.

    written   {texts, tokens, seed}: what the target wrote for it
    phases    [{stage, steps, tokens, seconds, seed, batch_size, context, divergence, loss_last, alpha_last}], in their order

tokens are those that the drafter read, again and again where it read a text twice; seconds those of its steps; losses and α the
last ones logged. What nobody knows is not there. The training.json of a ready drafter has this form too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.files import read_json, read_object
from edgespec.recipe.schema import Recipe
from edgespec.stages.stage import STAGE_FILE

TRAINING = "training.json"
WRITING, PRETRAIN, DISTILL = "generate", "pretrain", "distill"
_COUNTED = {
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "train_seconds",
    "loss_last": "loss_last",
    "alpha_last": "alpha_last",
}
_CHOSEN = ("batch_size", "context", "divergence")


def read_training(file: Path) -> dict[str, Any]:
    """A training.json; {} where there is none. Raises InputError for a file that holds no object."""
    return read_object(file) if file.is_file() else {}


def training_of(build: Path, recipe: Recipe) -> dict[str, Any]:
    """The facts of a build so far; {} where none of its stages trained or wrote.

    The phases of the drafter that it goes on from, where its folder tells them, come first.
    """
    files = {name: build / name / STAGE_FILE for name in (WRITING, PRETRAIN, DISTILL)}
    found = facts_of({name: read_json(file) for name, file in files.items() if file.is_file()}, recipe.seed)
    start = Path(recipe.drafter.checkpoint) if recipe.drafter.init == "checkpoint" else None
    before = read_training(start / TRAINING).get("phases") if start is not None else None
    if isinstance(before, list) and "phases" in found:
        found["phases"] = [*before, *found["phases"]]
    return found


def facts_of(stages: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """The same from the stage.json of each stage; a part that is no object counts as absent."""
    found: dict[str, Any] = {}
    counts = _object(_object(stages.get(WRITING)).get("counts"))
    if counts:
        found["written"] = _known(
            {"texts": counts.get("responses"), "tokens": counts.get("response_tokens"), "seed": seed}
        )
    phases = [_phase(name, _object(stages.get(name)), seed) for name in (PRETRAIN, DISTILL)]
    if trained := [phase for phase in phases if phase]:
        found["phases"] = trained
    return found


def _phase(name: str, stage: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """{} for a stage without a step."""
    counts, options = _object(stage.get("counts")), _object(stage.get("options"))
    if not counts.get("steps"):
        return {}
    counted = {key: counts.get(own) for key, own in _COUNTED.items()}
    return _known({"stage": name, **counted, "seed": seed, **{key: options.get(key) for key in _CHOSEN}})


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
