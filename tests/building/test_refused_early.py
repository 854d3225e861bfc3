"""What no training could begin with is refused at the plan, before the target writes for hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_build import command, head_command, write_data
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.files import write_json
from edgespec.recipe.schema import SELF_PROMPTS, SELF_TEXT

PHI3: dict[str, Any] = {"family": "phi3", "head_dim": 16, "tied": False}


@pytest.mark.parametrize(
    ("target", "kind", "given", "said"),
    [
        ({"family": "qwen3"}, "model", "--drafter.init subclone", "model with norms in its heads"),
        (PHI3, "model", "--drafter.init subclone", "'phi3' model of another build"),
        ({}, "model", "--drafter.vocabulary 40", "44 special ones that are always kept: give 45 to 511"),
        ({}, "head", "--drafter.vocabulary 40", "44 special ones that are always kept: give 45 to 511"),
        (PHI3, "head", "", "those of phi3 have queries, keys and values in one matrix"),
    ],
)
def test_it_is_refused_before_the_target_writes(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    target: dict[str, Any],
    kind: str,
    given: str,
    said: str,
) -> None:
    folder, out = make_model_folder(tmp_path / "target", **target), tmp_path / "out"
    ends = [2, *range(4, 44)]
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    write_data(tmp_path)
    words = command(tmp_path)
    if kind == "head":
        words = head_command(tmp_path).replace(str(tmp_path / "tiny.gguf"), str(folder)).split()
    own = "--pretrain.text self --evaluate.prompts-file self --generate.instructions self"
    more = f"{given} {own} --inference.source torch --out {out}"
    assert main([*words, *more.split()]) == 2
    assert said in capfd.readouterr().err
    made = {path.name for path in out.iterdir()}
    assert "target" in made
    assert not made & {SELF_TEXT, SELF_PROMPTS, "pretrain", "generate"}
