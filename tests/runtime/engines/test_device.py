"""The machine: what tells it from another one, what other programs leave of it, how fast it reads memory."""

from __future__ import annotations

from edgespec_runtime.engines.device import Device, engine_version, free_share, read_bandwidth, this_device

DEVICE = Device("A processor", 2, 16, "Linux x86_64")


def test_a_device_says_what_it_is() -> None:
    assert this_device() == this_device()
    assert this_device().cores >= 1
    assert str(DEVICE) == "A processor, 2 cores, 16 GiB, Linux x86_64"


def test_static_graphs_have_the_version_of_what_runs_them() -> None:
    """It is part of what kept costs are found by."""
    assert engine_version("static") == engine_version("onnxruntime") != ""
    assert engine_version("no such engine") == ""


def test_busy_threads_get_a_share_of_the_processors() -> None:
    """Eight times as many threads as processors cannot have one each."""
    cores = this_device().cores
    assert 0.0 < free_share(8 * cores, seconds=0.1) < 0.3
    assert 0.0 < free_share(1, seconds=0.1) <= 1.0


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < read_bandwidth(2, size=2**24 + 4) < 1e13
