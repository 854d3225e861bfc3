"""What the stages of a build say of a training, as far as they say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.recipe.schema import DrafterOptions, Recipe
from edgespec.stages.training_facts import TRAINING, facts_of, read_training, training_of

RECIPE = Recipe(target="t", seed=7)
WROTE = {"counts": {"responses": 12, "response_tokens": 340, "shards": 2}}
LEARNT = {
    "options": {"divergence": "fkl", "batch_size": 4, "context": 512, "watch_steps": 50},
    "counts": {"steps": 50, "tokens": 102_400, "train_seconds": 175.0, "loss_last": 2.39, "alpha_last": 0.36},
}


def test_what_a_build_says(tmp_path: Path) -> None:
    """A stage without steps trained nothing, and one that is not finished says nothing yet."""
    for name, stage in (
        ("generate", WROTE),
        ("pretrain", {"counts": {"steps": 0, "tokens": 0}}),
        ("distill", LEARNT),
    ):
        write_json(tmp_path / name / "stage.json", stage)
    found = training_of(tmp_path, RECIPE)
    assert found == {
        "written": {"texts": 12, "tokens": 340, "seed": 7},
        "phases": [
            {
                "stage": "distill",
                "steps": 50,
                "tokens": 102_400,
                "seconds": 175.0,
                "loss_last": 2.39,
                "alpha_last": 0.36,
                "seed": 7,
                "batch_size": 4,
                "context": 512,
                "divergence": "fkl",
            }
        ],
    }
    start = tmp_path / "start"
    on = replace(RECIPE, drafter=DrafterOptions(init="checkpoint", checkpoint=str(start)))
    assert training_of(tmp_path, on) == found
    start.mkdir()
    write_json(start / TRAINING, {"written": {"texts": 1}, "phases": [{"steps": 3}]})
    assert training_of(tmp_path, on) == found | {"phases": [{"steps": 3}, *found["phases"]]}
    (tmp_path / "distill" / "stage.json").unlink()
    assert "phases" not in training_of(tmp_path, RECIPE)


def test_what_nobody_knows_is_not_there() -> None:
    """Stages of older builds watched no acceptance; what is of another form counts as absent."""
    old = {"counts": {"steps": 3, "tokens": 768, "alpha_last": None}}
    assert facts_of({"distill": old}, None) == {"phases": [{"stage": "distill", "steps": 3, "tokens": 768}]}
    assert facts_of({}, 0) == {}
    assert facts_of({"generate": "x", "distill": {"counts": [1], "options": 4}}, 0) == {}


def test_a_file_of_facts(tmp_path: Path) -> None:
    assert read_training(tmp_path / TRAINING) == {}
    write_json(tmp_path / TRAINING, {"phases": []})
    assert read_training(tmp_path / TRAINING) == {"phases": []}
    (tmp_path / TRAINING).write_text(json.dumps([1]))
    with pytest.raises(InputError, match="holds list; a JSON object is wanted"):
        read_training(tmp_path / TRAINING)
