"""What is reported of runs on random weights: rows and text of known counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgespec_runtime.bench.synthetic_report import (
    Arm,
    Run,
    Section,
    best_of_trace,
    plain_loop_share,
    rows_of,
    text,
)
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.exactness import EXACT, FAST

from edgespec.core.metrics import RawCounts, mbsu


def known_section(rate: float = 0.8, mode: str = EXACT) -> Section:
    """Plain passes of 10 ms; drafts of three with steps of 1 ms, 10 ms of 360 spent on drawing, and passes of 15 ms; nothing else
    takes time."""
    runs = []
    for turn in range(4):
        plain = RawCounts(blocks=60, emitted=60, verify_seconds=0.6, total_seconds=0.6)
        drafted = RawCounts(
            blocks=20,
            drafted=60,
            emitted=60,
            tested=[20, 20, 20],
            accepted=[14, 13, 13],
            draft_seconds=0.06,
            verify_seconds=0.3,
            total_seconds=0.36,
        )
        runs += [Run(None, turn, plain, 0.6), Run(Arm((rate,), None), turn, drafted, 0.35)]
    costs = Costs((50,), ((0.010, 0.012, 0.013, 0.015),), (0.001,))
    return Section(
        "toy", "llama.cpp", "q4_0", mode, 0.0, 2, {"target": 1000, "drafter": 20}, {"target": 10**9, "drafter": 10**7},
        {"parameters": 0.02, "bytes": 0.01}, costs, tuple(runs),
    )  # fmt: skip


def test_a_row_of_known_counts() -> None:
    (row,) = rows_of(known_section())
    assert row.found.mean_draft_length == 3.0
    assert row.found.draft_cost == pytest.approx(0.1)
    assert row.found.verify_cost == pytest.approx(1.5)
    assert row.found.predicted == pytest.approx(3.0 / 1.8)
    assert row.found.speedup == pytest.approx((row.found.predicted,) * 3)  # no time is lost in the loop
    assert row.found.mbsu["parameters"] == pytest.approx(mbsu(3.0, 3, 0.02))
    assert row.found.mbsu["bytes"] == pytest.approx(mbsu(3.0, 3, 0.01))
    assert row.loop_share == pytest.approx((0.36 / 0.35 - 1,) * 3)
    assert plain_loop_share(known_section()) == (0.0, 0.0, 0.0)
    assert (row.best_draft_length, row.predicted) == (3, pytest.approx((1 - 0.8**4) / 0.2 / 1.8))
    said = text(known_section())
    assert "100.00 [100.00, 100.00] tok/s; 1 GB of weights a token, 100.0 GB/s" in said
    assert "speculation pays from α = 0.30 on (γ = 1 there)" in said
    assert "2.9 % [2.9, 2.9]" in said
    assert "fast mode" not in said
    assert "greedy, fast mode" in text(known_section(mode=FAST))


def test_rates_by_position_have_a_best_draft_of_their_own() -> None:
    """By hand: 1.9 / 1.15 at γ = 1, 1.99 / 1.3 at 2. The mean of the rates, 0.5, would make 2 the best."""
    section = known_section()
    runs = tuple(replace(run, arm=run.arm and Arm((0.9, 0.1), None)) for run in section.runs)
    costs = Costs((50,), ((0.100, 0.105, 0.110, 0.115),), (0.010,))
    (row,) = rows_of(replace(section, costs=costs, runs=runs))
    assert (row.best_draft_length, row.predicted) == (1, pytest.approx(1.9 / 1.15))
    for rate in (0.05, 0.3, 0.8, 1.0):  # one rate that goes on
        at = section.costs.at(50)
        best = at.best(rate)
        assert best_of_trace(at, (rate,)) == (best[0], pytest.approx(best[1]))
        assert best_of_trace(at, (rate, rate)) == (best[0], pytest.approx(best[1]))


def test_a_schedule_that_never_drafts_still_has_a_row() -> None:
    section = known_section()
    plain = RawCounts(blocks=60, emitted=60, verify_seconds=0.6, total_seconds=0.6)
    runs = tuple(Run(run.arm, run.round, plain, 0.6) for run in section.runs)
    silent = Section(**{**vars(section), "runs": runs})
    (row,) = rows_of(silent)
    assert (row.found.mean_draft_length, row.found.draft_cost, row.found.predicted) == (
        0.0,
        pytest.approx(0.1),
        1.0,
    )
    assert "nan" not in text(silent)
