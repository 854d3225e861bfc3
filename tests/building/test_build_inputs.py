"""What a build is to read is looked at before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model_folder

from edgespec.cli import main


@pytest.mark.parametrize("knob", ["--generate.instructions", "--evaluate.prompts-file"])
@pytest.mark.parametrize("content", ["", '{"foo": 1}\n'])
def test_prompts_that_cannot_be_read_stop_a_build_before_it_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], knob: str, content: str
) -> None:
    target = make_model_folder(tmp_path / "target")
    file = tmp_path / "instructions.jsonl"
    file.write_text(content)
    out = tmp_path / "build"
    assert main(["build-drafter", "--target", str(target), "--out", str(out), knob, str(file)]) == 2
    assert "instructions.jsonl" in capfd.readouterr().err
    assert not (out / "pretrain").exists()


def test_a_context_that_the_target_does_not_hold_stops_a_build_at_its_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not at `distill`, hours later."""
    target, out = make_model_folder(tmp_path / "target"), tmp_path / "build"
    given = ["--pretrain.context", "128", "--distill.context", "257"]
    assert main(["build-drafter", "--target", str(target), "--out", str(out), *given]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "edgespec: distill.context is 257; the target's context is 256 tokens: give at most that"
    assert not (out / "pretrain").exists()
    # another value in the same folder is read, and not taken for another build's
    given = ["--pretrain.context", "300", "--distill.context", "256"]
    assert main(["build-drafter", "--target", str(target), "--out", str(out), *given]) == 2
    assert "edgespec: pretrain.context is 300" in capfd.readouterr().err
