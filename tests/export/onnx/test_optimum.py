"""optimum-onnx's export where its environment is not: what is refused before it, and that the environment fits edgespec.

The export itself runs in that environment: `python3 make.py optimum` (tests/support/models/optimum_program.py), a step of CI.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from edgespec_export.onnx.optimum_graph import check_heads
from packaging.requirements import Requirement
from packaging.version import Version
from repository import REPOSITORY

import make
from edgespec.cli import main
from edgespec.core.errors import InputError


def pins(name: str) -> dict[str, Version]:
    lines = (REPOSITORY / name).read_text().splitlines()
    found = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): Version(version) for package, version in found}


def test_its_environment_has_all_that_edgespec_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extra = [Requirement(line) for line in project["optional-dependencies"]["optimum"]]
    needed = [*map(Requirement, project["dependencies"]), *(one for one in extra if one.name != "torch")]
    there = pins("constraints-optimum.txt")
    for requirement in needed:
        assert there[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement
    assert Requirement("torch==2.13.0") in extra
    assert there["transformers"] < Version("4.58")  # what optimum-onnx 0.1.0 takes
    assert pins("constraints.txt")["transformers"] >= Version("5")  # why it has an environment of its own
    others = [lines for name, lines in project["optional-dependencies"].items() if name != "optimum"]
    assert not any("optimum" in line for lines in others for line in lines)


def test_ci_runs_it() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert re.search(r"^python3 make\.py test\npython3 make\.py optimum$", script, re.MULTILINE)
    assert "optimum" in make.COMMANDS


def test_without_the_package(
    families: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("optimum-onnx")
    assert main(["export-optimum", str(families["qwen2"]), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "needs optimum-onnx" in error
    assert error.endswith(": in the checkout of edgespec, python3 make.py optimum MODEL OUT\n")
    assert "pip install" not in error  # it would put an older transformers here
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(
    tmp_path: Path,
    families: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = str(tmp_path / "out")
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (str(tmp_path), "~"):
        assert main(["export-optimum", model, out]) == 2
        assert f"{tmp_path} has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["export-optimum", str(tmp_path), out]) == 2
    assert "has no *.safetensors" in capsys.readouterr().err
    assert main(["export-optimum", str(families["llama"]), out]) == 2  # hidden 64, 4 heads of 32
    assert "has heads of 32, and optimum-onnx 0.1.0 takes hidden size / heads = 16" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for folder in (str(tmp_path), "."):  # it would be deleted
        assert main(["export-optimum", str(families["qwen2"]), folder]) == 2
        assert f"{tmp_path} holds other files and no model.onnx" in capsys.readouterr().err
    config = json.loads((families["llama"] / "config.json").read_text())
    check_heads(config | {"head_dim": 16}, tmp_path)
    check_heads(config | {"head_dim": None}, tmp_path)
    for family in ("gemma", "gemma3_text"):
        check_heads(config | {"model_type": family}, tmp_path)
    with pytest.raises(InputError, match="use edgespec's own ONNX export"):
        check_heads(config | {"model_type": "qwen3"}, tmp_path)


def test_the_folder_of_the_model_itself_is_not_replaced(
    families: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though an earlier export by another program lies in it."""
    model = shutil.copytree(families["qwen2"], tmp_path / "above" / "model")
    for out in (model, model.parent):
        (out / "model.onnx").touch()
        assert main(["export-optimum", str(model), str(out)]) == 2
        error = capsys.readouterr().err
        assert f"{out} is or holds the model's folder {model}, and would be replaced" in error
    assert (model / "model.safetensors").is_file()
