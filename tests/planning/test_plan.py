"""`edgespec plan`: its arithmetic against figures computed by hand and by others' code, its words, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.chooser.kept_costs import FOLDER, keep_synthetic, kept_for, store_costs
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.device import this_device
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from repository import PYTHONPATH, REPOSITORY

from edgespec.cli import main
from edgespec.core.metrics import predicted_block_efficiency
from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.estimate import PROMPT_TOKENS, exported_bytes
from edgespec.planning.hardware import GIB, Hardware
from edgespec.planning.plan_device import (
    ARITHMETIC,
    CONTEXT,
    DeviceRates,
    budget,
    fastest,
    measured,
    rate_of,
    rates_of_profile,
)
from edgespec.planning.plan_report import LENGTHS, span
from edgespec.planning.plan_stages import (
    SAMPLINGS,
    TOGETHER,
    Assumed,
    for_processes,
    stage_times,
    storage,
    usable,
)
from edgespec.recipe.devices import profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import DrafterOptions, Recipe
from edgespec.recipe.targets import TARGETS, cache_folder, shape_of_target

TARGET = shape_of_target("llama-2-7b-chat")
DRAFTER = derive(TARGET, DrafterOptions())
ASSUMED = Assumed(mfu=0.5, bandwidth=0.25)
ROUND = Hardware("round", 4, 1e12, 1e11, 64 * GIB)
PAPER = ("plan", "--target", "llama-2-7b-chat", "--recipe", "paper-llama-2-7b-chat", "--gpus", "8xA100-80GB")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def as_json(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main([*words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_training_time_is_flops_over_the_share_of_the_peak_of_all() -> None:
    recipe = resolve({"target": "x"}, {})
    stages = {time.cost.stage: time for time in stage_times(recipe, TARGET, DRAFTER, ROUND, ASSUMED)}
    pretrain, evaluate = stages["pretrain"], stages["evaluate"]
    assert pretrain.seconds == pytest.approx(pretrain.cost.flops / (4 * 1e12 * 0.5))
    assert (pretrain.devices, evaluate.devices) == (4, 1)  # the evaluation is one process's
    whole = replace(ROUND, measured=True)
    again = {time.cost.stage: time for time in stage_times(recipe, TARGET, DRAFTER, whole, ASSUMED)}
    assert again["pretrain"].seconds == pytest.approx(pretrain.seconds / 2)  # a measured rate is no peak


def test_generation_waits_for_the_weights() -> None:
    values = {"prompts": 80, "batch_size": 4, "max_new_tokens": 100}
    recipe = resolve({"target": "x", "generate": values}, {})
    fast = replace(ROUND, flops=1e18)
    found = next(t for t in stage_times(recipe, TARGET, DRAFTER, fast, ASSUMED) if t.cost.stage == "generate")
    steps = 80 / (4 * 4) * 100
    cache = 4 * 2 * TARGET.layers * TARGET.kv_heads * TARGET.head_dim * 4 * (128 + 50)
    by_hand = steps * (4 * TARGET.streamed_parameters + cache) / (1e11 * 0.25)
    assert (found.binds, found.seconds) == ("memory", pytest.approx(by_hand, rel=1e-6))
    half = resolve({"target": "x", "generate": values, "inference": {"dtype": "bfloat16"}}, {})
    less = next(t for t in stage_times(half, TARGET, DRAFTER, fast, ASSUMED) if t.cost.stage == "generate")
    assert 0.5 * found.seconds < less.seconds < 0.6 * found.seconds
    assert found.memory - less.memory == 2 * TARGET.parameters


def test_each_process_holds_its_share_of_a_batch() -> None:
    recipe = resolve({"target": "x", "pretrain": {"batch_size": 32}, "distill": {"micro_batch_size": 2}}, {})
    shared = for_processes(recipe, 8)
    assert (shared.pretrain.micro_batch_size, shared.distill.micro_batch_size) == (4, 2)
    one = {
        time.cost.stage: time
        for time in stage_times(recipe, TARGET, DRAFTER, replace(ROUND, count=1), ASSUMED)
    }
    many = {
        time.cost.stage: time
        for time in stage_times(recipe, TARGET, DRAFTER, replace(ROUND, count=8), ASSUMED)
    }
    assert many["pretrain"].memory < one["pretrain"].memory
    assert many["pretrain"].cost.flops == one["pretrain"].cost.flops
    small = replace(ROUND, memory=20 * GIB)
    assert not {t.cost.stage: t for t in stage_times(recipe, TARGET, DRAFTER, small, ASSUMED)}[
        "generate"
    ].fits


def test_how_many_devices_can_share_the_batches() -> None:
    paper = resolve({"target": "x", "pretrain": {"batch_size": 496}, "distill": {"batch_size": 40}}, {})
    assert [usable(paper, count) for count in (1, 2, 3, 8, 16, 32)] == [1, 2, 2, 8, 8, 8]
    assert (
        usable(resolve({"target": "x", "pretrain": {"steps": 0}, "distill": {"batch_size": 40}}, {}), 32)
        == 20
    )


def test_what_the_rooms_do_is_what_is_timed() -> None:
    from edgespec.recipe import schema as knobs
    from edgespec.recipe.schema import SAMPLINGS as measured_ways

    assert len(measured_ways) == SAMPLINGS
    pipeline = (REPOSITORY / "edgespec" / "building" / "pipeline.py").read_text(encoding="utf-8")
    together = [
        getattr(knobs, name := part.partition(",")[0].strip().strip('"'), name)
        for part in pipeline.split("self.stage(\n")[1:]
        if "together=True" in part.split("\n        )")[0]
    ]
    assert sorted({*together}) == sorted(TOGETHER)


def test_storage_adds_up() -> None:
    times = stage_times(resolve({"target": "x"}, {}), TARGET, DRAFTER, ROUND, ASSUMED)
    there, here = storage(times, TARGET, hub=True), storage(times, TARGET, hub=False)
    assert there.total - here.total == 2 * TARGET.parameters
    assert here.total == sum(time.cost.disk for time in times)


def test_a_budget_without_arithmetic_is_mbsu() -> None:
    """With infinite arithmetic every pass costs one reading: the measured-cost formula and MBSU are the same up to the cache."""
    way = budget(TARGET, DRAFTER, "llama.cpp", "q8_0", DeviceRates(1e11, float("inf"), ""))
    for length in LENGTHS:
        assert way.costs.v(length + 1, CONTEXT) == 1.0
        assert way.speedup(0.7, length) == pytest.approx(way.memory_bound(0.7, length), rel=0.01)
    assert way.byte_ratio == pytest.approx(DRAFTER.streamed_parameters / TARGET.streamed_parameters)
    weights = exported_bytes(TARGET, "q8_0", streamed=True)
    cache = 2 * CONTEXT * costs.cache_values(TARGET)
    assert way.plain_rate == pytest.approx(1e11 / (weights + cache), rel=1e-6)


def test_a_budget_without_bandwidth_never_pays() -> None:
    """Where products bind, a pass of n tokens costs n steps: nothing is gained."""
    way = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e18, 1e12, ""))
    assert way.costs.v(4, CONTEXT) == pytest.approx(4.0, rel=1e-6)
    assert [way.break_even(length) for length in LENGTHS] == [None] * len(LENGTHS)
    assert (way.least(LENGTHS), way.best(0.99)) == (None, (0, 1.0))


def test_drafts_stay_within_a_devices_limit() -> None:
    free = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e10, float("inf"), ""))
    tied = replace(free, longest=2)
    assert free.best(0.8)[0] > 4
    assert tied.best(0.8) == (2, free.speedup(0.8, 2))
    alone = tied.least((3, 4, 5))
    assert alone is None


def test_break_even_is_where_the_speedup_is_one() -> None:
    way = budget(TARGET, DRAFTER, "onnxruntime", "int4", DeviceRates(5e10, 5e11, ""))
    for length in LENGTHS:
        alpha = way.break_even(length)
        assert alpha is not None
        assert way.speedup(alpha, length) == pytest.approx(1.0, abs=1e-4)
    assert way.least(LENGTHS) == min((way.break_even(length), length) for length in LENGTHS)


def test_the_papers_acceptance() -> None:
    rate = rate_of(2.3, 3)
    assert predicted_block_efficiency(rate, 3) == pytest.approx(2.3)
    assert rate == pytest.approx(0.636, abs=0.001)


def test_every_profile_has_its_arithmetic() -> None:
    assert set(profiles()) <= set(ARITHMETIC)
    for one in profiles().values():
        rates = rates_of_profile(one, 0.5)
        assert rates.bandwidth == one.bandwidth_gb_s * 5e8
        assert one.memory in rates.source


def test_measured_costs_go_before_a_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert measured(TARGET, DRAFTER) == []
    table = Costs((200,), (tuple(0.1 * (1 + 0.1 * n) for n in range(8)),), (0.002,))
    how: dict[str, Any] = {"threads": 2, "flash_attention": None, "context_length": 512}
    keep_synthetic({"target": TARGET, "drafter": DRAFTER}, "onnxruntime", "int4", table, **how, seconds=5.0)
    other = replace(TARGET, layers=31)
    keep_synthetic({"target": other, "drafter": DRAFTER}, "onnxruntime", "int4", table, **how, seconds=5.0)
    [way] = measured(TARGET, DRAFTER)
    assert (way.measured, way.costs, way.context) == (True, table, 200)
    assert way.speedup(0.7, 3) == pytest.approx((1 - 0.7**4) / 0.3 / (3 * 0.02 + 1.3))
    out = planned(capsys, *PAPER)
    assert "Measured: 2 threads" in out
    assert "Speculation is " in out
    assert "budget" not in out
    [file] = [
        path
        for path in (cache_folder() / FOLDER).iterdir()
        if json.loads(path.read_text())["shapes"]["target"]["layers"] == 32
    ]
    value = json.loads(file.read_text())
    damages: list[dict[str, Any]] = [{"device": asdict(this_device()) | {"cpu": "another"}}, {"costs": None}]
    damages += [{"schema": 99}, {"subject": value["subject"] | {"engine": []}}]
    for damage in damages:
        file.write_text(json.dumps(value | damage))
        assert kept_for(TARGET, DRAFTER) == []
    file.write_text("{")
    assert kept_for(TARGET, DRAFTER) == []


@pytest.mark.llamacpp
def test_what_doctor_keeps_is_found(both: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    pair = open_pair(both, LoadOptions(engine="llama.cpp"))
    try:
        store_costs(pair, Costs((32,), ((1.0,) * 16,), (0.001,)), 1.5)
        shapes = [ModelShape(**role.shape) for role in (pair.manifest.target, pair.manifest.drafter)]
    finally:
        pair.close()
    found = measured(*shapes)
    assert [(way.name, way.costs.draft_seconds) for way in found] == [("llama.cpp q8_0", (0.001,))]


def test_fastest_counts_tokens_and_not_ratios() -> None:
    slow = budget(TARGET, DRAFTER, "llama.cpp", "f16", DeviceRates(1e10, float("inf"), ""))
    quick = budget(TARGET, DRAFTER, "llama.cpp", "q4_0", DeviceRates(1e10, 1e11, ""))
    assert slow.best(0.7)[1] > quick.best(0.7)[1]
    assert fastest([slow, quick], 0.7) is quick


def test_the_whole_report_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER, "--device", "laptop-cpu-x86")
    for words in (
        "6,738,415,616",
        "c by bytes streamed",
        "8 x A100-80GB",
        "600B",
        "break-even α",
        "MBSU",
        "α = 0.8",
        "at γ =",
        "GPU hours",
        "Speculation looks ",
        "edgespec bench --synthetic llama-2-7b-chat",
    ):
        assert words in out, words
    assert max(map(len, out.splitlines())) < 240


def test_json_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(tmp_path, *PAPER, "--device", "raspberry-pi", "--mfu", "0.4", "--alphas", "0.55")
    pretrain = found["stages"][0]
    assert pretrain["cost"]["tokens"] == 590_663 * 496 * 2048
    assert pretrain["seconds"] == pytest.approx(pretrain["cost"]["flops"] / (8 * 312e12 * 0.4))
    [way] = found["device"]["ways"]
    assert way["name"] == "llama.cpp q4_0"
    assert list(way["lengths"][2]["speedup"]) == ["0.55"]
    assert found["device"]["fits"] is (found["device"]["needed_bytes"] <= 5 * GIB)
    flops = sum(stage["cost"]["flops"] for stage in found["stages"])
    assert found["cost_ratios"]["parameters"] == pytest.approx(116_925_440 / 6_738_415_616)
    out = capsys.readouterr().out
    assert "\n".join(found["verdict"]) in out
    total = next(line.split() for line in out.splitlines() if line.startswith("in all"))
    assert total[2] == f"{flops:.2e}"


def test_verdicts_follow_the_figures(tmp_path: Path) -> None:
    pi = as_json(tmp_path, *PAPER, "--device", "raspberry-pi")
    gains = pi["device"]["ways"][0]["best"]
    rate = rate_of(2.3, 3)
    one = profiles()["raspberry-pi"]
    way = budget(TARGET, DRAFTER, one.engine, one.target, rates_of_profile(one, 0.6), one.max_draft_length)
    word = "looks worth it" if way.best(rate)[1] >= 1.3 else "looks hardly worth it"
    if way.best(rate)[1] < 1.05:
        word = "looks not worth it"
    assert word in pi["verdict"][0]
    assert gains["0.8"]["speedup"] >= gains["0.5"]["speedup"]
    tight = as_json(tmp_path, *PAPER[:-1], "1xT4", "--device", "laptop-cpu-x86")
    assert any("Memory does not suffice for pretrain, generate" in line for line in tight["verdict"])


def test_devices_that_cannot_share_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER[:-1], "12xH100", "--device", "laptop-cpu-x86")
    assert "12 were given and 8 can share the work" in out


@pytest.mark.parametrize("alias", [alias for alias in TARGETS if alias != "llama-2-7b-chat"])
def test_every_target_can_be_planned(alias: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Speculation " in planned(
        capsys, "plan", "--target", alias, "--gpus", "1xH100", "--device", "apple-silicon"
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--gpus", "8xA100-80G"), "did you mean 'A100-80GB'"),
        (("--device", "laptop-x86"), "did you mean 'laptop-cpu-x86'"),
        (("--recipe", "paper-llama"), "neither a file nor a shipped recipe"),
        (("--mfu", "1.5"), "mfu is 1.5; it must be at most 1.0"),
        (("--alphas", "0.5,2"), "alphas is 2.0"),
        (("--drafter.init", "checkpoint", "--drafter.checkpoint", "gone"), "'gone' is no folder"),
        (("--target", "nobody/nothing-7b"), "hf download nobody/nothing-7b config.json"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--target", "llama-2-7b-chat", "--gpus", "1xH100", "--device", "apple-silicon", *words])
        == 2
    )
    seen = capsys.readouterr().err
    assert error in seen
    assert seen.count("\n") == 1


def test_needs_no_torch_no_network_and_makes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, socket\nfor name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "def no(*_): raise OSError('no network here')\nsocket.socket.connect = no\n"
        "from edgespec.cli import main\n"
        "assert main(['plan', '--target', 'tiny-chat']) == 0\n"
        "sys.exit(main(['plan', '--target', 'llama-2-7b-chat', '--recipe', 'paper-llama-2-7b-chat']))"
    )
    environment = {"PYTHONPATH": PYTHONPATH, "EDGESPEC_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("; measured with numpy") == 2
    assert list(tmp_path.rglob("*")) == []


def test_a_plan_of_a_checkpoint_and_a_teacher(
    families: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ("--tune.steps", "5", "--tune.conversations", "a.jsonl", "--tune.teacher", str(families["qwen3"]))
    drafter = ("--drafter.init", "checkpoint", "--drafter.checkpoint", str(families["llama"]))
    out = planned(capsys, "plan", "--target", str(families["qwen2"]), "--gpus", "1xH100", *tune, *drafter)
    assert "tune" in out
    assert f"{shape_of_target(str(families['llama'])).parameters:,}" in out
    assert PROMPT_TOKENS == 128
    assert "prompts of 128 tokens" in out


def test_the_other_answers_take_their_own_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        ((), "target is missing"),
        (("--target", "tiny-chat", "--rehearsal.minutes", "1"), "--rehearsal.minutes belongs to --rehearse"),
        (("--target", "tiny-chat", "--rehearse", "--alphas", "0.5"), "--alphas says nothing to --rehearse"),
        (("--target", "tiny-chat", "--rehearse", "--devices"), "--rehearse says nothing to --devices"),
        (("--devices", "--gpus", "H100"), "--gpus says nothing to --devices"),
    ):
        assert main(["plan", *words]) == 2
        assert error in capsys.readouterr().err


def test_spans() -> None:
    assert [span(30.0), span(7200.0), span(86400.0 * 10), span(86400.0 * 365.25 * 40)] == [
        "30.0s",
        "2h 00m",
        "10.0 days",
        "40 years",
    ]


def test_plan_and_build_read_the_same_recipe() -> None:
    from edgespec.planning.plan import read_options
    from edgespec.verbs import build

    given = {"target": "tiny-chat", "seed": 3, "pretrain": {"steps": 7}}
    assert read_options(dict(given))[1] == build._read_options(dict(given))[0]
    assert isinstance(read_options({**given, "device": "this machine"})[1], Recipe)


PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_docs_show_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER, "--device", "laptop-cpu-x86")
    shown = [line[4:] for line in PAGE.splitlines() if line.startswith("    ")]
    start = shown.index(next(line for line in shown if line.startswith("On 8 x A100")))
    table = shown[start : shown.index(next(line for line in shown if line.startswith("Storage")))]
    printed = out[out.index("On 8 x") :]
    assert [line for line in printed.splitlines() if line][: len(table)] == table
    for words, figures in {
        ("--gpus", "8xH100"): ("39h 15m",),
        ("--gpus", "1xH100"): ("13.1 days",),
        ("--gpus", "1xA100-80GB", "--pretrain.steps", "5906", "--inference.dtype", "bfloat16"): (
            "52h 47m",
            "43.1 GiB",
        ),
    }.items():
        out = planned(capsys, *PAPER[:-2], *words, "--device", "laptop-cpu-x86")
        for figure in figures:
            assert figure in out
            assert figure in PAGE


def test_the_plans_of_the_docs_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    commands = PAGE.replace("\\\n", " ").splitlines()
    plans = [line.split() for line in commands if line.startswith("    edgespec plan --target")]
    assert len(plans) == 3
    for words in plans:
        assert planned(capsys, *words[1:], *(() if "--device" in words else ("--device", "apple-silicon")))
    (one_card,) = (words for words in plans if "1xRTX4090" in words)
    small = planned(capsys, *one_card[1:], "--device", "apple-silicon")
    assert "6.2 days" in small
    assert "47% of it generate" in small
    assert "(!)" not in small
