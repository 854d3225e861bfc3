"""What is wrong with a recipe file, all of it at once, before anything runs. Makes nothing and downloads nothing.

Knows the knobs, the files a recipe names and, where the target's config is on this machine, its bounds. Whether a hub name exists
only the hub can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError, InputError
from edgespec.core.options import from_mapping
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import HEAD_FILE
from edgespec.recipe.data_sources import HUB, is_local, numbered, parse_hub
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.targets import TINY_CHAT, find_shape

ANY_TARGET = TINY_CHAT
"""Stands for the target of a recipe that leaves it to the command line."""


def problems(file: Path) -> list[str]:
    """Every problem of a recipe file in its own words; none where it can run."""
    found: list[str] = []
    try:
        values = load_recipe(file)
        if wrong := list(dict.fromkeys(_knob_problems(values))):
            return wrong
        recipe = resolve({"target": ANY_TARGET, **values}, {})
        found += _file_problems(recipe)
        shape = find_shape(recipe.target) if "target" in values else None
    except (InputError, BundleError) as error:  # the second of a broken GGUF file
        return [str(error), *found]
    if shape is not None:
        found += context_problems(recipe, shape)
        if recipe.drafter.init != "checkpoint" and (problem := _said(derive, shape, recipe.drafter)):
            found.append(problem)
    return found


def _said(check: Callable[..., Any], *given: Any) -> str:
    """What a check has against what it is given; '' where it has nothing."""
    try:
        check(*given)
    except (InputError, BundleError) as error:
        return str(error)
    return ""


def _knob_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Each knob is read alone, so that one bad value does not hide the next."""
    for key, value in values.items():
        parts = [{name: item} for name, item in value.items()] if isinstance(value, Mapping) else [value]
        for part in parts or [{}]:
            if problem := _said(from_mapping, Recipe, {"target": ANY_TARGET, key: part}):
                yield problem


def _file_problems(recipe: Recipe) -> Iterator[str]:
    """Sources the recipe will read and that are not there; what a stage that is off would read is left alone."""
    drafter, tune, distill = recipe.drafter, recipe.tune, recipe.distill
    named = {
        **(numbered("pretrain.text", recipe.pretrain.text) if drafter.kind == "model" else {}),
        **numbered("generate.instructions", recipe.generate.instructions),
        "evaluate.prompts_file": recipe.evaluate.prompts_file,
        "tune.conversations": tune.conversations if tune.steps else "",
        "distill.fixed": distill.fixed if distill.fixed_fraction else "",
    }
    for knob, source in named.items():
        if problem := _source_problem(source):
            yield f"{knob}: {problem}"
    if recipe.inference.file and not Path(recipe.inference.file).expanduser().exists():
        yield f"inference.file {recipe.inference.file!r} does not exist; give a bundle, an ONNX folder or a .gguf file"
    if drafter.checkpoint:
        kind, file = ("head", HEAD_FILE) if drafter.kind == "head" else ("model", "config.json")
        if not (Path(drafter.checkpoint) / file).is_file():
            yield f"drafter.checkpoint {drafter.checkpoint!r} is no {kind} folder (it has no {file})"
    if tune.steps and tune.teacher and (problem := _said(find_shape, tune.teacher)):
        yield f"tune.teacher: {problem}"


def _source_problem(source: str) -> str:
    if source.startswith(HUB):
        return _said(parse_hub, source)
    if not is_local(source) or Path(source).expanduser().exists():
        return ""
    return f"{source!r} does not exist; give a file, a folder or hub:NAME"


def context_problems(recipe: Recipe, target: ModelShape) -> Iterator[str]:
    """Stages whose texts would be longer than the target's, each in words."""
    # of what reads one text at a time, or has one set of RoPE factors: the drafter
    bare = replace(target, rope_border=None)
    trained = {
        "tune": target,
        **({"pretrain": bare} if recipe.drafter.kind == "model" else {}),
        "distill": target,
        **({"reference": target} if recipe.distill.select_fraction < 1 else {}),
    }
    for name, reads in trained.items():
        stage = getattr(recipe, name)
        if stage.steps and stage.context > reads.one_rope_length:
            yield f"{name}.context is {stage.context}; the target's context is {reads.told_length()}: give at most that"
    if recipe.distill.target_side == "stored" and recipe.distill.stored_top_k > target.vocab_size:
        yield (
            f"distill.stored_top_k is {recipe.distill.stored_top_k}; the target's vocabulary has {target.vocab_size} tokens: "
            "give at most that"
        )
    written = {"generate": target if recipe.inference.source == "torch" else bare, "evaluate": target}
    for name, reads in written.items():
        if (length := getattr(recipe, name).max_new_tokens) >= reads.one_rope_length:
            yield (
                f"{name}.max_new_tokens is {length}; the target's context of {reads.told_length()} leaves no room for a prompt"
            )
