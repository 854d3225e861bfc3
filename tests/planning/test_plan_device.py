"""Whether a drafter pays on a device: break-even, budgets, measured costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgespec_runtime.chooser.kept_costs import FOLDER, Subject, kept_for, outline, store_costs, subject_of
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from paper_plan import DRAFTER, PAPER, TARGET, planned

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.plan import PlanOptions
from edgespec.planning.plan_device import (
    CONTEXT,
    DeviceRates,
    budget,
    fastest,
    measured,
    rates_of_profile,
)
from edgespec.planning.plan_report import LENGTHS, _way, _way_json
from edgespec.recipe.devices import profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target
from edgespec.shell.environment import cache_folder


def test_a_budget_without_arithmetic_is_mbsu() -> None:
    """With infinite arithmetic every pass costs one reading: the measured-cost formula and MBSU are the same up to the cache."""
    way = budget(TARGET, DRAFTER, "llama.cpp", "q8_0", DeviceRates(1e11, float("inf"), ""))
    for length in LENGTHS:
        assert way.at.v(length + 1) == 1.0
        assert way.at.speedup(0.7, length) == pytest.approx(way.memory_bound(0.7, length), rel=0.01)
    assert way.byte_ratio == pytest.approx(DRAFTER.streamed_parameters / TARGET.streamed_parameters)
    weights = costs.exported_bytes(TARGET, "q8_0", streamed=True)
    cache = 2 * CONTEXT * costs.cache_values(TARGET)
    assert way.at.plain_rate == pytest.approx(1e11 / (weights + cache), rel=1e-6)


def test_a_head_is_counted_in_int8_whatever_its_target_is_in() -> None:
    target = shape_of_target("smollm2-135m-instruct")
    head = derive(target, DrafterOptions(kind="head", layers=1, vocabulary=8192))
    way = budget(target, head, "onnxruntime", "int4", DeviceRates(1e11, float("inf"), ""))
    assert way.byte_ratio == pytest.approx(1.125 * head.parameters / (0.625 * target.parameters), rel=1e-3)


def test_a_budget_without_bandwidth_never_pays() -> None:
    """Where products bind, a pass of n tokens costs n steps: nothing is gained."""
    way = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e18, 1e12, ""))
    assert way.at.v(4) == pytest.approx(4.0, rel=1e-6)
    assert [way.at.break_even(length) for length in LENGTHS] == [None] * len(LENGTHS)
    assert (way.at.least(LENGTHS), way.at.best(0.99)) == (None, (0, 1.0))


def test_drafts_stay_within_a_devices_limit() -> None:
    free = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e10, float("inf"), ""))
    tied = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e10, float("inf"), ""), 2)
    assert free.at.best(0.8)[0] > 4
    assert tied.at.best(0.8) == (2, free.at.speedup(0.8, 2))
    alone = tied.at.least((3, 4, 5))
    assert alone is None
    plan: Any = SimpleNamespace(options=PlanOptions("x"), device="a device")
    shown = [length for length in LENGTHS if f"\nγ = {length} " in _way(plan, tied)]
    assert shown == [one["gamma"] for one in _way_json(plan, tied)["lengths"]] == [1, 2]


def test_break_even_is_where_the_speedup_is_one() -> None:
    way = budget(TARGET, DRAFTER, "onnxruntime", "int4", DeviceRates(5e10, 5e11, ""))
    for length in LENGTHS:
        alpha = way.at.break_even(length)
        assert alpha is not None
        assert way.at.speedup(alpha, length) == pytest.approx(1.0, abs=1e-4)
    assert way.at.least(LENGTHS) == min((way.at.break_even(length), length) for length in LENGTHS)


def test_every_profile_has_its_arithmetic() -> None:
    for one in profiles().values():
        rates = rates_of_profile(one, 0.5)
        assert rates.bandwidth == one.bandwidth_gb_s * 5e8
        assert rates.flops == pytest.approx(one.gflop_s * 5e8)
        assert one.memory in rates.source
        assert one.units in rates.source


def test_measured_costs_go_before_a_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert measured(TARGET, DRAFTER) == []
    table = Costs((200,), (tuple(0.1 * (1 + 0.1 * n) for n in range(8)),), (0.002,))
    for target in (TARGET, replace(TARGET, layers=31)):
        shapes = {"target": outline(target), "drafter": outline(DRAFTER)}
        store_costs(Subject(shapes, {}, "onnxruntime", "int4", 2, None, 512), table, seconds=5.0)
    [way] = measured(TARGET, DRAFTER)
    assert (way.measured, way.at) == (True, table.at(200))
    assert way.at.speedup(0.7, 3) == pytest.approx((1 - 0.7**4) / 0.3 / (3 * 0.02 + 1.3))
    out = planned(capsys, *PAPER)
    assert "Measured: 2 threads" in out
    assert "Speculation is " in out
    assert "budget" not in out
    file = cache_folder() / FOLDER / way.where.split(", ")[1]
    value = json.loads(file.read_text())
    damages: list[dict[str, Any]] = [{"costs": None}, {"seconds": None}]
    damages += [
        {"subject": value["subject"] | {"engine": []}},
        {"subject": value["subject"] | {"threads": 3}},
    ]
    for damage in damages:
        file.write_text(json.dumps(value | damage))
        assert kept_for(TARGET, DRAFTER) == []
    file.write_text("{")
    assert kept_for(TARGET, DRAFTER) == []


def test_costs_of_a_file_type_that_the_plan_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    shapes = {"target": outline(TARGET), "drafter": outline(DRAFTER)}
    table = Costs((200,), ((0.1,) * 8,), (0.002,))
    store_costs(Subject(shapes, {}, "llama.cpp", "q5_k_s", 2, None, 512), table, seconds=5.0)
    [way] = measured(TARGET, DRAFTER)
    assert (way.name, way.at) == ("llama.cpp q5_k_s", table.at(200))
    assert way.byte_ratio == pytest.approx(DRAFTER.streamed_parameters / TARGET.streamed_parameters)


def test_costs_of_the_fast_mode_are_a_way_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    shapes = {"target": outline(TARGET), "drafter": outline(DRAFTER)}
    exact = Subject(shapes, {}, "onnxruntime", "int8", 2, None, 512)
    fast = replace(exact, files={"the fast graph": "0" * 64}, fast_graph=True)
    for subject, step in ((exact, 0.2), (fast, 0.1)):
        store_costs(subject, Costs((200,), ((step,) * 8,), (0.002,)), seconds=5.0)
    rates = {way.name: way.at.plain_rate for way in measured(TARGET, DRAFTER)}
    assert rates == {"onnxruntime int8": 5.0, "onnxruntime int8, fast mode": 10.0}


@pytest.mark.llamacpp
def test_what_doctor_keeps_is_found(both: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    pair = open_pair(both, LoadOptions(engine="llama.cpp"))
    try:
        store_costs(subject_of(pair), Costs((32,), ((1.0,) * 16,), (0.001,)), 1.5)
        shapes = [ModelShape(**role.shape) for role in (pair.manifest.target, pair.manifest.drafter)]
    finally:
        pair.close()
    found = measured(*shapes)
    assert [(way.name, way.at.draft) for way in found] == [("llama.cpp q8_0", 0.001)]


def test_fastest_counts_tokens_and_not_ratios() -> None:
    slow = budget(TARGET, DRAFTER, "llama.cpp", "f16", DeviceRates(1e10, float("inf"), ""))
    quick = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e10, 1e11, ""))
    assert slow.at.best(0.7)[1] > quick.at.best(0.7)[1]
    assert fastest([slow, quick], 0.7) is quick
