"""What a build is to read is looked at before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model_folder

from edgespec.cli import main


@pytest.mark.parametrize("knob", ["--generate.instructions", "--evaluate.prompts-file"])
@pytest.mark.parametrize(
    ("content", "words"), [("", "instructions.jsonl"), ('{"foo": 1}\n', "instructions.jsonl")]
)
def test_prompts_that_cannot_be_read_stop_a_build_before_it_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], knob: str, content: str, words: str
) -> None:
    target = make_model_folder(tmp_path / "target")
    file = tmp_path / "instructions.jsonl"
    file.write_text(content)
    out = tmp_path / "build"
    assert main(["build-drafter", "--target", str(target), "--out", str(out), knob, str(file)]) == 2
    assert words in capfd.readouterr().err
    assert not (out / "pretrain").exists()
