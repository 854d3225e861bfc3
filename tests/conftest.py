"""Fixtures every test shares, such as a cache folder of its own; and marks for what costs much."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from once import of_the_run, once
from repository import REPOSITORY

COSTLY = {"trained": "training", "trained_command": "training", "small_build": "training"}


def pytest_configure(config: pytest.Config) -> None:
    """Every process of a run keeps to cores of its own: threads that wait for each other by spinning would take the other's.

    Hypothesis draws the same examples in every run; by default they are others each time, and a fifth of a second is all that one
    may take.
    """
    hypothesis.settings.load_profile("ci")
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, cores[number::count] or cores)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a fixture that trains trains; one with llama.cpp among its parameters runs it."""
    for item in items:
        for fixture in set(COSTLY) & set(getattr(item, "fixturenames", ())):
            item.add_marker(COSTLY[fixture])
        call = getattr(item, "callspec", None)
        if call is not None and any("llama.cpp" in str(value) for value in call.params.values()):
            item.add_marker("llamacpp")


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of all tests that make no own one: what edgespec makes once it makes once for them."""
    return of_the_run(tmp_path_factory) / "edgespec-home"


@pytest.fixture(scope="session", autouse=True)
def cache(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test touches the user's cache folder, config file or the network, nor does a fixture of a whole module.

    Where a test needs the costs of a pair, they are measured for a shorter time than in a chat: the models are tiny.
    """
    from edgespec_runtime.chooser import pair_schedule
    from edgespec_runtime.chooser.calibrate import CalibrateOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CONFIG", str(tmp_path_factory.getbasetemp() / "no-config.yaml"))
        patch.setenv("EDGESPEC_HOME", str(shared_home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # the servers of tests are on this machine: a user's proxy cannot reach them
        patch.setenv("no_proxy", "*")
        patch.setattr(pair_schedule, "QUICK", CalibrateOptions(seconds=0.3, contexts=(64,)))
        yield


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program runs: what is measured is kept, also where tests run beside others."""
    from edgespec_runtime.chooser import kept_costs

    monkeypatch.setattr(kept_costs, "free_share", lambda threads: 1.0)


@pytest.fixture
def steady(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the machine's own speed change: kept costs go on to hold."""
    from edgespec_runtime.chooser import kept_costs

    monkeypatch.setattr(kept_costs, "STALE", math.inf)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Development data beside the checkout; absent on a user's machine."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the development data folder ../shared is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a small random target and a noisy copy of it as drafter, ONNX fp32. Read-only."""

    def make(folder: Path) -> None:
        from edgespec_export.onnx.to_onnx import export_onnx
        from tiny_bundle import disturbed, make_bundle
        from tiny_models import make_model_folder

        target = make_model_folder(folder / "target")
        drafter = disturbed(target, folder / "drafter", noise=0.07)
        for model in (target, drafter):
            export_onnx(model, folder / f"{model.name}-onnx", "fp32")
        make_bundle(folder / "bundle", folder / "target-onnx", folder / "drafter-onnx", target)

    return once(tmp_path_factory, "pair", make) / "bundle"


@pytest.fixture(scope="module")
def pair(bundle: Path) -> Iterator[Any]:
    """`bundle`, opened."""
    from edgespec_runtime.pair.bundle import LoadOptions, open_pair

    opened = open_pair(bundle, LoadOptions(threads=1))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny target and a noisy copy of it for both engines. Read-only."""

    def make(folder: Path) -> None:
        from tiny_bundle import disturbed, exported_bundle
        from tiny_models import make_model_folder

        target = make_model_folder(folder / "target", context=128)
        exported_bundle(folder, target, disturbed(target, folder / "drafter", 0.07))

    return once(tmp_path_factory, "both", make) / "bundle"


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model folder of every family, with RoPE bases and embeddings that differ. Read-only."""
    settings: dict[str, dict[str, Any]] = {
        "llama": {"theta": 50000.0},
        "mistral": {"seed": 1, "tied": False},
        "qwen2": {"seed": 2, "theta": 1e6, "head_dim": 16, "intermediate": 192},  # rows of multiples of 64
        "qwen3": {"seed": 3, "theta": 1e6, "tied": False},
    }

    def make(folder: Path) -> None:
        from tiny_models import make_model_folder

        for family, options in settings.items():
            make_model_folder(folder / family, family, **options)

    folder = once(tmp_path_factory, "families", make)
    return {family: folder / family for family in settings}


@pytest.fixture(scope="session")
def small_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a target and `out`, a finished build of them. Copy `out`, and leave the data as they were."""

    def make(folder: Path) -> None:
        from small_build import command, write_data
        from tiny_models import make_model_folder

        from edgespec.cli import main

        write_data(folder)
        make_model_folder(folder / "target")
        assert main([*command(folder), "--out", str(folder / "out")]) == 0

    return once(tmp_path_factory, "small", make)


TRAINED = [  # every stage for real, each for seconds instead of minutes
    *("--pretrain.steps", "60", "--pretrain.context", "128", "--pretrain.batch-size", "8"),
    *("--pretrain.learning-rate", "3e-3", "--pretrain.warmup-steps", "5"),
    *("--distill.steps", "100", "--distill.context", "128", "--distill.batch-size", "8"),
    *("--distill.learning-rate", "3e-3", "--distill.warmup-steps", "5"),
    *("--generate.prompts", "192", "--generate.batch-size", "64", "--generate.max-new-tokens", "32"),
    *("--drafter.size-fraction", "0.2", "--export.verify-prompts", "3", "--export.acceptance-prompts", "6"),
    *("--evaluate.prompts", "24", "--evaluate.max-new-tokens", "32"),
]


@pytest.fixture(scope="session")
def trained_command(tmp_path_factory: pytest.TempPathFactory, shared_home: Path) -> list[str]:
    """The command that builds `trained`, of an offline target that learnt for seconds."""
    from edgespec_recipes.target_names.tiny_chat import TinyChatOptions, build_tiny_chat

    shape = {"hidden": 128, "layers": 2, "intermediate": 384, "heads": 2, "kv_heads": 1, "vocab_size": 1024}
    training = {"steps": 150, "context": 256, "batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 15}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(shared_home))
        target = build_tiny_chat(TinyChatOptions(**shape, **training))  # made once: it locks its folder
    out = of_the_run(tmp_path_factory) / "once" / "trained" / "out"
    return ["build-drafter", "--target", str(target), "--out", str(out), *TRAINED]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, shared_home: Path, trained_command: list[str]) -> Path:
    """The folder of a whole build. Read-only."""

    def make(folder: Path) -> None:
        from edgespec.cli import main

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGESPEC_HOME", str(shared_home))
            assert main(trained_command) == 0

    return once(tmp_path_factory, "trained", make) / "out"
