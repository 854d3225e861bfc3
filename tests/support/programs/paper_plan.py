"""The paper's target and drafter, and what `edgespec plan` prints of a build."""

from __future__ import annotations

import pytest

from edgespec.cli import main
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target

TARGET = shape_of_target("llama-2-7b-chat")
DRAFTER = derive(TARGET, DrafterOptions())
PAPER = ("plan", "--target", "llama-2-7b-chat", "--recipe", "paper-llama-2-7b-chat", "--gpus", "8xA100-80GB")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out
