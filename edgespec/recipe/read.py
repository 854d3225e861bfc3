"""From a recipe's file and the flags beside it to a recipe: what wins, what no single knob can see, and what follows from it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping, merge, to_mapping, underscored
from edgespec.model_folder.head import LAST, THREE
from edgespec.recipe.data_sources import HUB_FORM, numbered
from edgespec.recipe.devices import profile
from edgespec.recipe.schema import (
    PRESETS,
    PYTHON_STDLIB,
    SELF,
    DistillOptions,
    DrafterOptions,
    ExportOptions,
    GenerateOptions,
    Recipe,
    TrainingOptions,
)
from edgespec.recipe.shipped import load_recipe, recipe_file, shipped_recipes
from edgespec.recipe.targets import gguf_of, is_gguf, package_of

RECIPE_FILE = "recipe.resolved.yaml"


def resolve(file_values: dict[str, Any], flags: dict[str, Any], *, made: bool = False) -> Recipe:
    """flag > device of a flag > YAML > preset, device of the YAML > default. made: the drafter is done, whatever trained it."""
    values = _with_device(underscored(file_values), underscored(flags))
    distill = values.get("distill")
    if isinstance(distill, dict) and isinstance(distill.get("preset"), str):
        values = {**values, "distill": merge(PRESETS.get(distill["preset"], {}), distill)}
    recipe = from_mapping(Recipe, values)
    drafter, inference = recipe.drafter, recipe.inference
    drafter = replace(drafter, checkpoint=os.path.expanduser(drafter.checkpoint))  # many stages read it
    if inference.source == "file" and not inference.file:  # a target that is a GGUF file runs from it
        inference = replace(inference, file=str(gguf_of(recipe.target) or ""))
    recipe = replace(recipe, drafter=drafter, inference=inference)
    _check_together(recipe)
    if not made:
        check_learning(recipe)
    return recipe


def read_recipe(name: str, flags: dict[str, Any], *, made: bool = False) -> tuple[Recipe, Path | None]:
    """The recipe of a build with these flags, and its file: the named one, or the shipped one with the target's name.

    made: as in `resolve`.
    """
    file = recipe_file(name) if name else shipped_recipes().get(flags.get("target", ""))
    return resolve(load_recipe(file) if file else {}, flags, made=made), file


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every knob with the value it had."""
    import yaml

    return yaml.safe_dump(to_mapping(recipe), sort_keys=False, allow_unicode=True)


