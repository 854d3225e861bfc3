"""Shapes of targets without a download: the table against published counts, made targets, folders, the hub's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from edgespec_recipes.target_names.tiny_chat import new_model, tiny_chat_options
from repository import REPOSITORY

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.core.table import count
from edgespec.recipe.targets import TARGETS, find_shape, is_hub_id, shape_of_target

PUBLISHED = {  # what the hub counts in the weights' own files
    "llama-2-7b-chat": 6_738_415_616,
    "llama-2-13b-chat": 13_015_864_320,
    "tinyllama-1.1b-chat": 1_100_048_384,
    "qwen2.5-0.5b-instruct": 494_032_768,
    "qwen2.5-1.5b-instruct": 1_543_714_304,
    "qwen2.5-3b-instruct": 3_085_938_688,
    "qwen2.5-7b-instruct": 7_615_616_512,
    "qwen2.5-14b-instruct": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m-instruct": 134_515_008,
    "smollm2-360m-instruct": 361_821_120,
    "smollm2-1.7b-instruct": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
}


def test_shapes_have_the_published_number_of_parameters() -> None:
    assert {alias: shape_of_target(alias).parameters for alias in PUBLISHED} == PUBLISHED
    assert {*PUBLISHED, "tiny-chat"} == set(TARGETS)
    for alias, target in TARGETS.items():
        assert count(shape_of_target(alias).parameters) == count(
            float(target.parameters[:-1]) * {"M": 1e6, "B": 1e9}[target.parameters[-1]]
        ), alias


def test_tiny_chat_is_the_model_that_is_made() -> None:
    model = new_model(tiny_chat_options())
    assert shape_of_target("tiny-chat") == ModelShape.from_config(model.config.to_dict())
    assert shape_of_target("tiny-chat").parameters == model.num_parameters()


def test_a_folder_says_it_itself(families: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((families["qwen3"] / "config.json").read_text())
    assert shape_of_target(str(families["qwen3"])) == ModelShape.from_config(config)
    with pytest.raises(InputError, match=r"config\.json is missing"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": "wide", "num_attention_heads": 4}')
    with pytest.raises(InputError, match="no config of a Llama-style decoder"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="no config of a Llama-style decoder"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "division|heads"),
        ({"hidden_size": -512}, "hidden -512"),
        ({"head_dim": -3}, "head_dim -3"),
        ({"max_position_embeddings": -5}, "context_length -5"),
        ({"hidden_size": 1e308}, "hidden 1000"),
    ],
)
def test_numbers_that_no_model_has(
    families: dict[str, Path], tmp_path: Path, change: dict[str, float], words: str
) -> None:
    config = json.loads((families["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=f"is no config of a Llama-style decoder: .*({words})"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("kinds", [5, "full_attention", ["full_attention", 3], [["full_attention"]]])
def test_layer_types_of_another_form(
    families: dict[str, Path], tmp_path: Path, kinds: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((families["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": kinds}))
    assert main(["plan", "--target", str(tmp_path), "--gpus", "T4", "--device", "laptop-cpu-x86"]) == 2
    assert "config.json has the layer_types " in capsys.readouterr().err


def test_names() -> None:
    assert is_hub_id("a/b")
    assert is_hub_id("My-Org/Model_1.5.b-it")
    others = (
        "a",
        "./b",
        "a/b/c",
        "/b",
        "a/",
        "~/b",
        "a/b c",
        "a/b--c",
        "a/..b",
        "a/b.git",
        "a/b\n",
        "a/b\x1b[31m",
    )
    assert not any(map(is_hub_id, others))
    with pytest.raises(InputError, match="did you mean 'qwen3-4b'"):
        find_shape("qwen3-4")
    assert find_shape("nobody/nothing") is None
    with pytest.raises(InputError, match=r"hf download nobody/nothing config\.json"):
        shape_of_target("nobody/nothing")


def test_the_hubs_own_cache_is_read(families: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--something"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_bytes(
        (families["llama"] / "config.json").read_bytes()
    )
    program = "from edgespec.recipe.targets import shape_of_target\nprint(shape_of_target('someone/something').parameters)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={"HF_HUB_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == shape_of_target(str(families["llama"])).parameters


def test_the_list_says_the_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "list", "--json"]) == 0
    rows = {row["alias"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama-2-7b-chat"]["shape"]["intermediate"] == 11008
