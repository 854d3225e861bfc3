"""From a recipe's file and the flags beside it to a recipe: what wins, and what no single knob can see."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping, merge, to_mapping
from edgespec.model_folder.head import LAST, THREE
from edgespec.recipe.devices import profile
from edgespec.recipe.gguf_file import gguf_of
from edgespec.recipe.schema import PRESETS, DrafterOptions, ExportOptions, Recipe
from edgespec.recipe.targets import TARGETS, is_gguf

RECIPE_FILE = "recipe.resolved.yaml"


def resolve(file_values: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """flag > device of a flag > YAML > preset, device of the YAML > default."""
    values = _with_device(file_values, flags)
    distill = values.get("distill")
    if isinstance(distill, dict) and isinstance(distill.get("preset"), str):
        values = {**values, "distill": merge(PRESETS.get(distill["preset"], {}), distill)}
    recipe = _with_whole_paths(_with_own_file(from_mapping(Recipe, values)))
    _check_together(recipe)
    return recipe


def _with_own_file(recipe: Recipe) -> Recipe:
    """A target that is a GGUF file runs from it where the recipe asks for a file and names none."""
    file = gguf_of(recipe.target) if recipe.inference.source == "file" and not recipe.inference.file else None
    return recipe if file is None else replace(recipe, inference=replace(recipe.inference, file=str(file)))


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """`~` in the path of a drafter's checkpoint, which many stages read, becomes the home folder."""
    drafter = recipe.drafter
    return replace(recipe, drafter=replace(drafter, checkpoint=os.path.expanduser(drafter.checkpoint)))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every knob with the value it had."""
    import yaml

    return yaml.safe_dump(to_mapping(recipe), sort_keys=False, allow_unicode=True)


def _with_device(file_values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Both, with the files that the device's profile names. Raises InputError for an unknown device."""
    name = flags.get("device", file_values.get("device"))
    if not name or not isinstance(name, str):
        return merge(file_values, flags)
    files = {"export": profile(name).export()}
    if "device" in flags:
        return merge(merge(file_values, files), flags)
    return merge(files, merge(file_values, flags))


def _check_together(recipe: Recipe) -> None:
    """What no single knob can see. Raises InputError."""
    drafter, tune, distill = recipe.drafter, recipe.tune, recipe.distill
    if (drafter.init == "checkpoint") != bool(drafter.checkpoint):
        raise InputError(
            f"drafter.init is {drafter.init!r} and drafter.checkpoint is {drafter.checkpoint!r}; "
            "give both init: checkpoint and the folder, or neither"
        )
    if tune.steps and not tune.conversations:
        raise InputError(
            "tune.steps is given without tune.conversations; give a file of conversations with responses"
        )
    if distill.fixed_fraction and not distill.fixed:
        raise InputError(
            f"distill.fixed_fraction is {distill.fixed_fraction:g} without distill.fixed; give conversations with responses"
        )
    if distill.labels == "hard" and distill.select_fraction < 1:
        raise InputError(
            "distill.labels is 'hard' and select_fraction below 1; token selection compares distributions: give soft"
        )
    export = recipe.export
    if not (export.onnx or export.gguf or export.npu):
        raise InputError("export.onnx, export.gguf and export.npu are all empty; give one precision at least")
    lists = {
        "generate.temperatures": recipe.generate.temperatures,
        "generate.system_prompts": recipe.generate.system_prompts,
        "evaluate.draft_lengths": recipe.evaluate.draft_lengths,
    }
    for name, given in lists.items():
        if not given:
            raise InputError(f"{name} is empty; give one value at least")
    _check_inference(recipe, own=_is_gguf(recipe.target))
    if drafter.kind == "head":
        _check_head(recipe)
        check_features(drafter.features, recipe.export)
    elif drafter.features != LAST:
        raise InputError(
            f"drafter.features is {drafter.features!r}, which only a head reads; give --drafter.kind head with it"
        )


