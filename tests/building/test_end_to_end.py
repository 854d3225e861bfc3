"""The whole way at a small size: a trained offline target, a drafter, four files each, a bundle, every verb."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from edgespec.cli import main
from edgespec.core.errors import CheckFailed
from edgespec.core.manifest import MANIFEST, open_manifest

STAGES = ("target", "plan", "pretrain", "generate", "distill", "evaluate", "export", "verify", "pack")


def test_every_stage_leaves_its_record(trained: Path) -> None:
    for stage in STAGES:
        record = json.loads((trained / stage / "stage.json").read_text())
        assert record["seconds"] >= 0
        assert record["versions"]["torch"] == torch.__version__
    assert "build-drafter" in (trained / "command.txt").read_text()
    assert not list(trained.rglob("*.tmp"))
    assert not list(trained.rglob("*.bin.*"))


def test_evaluation_holds_what_it_should(trained: Path) -> None:
    evaluation = json.loads((trained / "evaluate" / "evaluation.json").read_text())
    settings = evaluation["settings"]
    assert {(s["drafter"], s["draft_length"], s["temperature"]) for s in settings} == {
        (drafter, gamma, heat)
        for drafter in ("pretrained", "distilled")
        for gamma in (3, 5)
        for heat in (0.0, 0.6)
    }
    for setting in settings:
        tau, low, high = setting["metrics"]["tau"]
        assert 1 <= low <= tau <= high <= setting["draft_length"] + 1
    # even this short distillation on the target's own words helps, all settings taken together
    gains = [comparison["tau_difference"][0] for comparison in evaluation["comparisons"]]
    assert sum(gains) / len(gains) > 0


def test_bundle_opens_and_says_where_it_comes_from(trained: Path) -> None:
    manifest = open_manifest(trained / "bundle")
    assert manifest.pairs() == [
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int4"),
        ("llama.cpp", "f16"),
        ("llama.cpp", "q8_0"),
    ]
    assert 0 < manifest.cost_ratio["parameters"] < 1
    assert manifest.provenance["recipe"]["distill"]["divergence"] == "fkl"
    assert manifest.metrics["comparisons"]


def test_same_command_again_does_nothing_twice(trained: Path, trained_command: list[str]) -> None:
    def times() -> dict[Path, int]:
        files = (path for path in trained.rglob("*") if path.is_file() and path.name != "command.txt")
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    assert main(trained_command) == 0
    assert times() == before


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the build to damage."""
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.fixture
def command(trained: Path, trained_command: list[str], copy: Path) -> list[str]:
    """The build's command, of the copy."""
    return [str(copy) if word == str(trained) else word for word in trained_command]


@pytest.mark.parametrize("damage", ["manifest", "weights", "folder"])
def test_a_bundle_that_is_not_whole_is_packed_again(copy: Path, command: list[str], damage: str) -> None:
    if damage == "manifest":
        (copy / "bundle" / MANIFEST).unlink()
    elif damage == "weights":
        largest = max((copy / "bundle").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
        os.truncate(largest, largest.stat().st_size - 5)
    else:
        shutil.rmtree(copy / "bundle")
    assert main(command) == 0
    open_manifest(copy / "bundle")


def test_a_damaged_export_fails_with_exit_code_1(
    copy: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(
        copy / "export" / "drafter" / "gguf" / "drafter-f16.gguf",
        copy / "export" / "target" / "gguf" / "target-f16.gguf",
    )
    (copy / "verify" / "stage.json").unlink()
    assert main(command) == CheckFailed.exit_code == 1
    error = capsys.readouterr().err
    assert "target f16" in error
    assert "BROKEN" in error or "broken" in error


def test_generate_and_bench(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(trained / "bundle")
    assert main(["generate", bundle, "What does os.path.join do?", "--max-new-tokens", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    result, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = [
        *("--max-prompts", "3", "--max-new-tokens", "16", "--draft-lengths", "1,3", "--json", str(result)),
        *("--plot", str(plot)),
    ]
    assert main(["bench", bundle, *arguments]) == 0
    assert "γ" in capsys.readouterr().out
    assert json.loads(result.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
