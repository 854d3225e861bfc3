"""The default of a bundle: the fastest file whose answers stay, in the mode that does not slow plain decoding."""

from __future__ import annotations

import pytest
from edgespec_export.bundle.default_choice import Timed, pick
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


def test_exact_where_it_costs_little() -> None:
    assert pick(Q4_1)["fast"] == ""
    assert pick(Q4_1)["reason"].startswith("the fastest of 1 where the bundle was made: 118 tokens")


@pytest.mark.parametrize("best", [50.0, 1000.0])
def test_a_changed_model_is_no_default_whatever_its_speed(best: float) -> None:
    changed = Timed("onnxruntime", "int4", EXACT, kept=0.8, plain=best, best=best)
    close = Timed("llama.cpp", "q4_k_m", EXACT, kept=0.93, plain=10.0, best=10.0)
    assert pick([changed, close])["precision"] == "q4_k_m"
