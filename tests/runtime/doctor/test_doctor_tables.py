"""The doctor's tables of costs that differ from context to context."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from edgespec_runtime.chooser.expected_acceptance import Acceptance
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.doctor import doctor
from edgespec_runtime.doctor.block_difference import Difference
from edgespec_runtime.doctor.report import Findings, Threads, Variant, cost_table, thread_table, variant_table

STEPS = (0.010, 0.012, 0.020)
COSTS = Costs(
    (32, 256, 1024),
    tuple(tuple(step * v for v in (1.0, 1.5, 2.0, 2.5)) for step in STEPS),
    tuple(step / 10 for step in STEPS),
)


def test_single_steps_are_in_milliseconds_at_every_context() -> None:
    headers, rows = cost_table(COSTS)
    assert headers == ("context", "plain step ms", "drafter step ms", "c_t")
    assert [tuple(row) for row in rows] == [
        ("32", "10", "1", "0.100"),
        ("256", "12", "1.2", "0.100"),
        ("1024", "20", "2", "0.100"),
    ]


@pytest.mark.usefixtures("steady")
def test_the_contexts_are_those_that_are_asked_for(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where others were measured before and kept; these stay as they are."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "read_bandwidth", lambda threads: 1e10)

    def examined(*contexts: int) -> Findings:
        return doctor.examine(doctor.Options(bundle=str(bundle), threads=1, seconds=0.4, contexts=contexts))

    first, other, again = examined(16), examined(24), examined(16)
    assert [one.chosen.costs.contexts for one in (first, other, again)] == [(16,), (24,), (16,)]
    assert [one.kept for one in (first, other, again)] == [False, False, True]
    assert again.chosen.costs == first.chosen.costs


def test_ways_are_compared_at_the_context_of_an_everyday_chat() -> None:
    """1.9 / 1.6 at γ = 1, 2.71 / 2.2 at 2, 3.439 / 2.8 at 3, of 83 plain tokens a second."""
    way = Variant("onnxruntime", "fp32", None, COSTS, Difference(1e-5, 2, 256))
    assert way.at.context == 256
    alone = Variant("onnxruntime", "fp32", None, Costs((32,), ((0.01, 0.02),), (0.001,)), Difference(0, 0, 1))
    assert alone.at.context == 32
    found = SimpleNamespace(chosen=way, others=(), acceptances=(Acceptance("greedy", 0.9),))
    headers, rows = variant_table(found)  # type: ignore[arg-type]
    assert dict(zip(headers, rows[0], strict=False)) == {
        "": "onnxruntime fp32",
        "plain tok/s": "83",
        "v(2)": "1.50",
        "v(4)": "2.50",
        "c_t": "0.10",
        "block diff": "1e-05",
        "flips": "2/256",
        "best γ": "2",
        "x plain": "1.23",
        "tok/s": "103",
    }


def test_threads_are_compared_in_milliseconds() -> None:
    headers, rows = thread_table([Threads(1, 0.010, 0.015, 0.001), Threads(2, 0.006, 0.012, 0.002)])
    assert headers == ("threads", "target step ms", "4 tokens ms", "drafter step ms")
    assert [list(row) for row in rows] == [["1", "10", "15", "1"], ["2", "6", "12", "2"]]
