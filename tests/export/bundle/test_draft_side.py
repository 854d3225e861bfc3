"""The drafter's file beside each of the target's: chosen by measured acceptance and step time, and what the bundle then runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.bundle import default_choice, draft_side
from edgespec_export.bundle.default_choice import choose_default
from edgespec_export.bundle.draft_side import choose_drafters, draft_table
from edgespec_export.formats.export import ExportedFile
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.exactness import EXACT

OWN, FLOAT = ("onnxruntime", "int4", "int4"), ("onnxruntime", "int4", "fp32")
STEP = {"int4": 0.1, "fp32": 0.15}  # plain steps


def run(key: tuple[str, str, str], alpha: float, temperature: float = 0.0) -> dict[str, Any]:
    names = dict(zip(("engine", "target", "drafter"), key, strict=True))
    return {**names, "temperature": temperature, "trials": [[1, 1, 1, 1, 100, 100 * alpha]] * 2}


@pytest.fixture
def files(tmp_path: Path) -> list[ExportedFile]:
    return [
        ExportedFile(role, "onnxruntime", name, tmp_path / f"{role}-{name}")
        for role in ("target", "drafter")
        for name in ("fp32", "int4")
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Costs by the drafter's file, without engines; the pairs that were opened."""
    opened: list[tuple[str, str]] = []

    def open_models(target: ExportedFile, drafter: ExportedFile, *_: Any, **__: Any) -> tuple[str, str]:
        opened.append((target.precision, drafter.precision))
        return opened[-1]

    def calibrate(target: str, drafter: str, *_: Any) -> Costs:
        return Costs((256,), ((1.0, 1.1, 1.2, 1.3, 1.4),), (STEP[drafter],))

    monkeypatch.setattr(draft_side, "open_models", open_models)
    monkeypatch.setattr(draft_side, "calibrate", calibrate)
    return opened


@pytest.mark.parametrize(
    ("own", "floats", "taken"),
    [
        (0.6, 0.8, "fp32"),
        (0.6, 0.61, "int4"),
        (0.8, 0.6, "int4"),
    ],  # 0.01 of α does not pay for half a step more
)
def test_the_drafter_that_promises_more_tokens_a_second_is_taken(
    files: list[ExportedFile], clock: list[tuple[str, str]], own: float, floats: float, taken: str
) -> None:
    acceptance = [run(OWN, own), run(FLOAT, floats), run(OWN, 0.0, 1.0), run(FLOAT, 1.0, 1.0)]
    found, candidates = choose_drafters(files, None, {}, {"acceptance": acceptance})
    beside = {(file.role, file.precision): (file.path.name, file.held) for file in found}
    assert beside["drafter", "int4"] == (f"drafter-{taken}", taken)
    assert beside["drafter", "fp32"] == ("drafter-fp32", "fp32")
    assert beside["target", "int4"] == ("target-int4", "int4")
    assert clock == 2 * [("int4", "int4"), ("int4", "fp32")]
    assert [one["drafter"] for one in candidates if one["chosen"]] == [taken]
    assert {one["drafter"]: one["alpha"] for one in candidates} == pytest.approx(
        {"int4": own, "fp32": floats}
    )
    shown = draft_table([*candidates, {"engine": 7}])
    assert shown.count("taken") == 1
    assert len(shown.splitlines()) == 4


@pytest.mark.parametrize("acceptance", [[], [run(OWN, 0.5)], [run(FLOAT, 0.5)]])
def test_where_nothing_can_be_compared_nothing_is_timed(
    files: list[ExportedFile], clock: list[tuple[str, str]], acceptance: list[dict[str, Any]]
) -> None:
    assert choose_drafters(files, None, {}, {"acceptance": acceptance} if acceptance else {}) == (files, [])
    assert clock == []


def test_a_head_has_one_file(files: list[ExportedFile], clock: list[tuple[str, str]]) -> None:
    heads = [replace(file, is_head=file.role == "drafter") for file in files]
    acceptance = [run(OWN, 0.1), run(FLOAT, 0.9)]
    assert choose_drafters(heads, None, {}, {"acceptance": acceptance}) == (heads, [])
    assert clock == []


def test_nobody_elses_rows_make_a_table() -> None:
    assert draft_table([{"engine": "x"}, {"alpha": "high"}]) == ""


def test_another_program_beside_one_turn_does_not_decide(
    files: list[ExportedFile], clock: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of equal speed, and the first one is timed while another program runs: seven times as slow."""

    def calibrate(*_: Any) -> Costs:
        slow = 7.0 if len(clock) == 1 else 1.0
        return Costs((256,), ((slow, 1.1 * slow, 1.2 * slow, 1.3 * slow, 1.4 * slow),), (0.1 * slow,))

    monkeypatch.setattr(draft_side, "calibrate", calibrate)
    acceptance = [run(OWN, 0.7), run(FLOAT, 0.6)]
    _, candidates = choose_drafters(files, None, {}, {"acceptance": acceptance})
    assert [one["drafter"] for one in candidates if one["chosen"]] == ["int4"]
    clock.clear()
    checks = [
        {"role": "target", "engine": "onnxruntime", "precision": name, "kept": {EXACT: 0.99}} for name in STEP
    ]
    monkeypatch.setattr(default_choice, "kept_of", lambda check: check["kept"])
    _, timed = choose_default(files, None, {}, {"files": checks}, {})
    assert clock == 2 * [("fp32", "fp32"), ("int4", "int4")]
    assert [one.plain for one in timed] == [1.0, 1.0]
