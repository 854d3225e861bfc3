"""make.py: the last lines of the demo say what the bench found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import make
from edgespec.cli import main


def test_the_demos_last_lines_are_the_benchs(
    small_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    few = ["--max-prompts", "2", "--max-new-tokens", "8", "--seconds", "1", "--draft-lengths", "1,2"]
    assert main(["bench", str(small_build / "out" / "bundle"), *few, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = make.in_short(json.loads(file.read_text(encoding="utf-8")))
    assert found.startswith(f"{make.PAIR} on onnxruntime fp32: ")
    assert printed.strip().splitlines()[-1] in found
    same = "Replies with the same tokens as plain decoding, at every draft length: "
    assert f"at every draft length: {printed.partition(same)[2].splitlines()[0]}" in found
    assert "--mode exact" not in found  # an fp32 pair keeps every token