def _with_device(file_values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Both, with the files that the device's profile names. Raises InputError for an unknown device."""
    name = flags.get("device", file_values.get("device"))
    if not name or not isinstance(name, str):
        return merge(file_values, flags)
    export = merge(file_values, flags).get("export")
    files = {"export": profile(name).export(export.get("context") if isinstance(export, Mapping) else None)}
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
    _check_given(recipe, "evaluate.draft_lengths")
    _check_sources(recipe, "evaluate.prompts_file")
    _check_inference(recipe)
    if drafter.kind == "head":
        check_no_npu("drafter.kind is 'head'", export)
        check_features(drafter.features, export)
    elif drafter.features != LAST:
        raise InputError(
            f"drafter.features is {drafter.features!r}, which only a head reads; give --drafter.kind head with it"
        )


def _check_given(recipe: Recipe, *names: str) -> None:
    """Raise InputError where a knob that has several values has none."""
    for name in names:
        if not attrgetter(name)(recipe):
            raise InputError(f"{name} is empty; give one value at least")


def _check_sources(recipe: Recipe, *names: str) -> None:
    """Raise InputError where a source has no name."""
    for name in names:
        for place, source in numbered(name, attrgetter(name)(recipe)).items():
            if not source:
                raise InputError(
                    f"{place} is '', which names nothing; give a file, a folder, {HUB_FORM}, {PYTHON_STDLIB} or {SELF}"
                )


def check_learning(recipe: Recipe) -> None:
    """What the drafter cannot learn from, or would learn something else by than the recipe says. Raises InputError."""
    inference, tune, distill = recipe.inference, recipe.tune, recipe.distill
    sources = ["generate.instructions", *(["pretrain.text"] if recipe.drafter.kind == "model" else [])]
    _check_given(recipe, "generate.temperatures", "generate.system_prompts", *sources)
    _check_sources(recipe, *sources)
    if recipe.drafter.kind == "head":
        _check_head(recipe)
    if tune.steps and inference.source != "torch":
        own = "file" if inference.source == "file" else "url"
        raise InputError(
            f"tune.steps is {tune.steps} and inference.source is {inference.source!r}, which writes as the target did before its "
            f"tuning; give --inference.source torch and no inference.{own}, or --tune.steps 0"
        )
    if distill.steps and distill.select_fraction < 1 and not recipe.reference.steps:
        raise InputError(
            f"distill.select_fraction is {distill.select_fraction:g} and reference.steps is 0, so that the reference has learnt "
            "nothing; give --reference.steps, or --distill.select-fraction 1"
        )


def check_features(features: str, options: ExportOptions) -> None:
    """Raise InputError where files are wanted that do not give what a head reads."""
    if features == THREE and options.gguf:
        raise InputError(
            f"the head reads the states of three layers, and export.gguf is {', '.join(options.gguf)}: llama.cpp gives only "
            "the last layer's; give ONNX precisions only (--export.gguf '', or edgespec export --formats onnx), or a head with "
            "--drafter.features last"
        )


_OF_A_HEAD: dict[str, tuple[Any, ...]] = {
    "inference.source": ("torch", "file"),
    "generate.features": (True,),
    "distill.target_side": ("stored",),
    "distill.labels": ("soft",),
    "distill.against": ("",),
    "distill.text_fraction": (0.0,),
    "distill.student_fraction": (0.0,),
    "distill.keep_steps": (0,),
    "drafter.hidden": (None,),
    "drafter.size_fraction": (DrafterOptions.size_fraction,),
    "drafter.init": ("random", "checkpoint"),
    "tune.steps": (0,),
}
"""Values that a knob may have where the drafter is a head; a message names the first."""


def _check_head(recipe: Recipe) -> None:
    """A head learns from hidden states that the target keeps while it writes."""
    wrong = [
        f"{name} {allowed[0]!r} (it is {seen!r})"
        for name, allowed in _OF_A_HEAD.items()
        if (seen := attrgetter(name)(recipe)) not in allowed
    ]
    if wrong:
        raise InputError(
            f"drafter.kind is 'head', which needs {', '.join(wrong)}; the recipe smollm2-head has all of it"
        )


def check_no_npu(head: str, options: ExportOptions) -> None:
    """Raise InputError where static graphs are wanted beside a head; `head`: how the message names it."""
    if options.npu:
        raise InputError(
            f"{head} and export.npu is {', '.join(options.npu)}, as the devices with an NPU have it: static graphs give no "
            "hidden states, which a head reads; choose another device, or only ONNX and GGUF, or a drafter that is a model"
        )


def _check_inference(recipe: Recipe) -> None:
    """What the source of the target's words needs, and what a distillation may ask of one that is not in torch."""
    inference, distill = recipe.inference, recipe.distill
    for source, name in {"file": "file", "server": "url"}.items():
        given = getattr(inference, name)
        needed = inference.source == source
        # the target is a file itself, though its package may be missing still
        own = source == "file" and (is_gguf(Path(recipe.target)) or package_of(recipe.target) is not None)
        if needed != bool(given) and not (needed and own):
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
            f"inference.source is {inference.source!r}, which gives the target's distributions only on its own responses, and "
            f"{seen}; give --distill.target-side stored --distill.text-fraction 0 and no fixed or student data"
        )


def reference_options(recipe: Recipe) -> DistillOptions:
    """How AdaSPEC's reference is distilled: forward KL on the data of the distillation itself, on all tokens.

    Knobs that this does not read have their defaults, so that recipes which differ in them alone have one reference. Stored
    distributions are those of rows as long as `distill.context`, so the reference then has rows of that length too.
    """
    own = {name: getattr(recipe.reference, name) for name in TrainingOptions.__dataclass_fields__}
    unread = (
        *("jsd_beta", "tvdpp_estimator", "tvdpp_scope", "finish", "scale_learning_rate", "select_fraction"),
        "labels",
    )
    plain = DistillOptions(divergence="fkl")
    own |= {name: getattr(plain, name) for name in unread}
    if recipe.distill.target_side == "stored":
        own["context"] = recipe.distill.context
    return replace(recipe.distill, **own, divergence="fkl", watch_steps=0, keep_steps=0)


def own_prompts(recipe: Recipe) -> int:
    """Held-out prompts that the target writes itself: as many as the stage that reads most of them."""
    export = recipe.export
    return max(
        recipe.evaluate.prompts,
        export.bundle_prompts,
        export.verify_prompts,
        export.answer_replies,
        export.acceptance_prompts,
    )


def own_instructions(options: GenerateOptions) -> int:
    """Instructions that the target writes itself: its share of the prompts, unless a knob says how many."""
    return options.self_instructions or -(-options.prompts // len(options.instructions))


def read_tokens(options: DistillOptions) -> int:
    """Tokens of fixed data in a head's training: more need not be read."""
    share = (1 - options.text_fraction) * options.fixed_fraction
    return math.ceil(share * options.steps * options.batch_size * options.context)
