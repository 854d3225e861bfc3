"""Arms of a trade-off study: from names of rules and values of their parameter, and what cannot be one."""

from __future__ import annotations

import pytest
from edgespec_runtime.rules.table import RULES, rule_of
from edgespec_runtime.tradeoff.arms import LARGE, SMALL, Arm, arms_of

from edgespec.core.errors import InputError


def names(rules: str, alphas: tuple[float, ...] = (0.0, 0.5)) -> list[str]:
    """Rules as the command line gives them: split at commas."""
    return [arm.name for arm in arms_of(rules.split(","), alphas)[2:]]


def test_a_rule_takes_every_alpha_and_the_ends_come_first() -> None:
    arms = arms_of(["chow", "opt"], (0.0, 0.5))
    assert arms[:2] == [LARGE, SMALL]
    points = [("chow", 0.0), ("chow", 0.5), ("opt", 0.0), ("opt", 0.5)]
    assert [(arm.curve, arm.value) for arm in arms[2:]] == points
    assert [arm.at for arm in arms] == ["", "", "a=0", "a=0.5", "a=0", "a=0.5"]


def test_a_rule_without_a_or_with_its_own_is_one_point() -> None:
    assert names("lossless,match-greedy") == ["lossless", "match-greedy"]
    assert names("lenient-lin") == ["lenient-lin:epsilon=0.5"]
    two = ["lenient-lin:epsilon=0.2", "lenient-lin:epsilon=0.8"]
    assert names(",".join(two)) == two
    assert names("opt:a=-0.25") == ["opt:a=-0.25"]
    assert {arm.curve for arm in arms_of(["opt", "opt:a=0.7"], (0.5,))[2:]} == {"opt"}
    assert names("opt,opt:a=0.5,opt") == ["opt:a=0.0", "opt:a=0.5"]  # the same point is measured once


def test_other_parameters_make_a_curve_of_their_own() -> None:
    assert names("lossy,lossy:beta=2", (0.1,)) == ["lossy:a=0.1", "lossy:beta=2,a=0.1"]
    assert names("bild:a_f=0.2,a=3,chow", (0.1,)) == ["bild:a_f=0.2,a=3.0", "chow:a=0.1"]
    assert arms_of(["bild:a=3", "a_f=0.2"], ())[2] == Arm("bild:a_f=0.2,a=3.0", "bild:a_f=0.2", "a", 3.0)


def test_every_rule_of_the_table_can_be_an_arm() -> None:
    for arm in arms_of(list(RULES), (0.0, 0.9))[2:]:
        rule_of(arm.name)
        assert arm.name.startswith(arm.curve)


@pytest.mark.parametrize(
    ("rules", "alphas", "words"),
    [
        ("chw", (0.1,), "unknown acceptance rule 'chw'; did you mean 'chow'"),
        (
            "lossy",
            (0.5, 1.0),
            "a is 1.0; it must be below 1.*of --alphas, for lossy.*leave 1 out.*lossy:a=0.5",
        ),
        ("chow", (-0.5,), "a is -0.5; it must be at least 0.*for chow"),
        ("chow:b=1", (0.5,), "unknown option 'rule chow.b'"),
        ("beta=2", (0.5,), "unknown acceptance rule 'beta=2'"),
        ("chow", (), "no point to measure"),
        ("", (0.5,), "unknown acceptance rule ''"),
    ],
)
def test_arms_that_cannot_be(rules: str, alphas: tuple[float, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        arms_of(rules.split(","), alphas)
