"""Fixtures every test shares, such as a cache folder of its own; and marks for what costs much."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from repository import REPOSITORY

COSTLY = {"trained": "training", "trained_command": "training", "small_build": "training"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a fixture that trains trains; one with llama.cpp among its parameters runs it."""
    for item in items:
        for fixture in set(COSTLY) & set(getattr(item, "fixturenames", ())):
            item.add_marker(COSTLY[fixture])
        call = getattr(item, "callspec", None)
        if call is not None and any("llama.cpp" in str(value) for value in call.params.values()):
            item.add_marker("llamacpp")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache folder, config file or the network."""
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path_factory.getbasetemp() / "no-config.yaml"))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path_factory.getbasetemp() / "edgespec-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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
    from edgespec_export.onnx.to_onnx import export_onnx
    from tiny_bundle import disturbed, make_bundle
    from tiny_models import make_model_folder

    folder = tmp_path_factory.mktemp("pair")
    target = make_model_folder(folder / "target")
    drafter = disturbed(target, folder / "drafter", noise=0.07)
    for model in (target, drafter):
        export_onnx(model, folder / f"{model.name}-onnx", "fp32")
    return make_bundle(folder / "bundle", folder / "target-onnx", folder / "drafter-onnx", target)


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny target and a noisy copy of it for both engines. Read-only."""
    from tiny_bundle import disturbed, exported_bundle
    from tiny_models import make_model_folder

    root = tmp_path_factory.mktemp("both")
    target = make_model_folder(root / "target", context=128)
    return exported_bundle(root, target, disturbed(target, root / "drafter", 0.07))


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model folder of every family, with RoPE bases and embeddings that differ. Read-only."""
    from tiny_models import make_model_folder

    root = tmp_path_factory.mktemp("families")
    return {
        "llama": make_model_folder(root / "llama", "llama", theta=50000.0),
        "mistral": make_model_folder(root / "mistral", "mistral", seed=1, tied=False),
        "qwen2": make_model_folder(root / "qwen2", "qwen2", seed=2, theta=1e6, head_dim=16),
        "qwen3": make_model_folder(root / "qwen3", "qwen3", seed=3, theta=1e6, tied=False),
    }


@pytest.fixture(scope="session")
def small_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a target and `out`, a finished build of them. Copy `out`, and leave the data as they were."""
    from small_build import command, write_data
    from tiny_models import make_model_folder

    from edgespec.cli import main

    folder = tmp_path_factory.mktemp("small")
    write_data(folder)
    make_model_folder(folder / "target")
    assert main([*command(folder), "--out", str(folder / "out")]) == 0
    return folder


SMALL_BUILD = [
    *("--pretrain.batch-size", "8", "--pretrain.learning-rate", "3e-3", "--pretrain.warmup-steps", "5"),
    *("--distill.batch-size", "8", "--distill.learning-rate", "3e-3", "--distill.warmup-steps", "5"),
    *("--generate.max-new-tokens", "32"),
]


@pytest.fixture(scope="session")
def trained_command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that built `trained`: every stage for real, each for seconds instead of minutes."""
    from edgespec_recipes.offline_target.tiny_chat import TinyChatOptions, build_tiny_chat

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.getbasetemp() / "edgespec-home"))
        target = build_tiny_chat(
            TinyChatOptions(
                vocab_size=1024,
                hidden=128,
                layers=2,
                intermediate=384,
                heads=2,
                kv_heads=1,
                steps=150,
                context=256,
                batch_size=8,
                learning_rate=3e-3,
                warmup_steps=15,
            )
        )
    options = [
        *SMALL_BUILD,
        *(
            "--pretrain.steps",
            "60",
            "--pretrain.context",
            "128",
            "--distill.steps",
            "100",
            "--distill.context",
            "128",
        ),
        *("--generate.prompts", "192", "--generate.batch-size", "64", "--drafter.size-fraction", "0.2"),
        *("--evaluate.prompts", "24", "--evaluate.max-new-tokens", "32", "--export.verify-prompts", "3"),
    ]
    return ["build-drafter", "--target", str(target), "--out", str(folder / "out"), *options]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, trained_command: list[str]) -> Path:
    """The folder of a whole build. Read-only."""
    from edgespec.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.getbasetemp() / "edgespec-home"))
        assert main(trained_command) == 0
    return Path(trained_command[trained_command.index("--out") + 1])
