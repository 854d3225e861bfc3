"""The machine: what tells it from another one, what other programs leave of it, how fast it reads memory."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from edgespec_runtime.chooser.kept_costs import BUSY
from edgespec_runtime.engines import device, engine
from edgespec_runtime.engines.device import (
    Device,
    cpu_name,
    engine_version,
    free_share,
    read_bandwidth,
    this_device,
)

DEVICE = Device("A processor", 2, 16, "Linux x86_64")


def test_a_device_says_what_it_is() -> None:
    assert this_device() == this_device()
    assert this_device().cores >= 1
    assert str(DEVICE) == "A processor, 2 cores, 16 GiB, Linux x86_64"
    assert str(replace(DEVICE, memory_gib=0)) == "A processor, 2 cores, Linux x86_64"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (["processor\t: 0", "model\t: 85", "model name\t: A  processor", "flags\t: fpu"], "A processor"),
        (["CPU implementer\t: 0x41", "CPU part\t: 0xd0c", "CPU part\t: 0xd4f"], "aarch64 0x41 0xd0c"),
        (["CPU part\t: 0xd08", "Hardware\t: BCM2835", "Model\t: Raspberry Pi 4"], "Raspberry Pi 4"),
        (["processor\t: 0", "isa\t: rv64"], "aarch64"),
    ],
)
def test_a_processors_name_on_linux(said: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are kept by it: two processors must not have one name."""
    monkeypatch.setattr(device, "_cpu_info", lambda: said)
    monkeypatch.setattr(device.platform, "processor", lambda: "")
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    assert cpu_name() == name


@pytest.mark.skipif(os.name != "posix", reason="a program as POSIX has them")
def test_a_processors_name_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sysctl"
    program.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M2 Max"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(device, "_cpu_info", list)
    device._apple_name.cache_clear()
    assert cpu_name() == "Apple M2 Max"
    device._apple_name.cache_clear()


@pytest.mark.parametrize(("limit", "threads"), [(None, 64), (1.5, 2), (0.5, 1), (100.0, 64)])
def test_a_containers_limit_bounds_the_threads(
    limit: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(engine, "processor_limit", lambda: limit)
    assert engine.default_threads() == this_device().cores == threads


def test_static_graphs_have_the_version_of_what_runs_them() -> None:
    """It is part of what kept costs are found by."""
    assert engine_version("static") == engine_version("onnxruntime") != ""
    assert engine_version("no such engine") == ""


def test_busy_threads_get_a_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as many threads as processors cannot have one each; what a container withholds, no other program has."""
    monkeypatch.setattr(device, "processor_limit", lambda: None)
    cores = this_device().cores
    assert 0.0 < free_share(8 * cores, seconds=0.1) < 0.3
    assert 0.0 < free_share(1, seconds=0.1) <= 1.0
    monkeypatch.setattr(device, "processor_limit", lambda: 0.25)
    assert free_share(8 * cores, seconds=0.1) > 0.5


def test_threads_of_this_process_that_do_other_work_hold_processors_too() -> None:
    """Another pair that computes: costs that are measured beside it are not kept."""
    cores, done = this_device().cores, Event()

    def compute() -> None:
        while not done.is_set():
            hashlib.sha256(bytes(2**20))

    others = [Thread(target=compute) for _ in range(2 * cores)]
    for other in others:
        other.start()
    try:
        assert free_share(cores) < BUSY
    finally:
        done.set()
        for other in others:
            other.join()


def test_threads_that_spin_behind_a_pass_are_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's held a fifth of the processors: no chat there kept its costs. No clock is looked at before they sleep."""
    slept: list[float] = []

    def after_sleep(clock: Callable[[], float]) -> float:
        assert slept == [device.SPINNING]
        return clock()

    monkeypatch.setattr(device, "sleep", slept.append)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(device, name, partial(after_sleep, getattr(device, name)))
    assert 0.0 < free_share(1, seconds=0.1) <= 1.0


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < read_bandwidth(2, size=2**24 + 4) < 1e13


@pytest.mark.parametrize(("free", "taken"), [(2**25, 2**23), (0, 2**21), (None, 2**24), (2**40, 2**24)])
def test_a_read_takes_no_memory_that_others_need(
    free: int | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def ones(count: int, dtype: type) -> np.ndarray:
        made.append(np.ones(count, dtype))
        return made[0]

    monkeypatch.setattr(device, "free_memory", lambda: free)
    with monkeypatch.context() as patch:
        patch.setattr(device, "np", SimpleNamespace(ones=ones, int32=np.int32, array_split=np.array_split))
        read_bandwidth(2, size=2**24)
    assert [values.nbytes for values in made] == [taken]
