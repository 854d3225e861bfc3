"""Tables of small files whose figures are known: every column has its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgespec.report.acceptance import acceptance_section
from edgespec.report.fields import Fields
from edgespec.report.gather import BENCH, ENGINES, VERIFY, Run, Source
from edgespec.report.measured import Setting
from edgespec.report.other_engines import others_section
from edgespec.report.parts import ABSENT, Section, Table
from edgespec.report.precision import files_section
from edgespec.report.speed import category_section


def run_of(kind: str, values: Mapping[str, Any]) -> Run:
    file = Path(f"{kind}.json")
    return Run(sources={kind: Source(kind, file, fields=Fields(values, str(file)))})


def tables(section: Section) -> list[Table]:
    """Those of the only run."""
    return [
        part
        for column in section.parts
        if isinstance(column, Mapping)
        for part in column[0]
        if isinstance(part, Table)
    ]


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_kinds_of_questions() -> None:
    row: dict[str, Any] = {"category": "maths", "draft_length": 3, "prompts": 20, "acceptance_rate": 0.65}
    row |= {"block_efficiency": [2.5, 2.25, 2.75], "speedup": [1.6, 1.5, 1.7]}
    row |= {"plain_token_rate": [50.0, 49.0, 51.0], "token_rate": [80.0, 78.0, 82.0]}
    (table,) = tables(category_section([run_of(BENCH, {"categories": [row]})]))
    assert table.headers == ["", "τ", "α", "plain tok/s", "tok/s", "x plain"]
    assert texts(table) == [["maths", "2.50", "0.65", "50.0", "80.0", "1.60"]]
    assert [cell.note for cell in table.rows[0]][:2] == ["20 questions", "2.25 to 2.75"]


def test_what_rounding_cost_a_pair() -> None:
    """A trial: blocks, emitted, tested, accepted, positions, overlap."""
    named: dict[str, Any] = {"engine": "llama.cpp", "precision": "q8_0"}
    trials = [[10, 30, 40, 20, 30, 18.0], [10, 20, 20, 10, 20, 17.0]]
    pair = {"cause": "both", "temperature": 0.0, "trials": trials}
    check: dict[str, Any] = {"role": "target", "top1": 0.995, "kl": 0.012, "perplexity": 7.5}
    check |= {"block_flips": 1, "positions": 400}
    found = {"files": [named | check], "acceptance": [named | pair]}
    files, pairs = tables(files_section([run_of(VERIFY, found)]))
    assert texts(files) == [["target llama.cpp q8_0", ABSENT, "99.5%", "0.0120", "7.50", "1", "ok"]]
    assert pairs.headers == ["", "T", "τ", "α of the drafts", "α on the target's text"]
    assert texts(pairs) == [["llama.cpp q8_0: both", "greedy", "2.50", "0.50", "0.70"]]


def test_what_other_engines_did_reach() -> None:
    ours = [{"counts": {"blocks": 2, "emitted": 8}}, {"counts": {"blocks": 3, "emitted": 12}}]
    row: dict[str, Any] = {"name": "an engine", "rule": "its rule", "ours": ours}
    row["answers"] = [{"passes": 4}, {"passes": 4}]
    (table,) = tables(others_section([run_of(ENGINES, {"list": [row, row | {"drawn": True}]})]))
    assert table.headers == ["", "rule here", "τ there", "τ here"]
    assert texts(table) == [["an engine", "its rule", seen, "4.00"] for seen in ("2.50", ABSENT)]


@pytest.mark.parametrize(("temperature", "matched"), [(0.6, None), (0.0, (0.7, 0.6, 0.8))])
def test_a_rule_has_its_own_rate_and_greedily_all_are_one(temperature: float, matched: Any) -> None:
    metrics = {"alpha_teacher_forced": [0.7, 0.6, 0.8], "alpha_match_greedy": [0.5, 0.4, 0.6]}
    found = Setting({"temperature": temperature, "metrics": metrics}, "evaluation.json")
    assert found.by_rule("lossless") == (0.7, 0.6, 0.8)
    assert found.by_rule("match_greedy") == (0.5, 0.4, 0.6)
    assert found.by_rule("match_sampled") == matched  # this build did not measure it


def test_acceptance_of_a_bench_is_that_of_every_draft_length() -> None:
    rows = [
        {"draft_length": 0},
        {"draft_length": 1, "block_efficiency": [1.5, 1.4, 1.6], "acceptance_rate": 0.5},
        {"draft_length": 3, "block_efficiency": [2.0, 1.9, 2.1], "acceptance_rate": 0.4},
    ]
    (table,) = tables(acceptance_section([run_of(BENCH, {"summaries": rows})]))
    assert texts(table) == [["γ = 1", "1.50", "0.50"], ["γ = 3", "2.00", "0.40"]]
