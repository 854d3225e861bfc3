"""The default of a bundle: the fastest file whose answers stay, in the mode that does not slow plain decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from edgespec_export.answers.report import RED
from edgespec_export.bundle.default_choice import (
    Preferred,
    Timed,
    choice_table,
    default_report,
    first_faithful,
    pick,
)
from edgespec_runtime.engines.exactness import EXACT, FAST

INT8 = [
    Timed("onnxruntime", "int8", EXACT, kept=0.99, plain=30.0, best=40.0),
    Timed("onnxruntime", "int8", FAST, kept=0.98, plain=110.0, best=140.0),
]
INT4 = [
    Timed("onnxruntime", "int4", EXACT, kept=0.67, plain=60.0, best=70.0),
    Timed("onnxruntime", "int4", FAST, kept=0.67, plain=130.0, best=170.0),
]
Q4_1 = [
    Timed("llama.cpp", "q4_1", EXACT, kept=1.0, plain=118.0, best=118.0),
    Timed("llama.cpp", "q4_1", FAST, kept=1.0, plain=120.0, best=120.0),
]


def test_the_fastest_file_with_the_same_answers() -> None:
    chosen = pick([*INT8, *INT4, *Q4_1])
    assert (chosen["engine"], chosen["precision"]) == ("onnxruntime", "int8")
    assert chosen["fast"] == "onnxruntime/int8 onnxruntime/int4"
    assert "the fastest of 3 where the bundle was made: 140 tokens a second, 110 plainly" in chosen["reason"]


@pytest.mark.parametrize(("rate", "precision"), [(154.0, "int8"), (156.0, "q4_1")])
def test_of_files_as_fast_the_one_that_drafts_speed_up_most(rate: float, precision: str) -> None:
    """140 is 0.91 of 154 and 0.897 of 156."""
    chosen = pick([*INT8, Timed("llama.cpp", "q4_1", EXACT, kept=1.0, plain=rate, best=rate)])
    assert chosen["precision"] == precision
    assert chosen["reason"].startswith(
        "gains most from drafts, and is within a tenth of the fastest of 2"
        if precision == "int8"
        else "the fastest"
    )


def test_exact_where_it_costs_little() -> None:
    assert pick(Q4_1)["fast"] == ""
    assert pick(Q4_1)["reason"].startswith("the fastest of 1 where the bundle was made: 118 tokens")


@pytest.mark.parametrize("best", [50.0, 1000.0])
def test_a_changed_model_is_no_default_whatever_its_speed(best: float) -> None:
    changed = Timed("onnxruntime", "int4", EXACT, kept=0.8, plain=best, best=best)
    close = Timed("llama.cpp", "q4_k_m", EXACT, kept=0.93, plain=10.0, best=10.0)
    assert pick([changed, close])["precision"] == "q4_k_m"


LAPTOP = Preferred(("onnxruntime", "int4"), "the profile of laptop-cpu-x86")


def test_a_devices_precision_unless_it_changes_the_answers() -> None:
    kept = Timed("onnxruntime", "int4", EXACT, kept=0.95, plain=60.0, best=70.0)
    wished = pick([*INT8, kept], LAPTOP)
    assert wished["precision"] == "int4"
    assert wished["reason"] == (
        "the profile of laptop-cpu-x86; 70 tokens a second, 60 plainly where the bundle was made; keeps 95.0% of the most likely "
        "tokens (close)"
    )
    other = pick([*INT8, *INT4], LAPTOP)
    assert other["precision"] == "int8"
    assert "keeps 98.0% of the most likely tokens (same answers)" in other["reason"]
    assert other["reason"].endswith("changed and left out: int4 67.0%")


def test_where_all_are_changed_the_reason_says_so() -> None:
    chosen = pick(INT4, LAPTOP)
    assert chosen["precision"] == "int4"
    assert "keeps 67.0% of the most likely tokens (changed: another model)" in chosen["reason"]
    manifest = SimpleNamespace(default=chosen, metrics={"timed": [one.row() for one in INT4]})
    shown = default_report(manifest, colour=True)  # type: ignore[arg-type]
    assert f"{RED}default: onnxruntime int4" in shown
    assert "67.0%  changed" in shown
    assert RED not in default_report(manifest)  # type: ignore[arg-type]


def test_fast_is_not_the_mode_where_it_changes_the_answers() -> None:
    slow = Timed("onnxruntime", "int8", EXACT, kept=0.99, plain=30.0, best=40.0)
    worse = Timed("onnxruntime", "int8", FAST, kept=0.90, plain=110.0, best=140.0)
    assert pick([slow, worse])["fast"] == ""
    assert pick([slow, INT8[1]])["fast"] == "onnxruntime/int8"


def verified(**kept: float) -> dict[str, Any]:
    return {
        "files": [
            {"role": "target", "engine": "onnxruntime", "precision": name, "answers": {"top1": [share] * 3}}
            for name, share in kept.items()
        ]
    }


@pytest.mark.parametrize(
    ("kept", "precision"),
    [
        ({"int4": 0.93, "int8": 0.99}, "int4"),
        ({"int4": 0.91, "int8": 0.99}, "int8"),
        ({"int4": 0.91, "int8": 0.80}, "int4"),
        ({"int4": 0.70, "int8": 0.80}, "int8"),
        ({}, "int4"),
        ({"int4": 0.70}, "int8"),
    ],
)
def test_without_a_clock_the_first_that_keeps_the_answers(kept: dict[str, float], precision: str) -> None:
    offered = [("onnxruntime", "int4"), ("onnxruntime", "int8")]
    assert first_faithful(offered, verified(**kept), "why")["precision"] == precision


def test_the_table_leaves_out_what_no_packer_writes() -> None:
    rows = [one.row() for one in INT8]
    assert (
        len(
            choice_table(
                [*rows, {"engine": "x"}, *({**rows[0], "best": best} for best in ("fast", 10**400))]
            ).splitlines()
        )
        == 4
    )
    assert choice_table([]) == ""
