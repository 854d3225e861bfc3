"""Recipes that come with edgespec: each one loads, says what it is, and its command and figures are right."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import edgespec_recipes
import pytest
import yaml
from repository import REPOSITORY

from edgespec.cli import VERBS
from edgespec.core.options import add_flags, given
from edgespec.core.table import byte_size
from edgespec.planning.estimate import estimate
from edgespec.planning.plan import PlanOptions
from edgespec.planning.preflight import check_processes
from edgespec.recipe.check import problems
from edgespec.recipe.data_sources import parse_hub
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import FIELDS, header, load_recipe, recipe_file, shipped_recipes
from edgespec.recipe.targets import TARGETS, shape_of_target
from edgespec.verbs.build import Options

CONFIGS = Path(edgespec_recipes.__path__[0]) / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
RECIPES = [file for file in FILES if not file.name.startswith("target-")]


def stem(value: Any) -> str:
    return value.stem if isinstance(value, Path) else str(value)


def recipe(name: str) -> Recipe:
    return resolve(load_recipe(shipped_recipes()[name]), {})


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of `edgespec build-drafter ...`."""
    assert words[:2] == ["edgespec", "build-drafter"]
    assert words[1] in VERBS
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, Options)
    return given(parser.parse_intermixed_args(words[2:]))


def test_the_ones_that_are_promised_are_there() -> None:
    promised = {
        *("paper-llama-2-7b-chat", "distillspec-gkd", "distillspec-f-distill", "adaspec", "tvdpp", "quick"),
        *("smollm2-head", "smollm2-quick", "tiny-chat"),
    }
    assert set(shipped_recipes()) == promised
    assert {file.stem for file in RECIPES} == promised


@pytest.mark.parametrize("file", RECIPES, ids=stem)
def test_it_loads_and_can_run(file: Path) -> None:
    assert resolve(load_recipe(file), {}).target
    assert problems(file) == []


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_its_head_says_what_it_is(file: Path) -> None:
    fields = header(file)
    assert tuple(fields) == FIELDS
    assert all(len(text) > 10 for text in fields.values())
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# {file.stem.removeprefix('target-')}: ")
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_its_command_is_one(file: Path) -> None:
    flags = parsed(shlex.split(header(file)["command"], comments=True))
    assert flags["target"] == (recipe(file.stem).target if file in RECIPES else "tiny-chat")
    chosen = recipe_file(flags["recipe"]) if "recipe" in flags else shipped_recipes()[flags["target"]]
    assert chosen == (file if file in RECIPES else shipped_recipes()["tiny-chat"])
    assert flags["out"] == f"build/{chosen.stem}"


def test_one_target_has_a_recipe_of_its_own_name() -> None:
    assert {*shipped_recipes()} & {*TARGETS} == {"tiny-chat"}
    assert (
        "(default: tiny-chat's for tiny-chat, else the defaults)"
        in PlanOptions.__dataclass_fields__["recipe"].metadata["help"]
    )


def bytes_of(what: str, text: str) -> float | None:
    """The number before `GB of memory`, or MiB of it, in bytes."""
    found = re.search(rf"([\d.]+) ([KMGT])(i?)B of {what}", text)
    return found and float(found[1]) * (1024 if found[3] else 1000) ** (1 + "KMGT".index(found[2]))


@pytest.mark.parametrize("file", RECIPES, ids=stem)
def test_its_needs_hold_its_cost_and_its_packages(file: Path) -> None:
    needs, cost = header(file)["needs"], header(file)["cost"]
    for what in ("memory", "disk"):
        least, most = (bytes_of(what, text) for text in (cost, needs))
        assert least
        assert most is None or most >= least
    assert ("edgespec[llamacpp]" in needs) == (recipe(file.stem).inference.source == "file")


@pytest.mark.parametrize("file", RECIPES, ids=stem)
def test_its_cost_is_the_estimate(file: Path) -> None:
    found = recipe(file.stem)
    target = shape_of_target(found.target)
    stages = estimate(found, target, derive(target, found.drafter))
    flops, disk = sum(stage.flops for stage in stages), sum(stage.disk for stage in stages)
    memory = max(stage.memory for stage in stages)
    said = f"{flops:.1e} FLOPs, {byte_size(memory)} of memory, {byte_size(disk)} of disk"
    assert said in header(file)["cost"]
    assert "estimated" in header(file)["cost"]


@pytest.mark.parametrize("file", RECIPES, ids=stem)
def test_numbers_are_numbers_to_every_reader(file: Path) -> None:
    """A YAML 1.1 reader takes 1e-4 for text and `on` for true: numbers are written so that every reader agrees."""

    def leaves(values: dict[str, Any]) -> list[Any]:
        return [
            leaf
            for value in values.values()
            for leaf in (leaves(value) if isinstance(value, dict) else [value])
        ]

    for value in leaves(yaml.safe_load(file.read_text(encoding="utf-8"))):
        if isinstance(value, str) and value:
            with pytest.raises(ValueError, match="could not convert"):
                float(value)


