"""Time, memory and disk of the stages of a build, against figures computed by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from paper_plan import DRAFTER, TARGET
from repository import REPOSITORY

from edgespec.planning.estimate import GPU_LOGITS, LOGIT_COPIES, LOGITS, disk_peak
from edgespec.planning.export_costs import passing_bytes
from edgespec.planning.hardware import GIB, Hardware
from edgespec.planning.plan_stages import (
    ON_HOST,
    TOGETHER,
    StageTime,
    for_processes,
    stage_times,
    storage,
    usable,
)
from edgespec.recipe.read import resolve

SHARES = 0.5, 0.25  # of arithmetic and of bandwidth
ROUND = Hardware("round", 4, 1e12, 1e11, 64 * GIB)


def timed(values: dict[str, Any], hardware: Hardware = ROUND) -> dict[str, StageTime]:
    """Every stage of a recipe by name."""
    recipe = resolve({"target": "llama-2-7b-chat", **values}, {})
    return {time.cost.stage: time for time in stage_times(recipe, TARGET, DRAFTER, hardware, *SHARES)}


def test_training_time_is_flops_over_the_share_of_the_peak_of_all() -> None:
    stages = timed({})
    pretrain, evaluate = stages["pretrain"], stages["evaluate"]
    assert pretrain.seconds == pytest.approx(pretrain.cost.flops / (4 * 1e12 * 0.5))
    assert (pretrain.devices, evaluate.devices) == (4, 1)  # the evaluation is one process's
    again = timed({}, replace(ROUND, measured=True))["pretrain"]
    assert again.seconds == pytest.approx(pretrain.seconds / 2)  # a measured rate is no peak


def test_generation_waits_for_the_weights() -> None:
    values = {"prompts": 80, "batch_size": 4, "max_new_tokens": 100}
    fast = replace(ROUND, flops=1e18)
    found = timed({"generate": values}, fast)["generate"]
    steps = 80 / (4 * 4) * 100
    cache = 4 * 2 * TARGET.layers * TARGET.kv_heads * TARGET.head_dim * 4 * (128 + 50)
    by_hand = steps * (4 * TARGET.streamed_parameters + cache) / (1e11 * 0.25)
    assert (found.binds, found.seconds) == ("memory", pytest.approx(by_hand, rel=1e-6))
    less = timed({"generate": values, "inference": {"dtype": "bfloat16"}}, fast)["generate"]
    assert 0.5 * found.seconds < less.seconds < 0.6 * found.seconds
    assert found.memory - less.memory == 2 * TARGET.parameters
    spread = timed({"generate": values, "inference": {"max_memory": "auto"}}, fast)["generate"]
    assert spread.memory < less.memory
    assert spread.seconds == found.seconds  # every weight is read all the same


def test_a_server_generates_in_its_own_time() -> None:
    values = {"inference": {"source": "server", "url": "http://127.0.0.1:8000"}}
    stored = {"distill": {"target_side": "stored", "text_fraction": 0.0}}
    there, here = timed({**stored, **values}), timed(stored)
    assert [there[name].seconds for name in ("generate", "store")] == [0.0, 0.0]
    assert there["evaluate"].seconds == here["evaluate"].seconds


def test_each_process_holds_its_share_of_a_batch() -> None:
    values = {"pretrain": {"batch_size": 32}, "distill": {"micro_batch_size": 2}}
    shared = for_processes(resolve({"target": "llama-2-7b-chat", **values}, {}), 8)
    assert (shared.pretrain.micro_batch_size, shared.distill.micro_batch_size) == (4, 2)
    one, many = (timed(values, replace(ROUND, count=count)) for count in (1, 8))
    assert many["pretrain"].memory < one["pretrain"].memory
    assert many["pretrain"].cost.flops == one["pretrain"].cost.flops
    assert not timed(values, replace(ROUND, memory=20 * GIB))["generate"].fits


def test_a_gpu_computes_more_logits_at_once() -> None:
    values = {"pretrain": {"batch_size": 32, "context": 512}}
    gpu, machine = (timed(values, replace(ROUND, measured=measured)) for measured in (False, True))
    assert gpu["pretrain"].memory - machine["pretrain"].memory == 4 * LOGIT_COPIES * (GPU_LOGITS - LOGITS)
    assert gpu["generate"].memory == machine["generate"].memory
    assert not timed(values, replace(ROUND, memory=gpu["pretrain"].memory - 1))["pretrain"].fits


def test_how_many_devices_can_share_the_batches() -> None:
    paper = resolve(
        {"target": "llama-2-7b-chat", "pretrain": {"batch_size": 496}, "distill": {"batch_size": 40}}, {}
    )
    assert [usable(paper, count) for count in (1, 2, 3, 8, 16, 32)] == [1, 2, 2, 8, 8, 8]
    distilled = resolve(
        {"target": "llama-2-7b-chat", "pretrain": {"steps": 0}, "distill": {"batch_size": 40}}, {}
    )
    assert usable(distilled, 32) == 20


def test_what_the_rooms_do_is_what_is_timed() -> None:
    from edgespec.recipe import schema as knobs

    building = REPOSITORY / "edgespec" / "building"
    pipeline = "".join(path.read_text(encoding="utf-8") for path in sorted(building.glob("pipeline*.py")))
    names = re.findall(r'self\.(?:stage|_write_instructions)\(\s*"?(\w+)', pipeline)
    stages = {getattr(knobs, name, name) for name in names}
    stages.remove("stage")  # of methods whose callers name it
    assert stages - {*TOGETHER} == {"data", "plan", "evaluate", *ON_HOST}
    assert {*TOGETHER} < stages


def test_storage_adds_up() -> None:
    times = [*timed({}).values()]
    there, here = storage(times, TARGET, hub=True), storage(times, TARGET, hub=False)
    assert there.total - here.total == 2 * TARGET.parameters
    assert here.total == sum(time.cost.disk for time in times)
    narrow = [*timed({"export": {"onnx": [], "gguf": ["q4_k_m"]}, "device": ""}).values()]
    found, files = storage(narrow, TARGET, hub=False), passing_bytes(TARGET, "llama.cpp", "q4_k_m")
    assert found.passing == files - found.bundle  # the bundle takes the room of the F16 file
    assert found.total == disk_peak(time.cost for time in narrow)
