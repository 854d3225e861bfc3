"""The shipped default is what the study found best: loss, data and token selection of the first arm in docs/results.json."""

from __future__ import annotations

import json

from repository import REPOSITORY

from edgespec.core.options import to_mapping
from edgespec.recipe.schema import DistillOptions

CHOSEN = (
    "divergence",
    "labels",
    "tvdpp_estimator",
    "tvdpp_scope",
    "fixed_fraction",
    "student_fraction",
    "select_fraction",
)


def test_the_default_is_the_arm_that_won() -> None:
    results = json.loads((REPOSITORY / "docs" / "results.json").read_text())
    winner = results["best"]["arm"]
    chosen = results["arms"][winner]["distill"]
    defaults = to_mapping(DistillOptions())
    assert {name: chosen[name] for name in CHOSEN} == {name: defaults[name] for name in CHOSEN}