def test_direct_alignments_numbers() -> None:
    found = recipe("paper-llama-2-7b-chat")
    target = shape_of_target(found.target)
    drafter = derive(target, found.drafter)
    assert (drafter.layers, drafter.hidden, drafter.intermediate, drafter.heads) == (4, 1024, 2816, 8)
    assert (drafter.vocab_size, drafter.tied) == (32000, False)
    pretrain, generate, distill = found.pretrain, found.generate, found.distill
    assert pretrain.steps * pretrain.batch_size * pretrain.context == pytest.approx(600e9, rel=1e-6)
    assert (pretrain.batch_size, pretrain.context, pretrain.warmup_steps) == (496, 2048, 5000)
    assert (pretrain.learning_rate, pretrain.min_learning_rate) == (1e-4, 1e-6)
    assert (generate.temperatures, generate.top_p) == ((0.0, 0.3, 0.7, 1.0), 0.95)
    assert (distill.batch_size, distill.learning_rate, distill.warmup_steps) == (40, 3e-4, 2000)
    assert (distill.divergence, distill.tvdpp_scope, distill.text_fraction) == ("tvd++", "batch", 0.1)
    assert distill.mean == "tokens"
    assert found.evaluate.draft_lengths == (3, 5)
    for stage, worlds in ((pretrain, (1, 2, 4, 8, 16)), (distill, (1, 2, 4, 8))):
        for world in worlds:  # what the head says of processes
            assert stage.batch_size % world == 0
            assert stage.batch_size // world % (stage.micro_batch_size or 1) == 0


def test_the_processes_that_direct_alignments_head_names_can_share_its_work() -> None:
    named = header(CONFIGS / "paper-llama-2-7b-chat.yaml")["needs"].partition(" divide among ")[2]
    worlds = [int(world) for world in re.findall(r"\d+", named)]
    assert worlds[:1] == [1]
    for world in worlds:
        check_processes(recipe("paper-llama-2-7b-chat"), world)


def test_distillspecs_numbers() -> None:
    gkd, f_distill = recipe("distillspec-gkd"), recipe("distillspec-f-distill")
    assert (gkd.distill.divergence, gkd.distill.student_fraction, gkd.distill.fixed_fraction) == ("jsd", 1, 0)
    assert (f_distill.distill.divergence, f_distill.distill.student_fraction) == ("tvd", 0.5)
    for found in (gkd, f_distill):
        assert found.distill.mean == "sequences"
        assert (found.distill.batch_size, found.distill.learning_rate) == (32, 3e-4)
        assert (found.distill.warmup_steps, found.distill.text_fraction) == (5000, 0)
        assert (found.generate.temperatures, found.distill.student_temperature) == ((1.0,), 1.0)
        assert found.distill.context >= 256 + found.distill.student_max_new_tokens
    assert gkd.pretrain == f_distill.pretrain  # the head says so


def test_adaspecs_numbers() -> None:
    found = recipe("adaspec")
    assert (found.distill.select_fraction, found.distill.scale_learning_rate) == (0.4, True)
    assert (found.distill.divergence, found.distill.fixed_fraction) == ("fkl", 1.0)
    assert found.distill.mean == "tokens"
    assert (found.tune.conversations,) == (found.distill.fixed,) == found.generate.instructions
    stages = (found.tune, found.reference, found.distill)
    assert len({(stage.steps, stage.batch_size, stage.context, stage.learning_rate) for stage in stages}) == 1
    assert found.distill.learning_rate == 3e-4


def test_hub_sources_say_configuration_and_split() -> None:
    found = recipe("adaspec")
    tuned, held_out = parse_hub(found.tune.conversations), parse_hub(found.evaluate.prompts_file)
    assert (tuned.name, tuned.configuration, tuned.split) == ("openai/gsm8k", "main", "train")
    assert (held_out.name, held_out.configuration, held_out.split) == ("openai/gsm8k", "main", "test")
    text = parse_hub(found.pretrain.text[0])
    assert (text.name, text.configuration, text.field) == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "text")


def test_tvdpp_names_every_variant() -> None:
    text = shipped_recipes()["tvdpp"].read_text(encoding="utf-8")
    fields = type(recipe("tvdpp").distill).__dataclass_fields__
    for knob in ("tvdpp_estimator", "tvdpp_scope"):
        for choice in fields[knob].metadata["choices"]:
            assert choice in text
    [page] = set(re.findall(r"docs/[\w-]+\.md", text))
    for arm in ("tvdpp", "tvdpp-position", "tvdpp-sampled", "tvdpp-uniform"):
        assert f" {arm} " in (REPOSITORY / page).read_text(encoding="utf-8")


def test_quick_is_quicker_than_the_demo() -> None:
    cost = {}
    for name in ("quick", "tiny-chat"):
        found = recipe(name)
        target = shape_of_target(found.target)
        cost[name] = sum(stage.flops for stage in estimate(found, target, derive(target, found.drafter))[1:])
    assert cost["quick"] < cost["tiny-chat"] / 2
