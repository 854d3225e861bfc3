"""Stages of a build, called one at a time: what they take of their data, and what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from edgespec_recipes.data.prompts import encode_prompt
from edgespec_recipes.models.loading import load_tokenizer
from tiny_models import make_model_folder

from edgespec.building.pipeline import Build
from edgespec.building.pipeline_export import ExportStages, Source
from edgespec.core.errors import InputError
from edgespec.core.files import write_json, write_jsonl
from edgespec.recipe.schema import EvaluateOptions, GenerateOptions, Recipe
from edgespec.recipe.targets import FoundTarget

TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "target")


def test_held_out_prompts_that_the_template_refuses_are_verified_joined(target: Path, tmp_path: Path) -> None:
    (target / "chat_template.jinja").write_text(TURNS)
    asked = [
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "user", "content": "there"}],
        [{"role": "user", "content": "Yo"}],
    ]
    write_jsonl(tmp_path / "held.jsonl", [{"messages": messages} for messages in asked])
    held_out = EvaluateOptions(prompts_file=str(tmp_path / "held.jsonl"))
    stages = ExportStages(Recipe(target=str(target), evaluate=held_out), tmp_path / "out")
    stages.source = Source(FoundTarget("t", target, "s"), target, stages.recipe)
    tokenizer = load_tokenizer(target)
    assert stages._calibration_rows() == [encode_prompt(tokenizer, messages) for messages in asked]
    said = [[message["content"] for message in messages] for messages in stages._held_out(16)]
    assert said == [["Be kind.\n\nHi"], ["Hi\n\nthere"], ["Yo"]]


def test_a_target_that_was_moved_is_put_back_and_one_that_moved_along_is_found_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is noted as a whole path. A name such as models/mine would else be asked of the hub."""
    monkeypatch.chdir(tmp_path)
    build = Build(Recipe(target=target.name), tmp_path / "out")
    assert build._find("target", target.name).folder == target
    (tmp_path / "new").mkdir()
    target.rename(tmp_path / "new" / target.name)
    with pytest.raises(InputError, match="target is gone; put it back and run the same command again"):
        build._find("target", target.name)
    monkeypatch.chdir(tmp_path / "new")
    with pytest.raises(InputError, match=r"target is gone; remove .*target and run the same command again"):
        build._find("target", target.name)
    shutil.rmtree(tmp_path / "out" / "target")
    assert build._find("target", target.name).folder == tmp_path / "new" / target.name


@pytest.mark.parametrize("ends", [True, False])
def test_responses_that_were_cut_are_told(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    """Of a target every token of which ends a reply, and of one that does not write such a token."""
    write_json(target / "generation_config.json", {"eos_token_id": list(range(512)) if ends else 3})
    write_jsonl(tmp_path / "asked.jsonl", [{"instruction": "Say"}])
    how = GenerateOptions(
        instructions=(str(tmp_path / "asked.jsonl"),), prompts=3, max_new_tokens=2, temperatures=(0.0,), system_prompts=("",)
    )  # fmt: skip
    recipe = Recipe(target=str(target), generate=how)
    Build(recipe, tmp_path / "out")._write_responses(target, recipe)
    told = capsys.readouterr().out
    assert ("Note: 0 of 3 responses ended within 2 tokens" in told) is not ends
    assert ("--generate.max-new-tokens" in told) is not ends
