"""The shipped default is what the study found best: loss, data and token selection of the first arm in docs/results.md."""

from __future__ import annotations

import re

from repository import REPOSITORY

from edgespec.core.options import to_mapping
from edgespec.recipe.schema import DistillOptions
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.study_options import read_study
from edgespec.verbs.study import shipped_studies

CHOSEN = (
    *("divergence", "labels", "tvdpp_estimator", "tvdpp_scope", "fixed_fraction", "student_fraction"),
    "select_fraction",
)


def test_the_default_is_the_arm_that_won() -> None:
    report = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    winner = re.search(r"The arm with the highest τ .*? is \*\*(.+?)\*\*", report)
    assert winner is not None
    study = read_study("alignment", load_recipe(shipped_studies()["alignment"]))
    chosen, defaults = to_mapping(study.arms[winner[1]].recipe.distill), to_mapping(DistillOptions())
    assert {name: chosen[name] for name in CHOSEN} == {name: defaults[name] for name in CHOSEN}
