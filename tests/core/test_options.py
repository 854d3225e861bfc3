"""Knobs: types, bounds, unknown names, layering of flags over YAML over defaults."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import parser_of
from edgespec.core.errors import InputError
from edgespec.core.options import (
    add_flags,
    as_flags,
    command_line,
    from_mapping,
    given,
    knob,
    to_mapping,
    windows_line,
)
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import load_recipe


def parse(arguments: list[str]) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser, Recipe)
    return given(parser.parse_args(arguments))


def test_flag_over_yaml_over_default() -> None:
    low = {"target": "a", "distill": {"steps": 5, "learning_rate": 0.5}}
    recipe = resolve(low, parse(["--target", "b", "--distill.steps", "7"]))
    assert (recipe.target, recipe.distill.steps, recipe.distill.learning_rate) == ("b", 7, 0.5)
    assert recipe.distill.text_fraction == Recipe(target="x").distill.text_fraction


def test_a_flag_beats_a_key_with_dashes() -> None:
    file = {"target": "a", "distill": {"preset": "gkd", "student-fraction": 0.5}}
    assert resolve(file, {}).distill.student_fraction == 0.5
    assert (
        resolve(file, parse(["--target", "a", "--distill.student-fraction", "0.2"])).distill.student_fraction
        == 0.2
    )
    device = {"target": "a", "device": "intel-npu", "export": {"npu-length": 256}}
    assert resolve(device, parse(["--target", "a", "--export.npu-length", "128"])).export.npu_length == 128


TERSE = "You are terse, exact and kind."


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (TERSE, (TERSE,)),
        ("", ("",)),
        ([TERSE, ""], (TERSE, "")),
        (f'["{TERSE}", ""]', (TERSE, "")),
        ("[INST] a, b", ("[INST] a, b",)),  # no JSON
    ],
)
def test_commas_part_no_prose(value: Any, texts: tuple[str, ...]) -> None:
    """From a file, from Python and from a flag; what a run records as its command gives the same again."""
    own = {"target": "a", "generate": {"system_prompts": value, "self-openings": value}}
    command = shlex.split(command_line("build-drafter", parser_of("build-drafter")[0].Options, own))
    for values in (own, parse(command[2:])):
        generate = resolve(values, {}).generate
        assert (generate.system_prompts, generate.self_openings) == (texts, texts)


def test_lists_and_none() -> None:
    recipe = resolve(
        {"target": "a", "drafter": {"layers": None}, "pretrain": None},
        parse(["--target", "a", "--evaluate.draft-lengths", "2,4"]),
    )
    assert recipe.evaluate.draft_lengths == (2, 4)
    assert recipe.drafter.layers is None


def test_flags_and_values_are_inverse() -> None:
    words = ["--target", "a b", "--distill.steps", "7", "--evaluate.draft-lengths", "2,4"]
    assert as_flags(parse(words)) == words


@pytest.mark.parametrize("value", ["-0.5,0.5", "-x", "-"])
def test_a_value_that_looks_like_a_flag_stays_one(value: str) -> None:
    words = as_flags({"target": value})
    assert parse(words) == {"target": value}


@pytest.mark.parametrize(
    ("verb", "values", "command"),
    [
        (
            "study",
            {"study": "alignment", "seeds": (0, 1), "check": False, "results": "a b.md"},
            "edgespec study alignment --seeds 0,1 --no-check --results 'a b.md'",
        ),
        ("export", {"formats": [], "build": "b", "bits": None}, "edgespec export b --formats ''"),
        ("plan", {"target": "t", "rehearsal": {"steps": 3}}, "edgespec plan --target t --rehearsal.steps 3"),
    ],
)
def test_the_command_is_what_a_shell_takes(verb: str, values: dict, command: str) -> None:
    """Also with values of the config file or of Python, which are lists and no texts."""
    assert command_line(verb, parser_of(verb)[0].Options, values) == command


def test_a_knob_whose_name_python_keeps_for_itself() -> None:
    @dataclass(frozen=True)
    class Options:
        continue_: bool = knob(False, "go on")

    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    values = given(parser.parse_args(["--continue"]))
    assert from_mapping(Options, values) == Options(True)
    assert as_flags(values) == ["--continue"]


def test_help_says_what_holds_without_a_flag() -> None:
    @dataclass(frozen=True)
    class Options:
        draft: bool = knob(True, "one")
        raw: bool = knob(False, "two")
        steps: int = knob(0, "three")

    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    helps = {action.dest: action.help for action in parser._actions}
    assert helps["draft"] == "one (default: on)"
    assert helps["raw"] == "two"  # off, as a switch is that nobody turns on
    assert helps["steps"] == "three (default: 0)"


def test_round_trip() -> None:
    recipe = Recipe(target="a")
    assert from_mapping(Recipe, to_mapping(recipe)) == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": "a", "distil": {}}, "did you mean 'distill'"),
        (
            {"target": "a", "distill": {"learning_rat": 1}},
            r"distill\.learning_rat'; did you mean 'learning_rate'",
        ),
        ({"target": "a", "distill": {"steps": -1}}, "distill.steps is -1; it must be at least 0"),
        ({"target": "a", "distill": {"steps": 1.5}}, "whole number"),
        ({"target": "a", "distill": {"steps": True}}, "whole number"),
        ({"target": "a", "distill": {"steps": float("inf")}}, "whole number"),
        ({"target": "a", "distill": {"learning_rate": 10**400}}, "a number"),
        ({"target": "a", "distill": {"divergence": "tvd+"}}, "did you mean 'tvd"),
        ({"target": "a", "distill": {"learning_rate": float("nan")}}, "at least"),
        (
            {"target": "a", "inference": {"timeout": float("inf")}},
            "timeout is inf; it must be at most 2000000",
        ),
        ({"target": "a", "generate": {"top_p": 0}}, "generate.top_p is 0"),
        ({"target": "a", "generate": {"temperatures": [0.3, -1]}}, "temperatures is -1"),
        ({"target": "a", "evaluate": {"draft_lengths": [0]}}, "draft_lengths is 0; it must be at least 1"),
        ({"target": 3}, "must be a string"),
        ({}, "target is missing"),
        *(
            ({"target": "a", "distill": value}, "distill is .*; it must be a mapping")
            for value in (3, False, 0, "", [])
        ),
    ],
)
def test_bad_values_name_value_and_bound(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_mapping(Recipe, values)


def test_recipe_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "code.yaml").write_text("target: !!python/object/apply:os.getcwd []")
    with pytest.raises(InputError, match="not valid YAML"):
        load_recipe(tmp_path / "code.yaml")


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (r"C:\R&D\pair", r'"C:\R&D\pair"'),
        ("C:\\R&D\\", r'"C:\R&D\\"'),  # one backslash before the quote would keep it from closing
        (r"C:\O'Brien\pair", '"C:\\O\'Brien\\pair"'),
        (r"C:\R&D\my pair", r'"C:\R&D\my pair"'),
        (r"build\pair", r"build\pair"),
        ("1,2", "1,2"),
    ],
)
def test_a_command_for_the_shells_of_windows(word: str, line: str) -> None:
    """An & that stands alone begins another command there, and ' begins a text in PowerShell."""
    assert windows_line("edgespec", "chat", word) == f"edgespec chat {line}"