def check_features(features: str, options: ExportOptions) -> None:
    """Raise InputError where files are wanted that do not give what a head reads."""
    if features == THREE and options.gguf:
        raise InputError(
            f"the head reads the states of three layers, and export.gguf is {', '.join(options.gguf)}: llama.cpp gives the last "
            "one's alone; give ONNX precisions alone (--export.gguf '', or --formats onnx to export), or a head with "
            "--drafter.features last"
        )


def _check_head(recipe: Recipe) -> None:
    """A head learns from hidden states that the target keeps while it writes, and runs beside a target that gives them."""
    source, init = recipe.inference.source, recipe.drafter.init
    wanted = {
        "inference.source": (source, source if source in ("torch", "file") else "torch"),
        "generate.features": (recipe.generate.features, True),
        "distill.target_side": (recipe.distill.target_side, "stored"),
        "distill.labels": (recipe.distill.labels, "soft"),
        "distill.against": (recipe.distill.against, ""),
        "distill.text_fraction": (recipe.distill.text_fraction, 0.0),
        "distill.student_fraction": (recipe.distill.student_fraction, 0.0),
        "distill.keep_steps": (recipe.distill.keep_steps, 0),
        "drafter.hidden": (recipe.drafter.hidden, None),
        "drafter.size_fraction": (recipe.drafter.size_fraction, DrafterOptions.size_fraction),
        "drafter.init": (init, init if init in ("random", "checkpoint") else "random"),
        "tune.steps": (recipe.tune.steps, 0),
    }
    wrong = [
        f"{name} {wanted!r} (it is {seen!r})" for name, (seen, wanted) in wanted.items() if seen != wanted
    ]
    if wrong:
        raise InputError(
            f"drafter.kind is 'head', which needs {', '.join(wrong)}; the recipe smollm2-head has all of it"
        )
    check_no_npu("drafter.kind is 'head'", recipe.export)


def check_no_npu(head: str, options: ExportOptions) -> None:
    """Raise InputError where static graphs are wanted beside a head; `head`: how the message names it."""
    if options.npu:
        raise InputError(
            f"{head} and export.npu is {', '.join(options.npu)}, as the devices with an NPU have it: static graphs give no "
            "hidden states, which a head reads; choose another device, or ONNX and GGUF alone, or a drafter that is a model"
        )


def _is_gguf(target: str) -> bool:
    """Whether a target is a GGUF file, or an alias of one whose package may be missing still."""
    known = TARGETS.get(target)
    return is_gguf(Path(target)) or (known is not None and known.package is not None)


def _check_inference(recipe: Recipe, *, own: bool) -> None:
    """What the source of the target's words needs, and what a distillation may ask of one that is not in torch.

    `own`: the target is a file itself.
    """
    inference, distill = recipe.inference, recipe.distill
    for source, name in {"file": "file", "server": "url"}.items():
        given = getattr(inference, name)
        needed = inference.source == source
        if needed != bool(given) and not (needed and own and source == "file"):
            raise InputError(
                f"inference.source is {inference.source!r} and inference.{name} is {given!r}; "
                f"give both source: {source} and {name}, or neither"
            )
    if inference.source == "torch" or not distill.steps:
        return
    if distill.against:
        raise InputError(
            f"distill.against is {distill.against!r} and inference.source is {inference.source!r}, which gives its own "
            "distributions; for those of a GGUF file, name it with --inference.file and leave distill.against out"
        )
    own_alone = ["text_fraction", "student_fraction"]
    if recipe.drafter.kind == "model":  # for a head the target reads fixed data in torch
        own_alone.append("fixed_fraction")
    wanted = [name for name in own_alone if getattr(distill, name)]
    if distill.labels == "soft" and (wanted or distill.target_side != "stored"):
        seen = (
            f"distill.{wanted[0]} is {getattr(distill, wanted[0]):g}" if wanted else "target_side is 'live'"
        )
        raise InputError(
            f"inference.source is {inference.source!r}, which gives the target's distributions on its own responses alone, and "
            f"{seen}; give --distill.target-side stored --distill.text-fraction 0 and no fixed or student data"
        )
