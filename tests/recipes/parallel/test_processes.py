"""Which accelerator a process computes on, and how several processes speak."""

from __future__ import annotations

import os

import pytest
import torch
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.sharding import trainer_settings

from edgespec.recipe.shipped import load_recipe, recipe_file


@pytest.mark.parametrize(
    ("gpus", "rank", "world", "device", "backend"),
    [
        (0, 1, 2, "cpu", "gloo"),
        (4, 3, 4, "cuda:3", "cuda:nccl,cpu:gloo"),
        (1, 0, 1, "cuda:0", "cuda:nccl,cpu:gloo"),
        (1, 2, 3, "cuda:0", "gloo"),  # NCCL refuses two processes on one GPU
        (2, 3, 4, "cuda:1", "gloo"),
    ],
)
def test_processes_share_what_accelerators_there_are(
    gpus: int, rank: int, world: int, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "false")
    assert processes.device() == torch.device(device)
    assert processes.backend() == backend
    assert trainer_settings()["use_cpu"] is (device == "cpu")  # also where torch has Apple's GPU
    # accelerate would give DDP the GPU with the process's number
    own = os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "true"
    assert own is (gpus > 0 and backend == "gloo")


@pytest.mark.parametrize(("code", "seen"), [(0, "all leave together"), (70, 70)])
def test_a_process_that_fails_leaves_alone(code: int, seen: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's end is one of all processes, and the others wait for this one."""
    left: list[object] = []
    monkeypatch.setattr(processes, "_failed", 0)
    monkeypatch.setattr(processes.dist, "destroy_process_group", lambda: left.append("all leave together"))
    monkeypatch.setattr(os, "_exit", left.append)
    processes.fail(code)
    processes._leave()
    assert left == [seen]


def test_the_others_wait_while_one_reads_the_papers_text() -> None:
    """It turns a million tokens a second into numbers. A socket counts its milliseconds in 31 bits."""
    recipe = load_recipe(recipe_file("paper-llama-2-7b-chat"))["pretrain"]
    tokens = recipe["steps"] * recipe["batch_size"] * recipe["context"]
    assert tokens / 1e6 < processes.PATIENCE.total_seconds() < 2**31 / 1000
