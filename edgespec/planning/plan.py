"""What a drafter for a target costs and what it would give: the options of that question, and its answer as a `Plan`.

Arithmetic on shapes: needs no weights, no network and no torch. Every knob of a recipe is one of the plan's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob
from edgespec.core.shapes import ModelShape
from edgespec.planning.devices_fit import Fit, fit, fitting
from edgespec.planning.drafter_shape import drafter_shape
from edgespec.planning.hardware import CARDS, THIS_MACHINE, Hardware, is_this_machine, parse, this_machine
from edgespec.planning.plan_device import Way, budget, measured, rates_of_machine, rates_of_profile
from edgespec.planning.plan_stages import StageTime, Storage, own_bytes, stage_times, storage, usable
from edgespec.recipe.devices import device_of
from edgespec.recipe.read import read_recipe
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import load_recipe, shipped_recipes
from edgespec.recipe.targets import TARGETS, gguf_of, is_hub_id, shape_of_target

T = TypeVar("T")
UNMEASURED = (("llama.cpp", "q4_0"), ("onnxruntime", "int4"))
"""What a budget of this machine is made for, where nothing was measured."""


@dataclass(frozen=True)
class PlanOptions(Recipe):
    recipe: str = knob(
        "",
        "a YAML file, or a shipped recipe: {names} (default: tiny-chat's for tiny-chat, else the defaults)",
        names=shipped_recipes,
    )
    gpus: str = knob(
        THIS_MACHINE,
        "what trains: this machine (measured quickly), or COUNTxNAME such as 8xA100-80GB; names: {names}",
        names=lambda: CARDS,
    )
    alphas: tuple[float, ...] = knob(
        (0.5, 0.6, 0.7, 0.8), "acceptance rates to predict a speed-up for", at_least=0.0, at_most=1.0
    )
    mfu: float = knob(
        0.35,
        "assumed share of the GPUs' peak FLOP/s that training reaches (rates measured on this machine count whole)",
        at_least=0.01,
        at_most=1.0,
    )
    bandwidth_share: float = knob(
        0.6,
        "assumed share of published rates that decoding reaches, in data generation and on a device without measurements",
        at_least=0.01,
        at_most=1.0,
    )
    json: str = json_knob()


def own_options(kind: type[T], given: Mapping[str, Any]) -> tuple[T, dict[str, Any]]:
    """The knobs of `kind` that a recipe does not have (the target is a placeholder), and the other flags. Raises InputError."""
    own = {name: value for name, value in given.items() if name in kind.__annotations__}
    return from_mapping(kind, {"target": "", **own}), {key: given[key] for key in given if key not in own}


def read_options(given: dict[str, Any]) -> tuple[PlanOptions, Recipe]:
    """The plan's options (their target is a placeholder), and the recipe that build-drafter would run with the same flags."""
    options, flags = own_options(PlanOptions, given)
    if is_this_machine(str(flags.get("device", ""))):
        del flags["device"]
    recipe, file = read_recipe(options.recipe, flags)
    return replace(options, recipe=file.stem if file else ""), recipe


@dataclass(frozen=True)
class Plan:
    """Everything the report says.

    `hardware` counts the devices that can share the work, of those `offered`; `fit`: the device's memory, where it is a profile;
    `ways`: how the pair could run there.
    """

    options: PlanOptions
    recipe: Recipe
    target: ModelShape
    drafter: ModelShape
    hardware: Hardware
    offered: int
    stages: tuple[StageTime, ...]
    storage: Storage
    fit: Fit | None
    ways: tuple[Way, ...]

    @property
    def device(self) -> str:
        """Where the pair is to run, in words."""
        return self.recipe.device or THIS_MACHINE

    @property
    def measured(self) -> bool:
        return any(way.measured for way in self.ways)


def make(recipe: Recipe, options: PlanOptions) -> Plan:
    """Raises InputError: an unknown target, GPU or device, or a target whose shape is not known here."""
    target = shape_of_target(recipe.target)
    drafter = drafter_shape(target, recipe.drafter)
    recipe = fitting(recipe, target, drafter, own_bytes(recipe))
    given = parse(options.gpus)
    hardware = replace(given, count=usable(recipe, given.count))
    stages = tuple(stage_times(recipe, target, drafter, hardware, options.mfu, options.bandwidth_share))
    known = TARGETS.get(recipe.target)
    hub = known.repo is not None if known else is_hub_id(recipe.target) and not Path(recipe.target).is_dir()
    hub = hub and gguf_of(recipe.target) is None
    stored = storage(stages, target, hub=hub)
    room, ways = _device(recipe, options.bandwidth_share, target, drafter, hardware)
    return Plan(options, recipe, target, drafter, hardware, given.count, stages, stored, room, tuple(ways))


def _device(
    recipe: Recipe, share: float, target: ModelShape, drafter: ModelShape, hardware: Hardware
) -> tuple[Fit | None, list[Way]]:
    """The profile's room for the pair, and the ways to run it: measured ones where this machine is asked for and has any."""
    one = device_of(recipe)
    if one is not None:
        longest = one.max_draft_length if one.draft_length is None else one.draft_length
        room, rates = fit(one, target, drafter, own_bytes(recipe)), rates_of_profile(one, share)
        named = "with the target's own file" if room.own else f"{one.target}{room.mode}"
        return room, [budget(target, drafter, one.engine, named, rates, longest, room.streamed)]
    ways = measured(target, drafter)
    if not ways:
        rates = rates_of_machine(hardware if hardware.name == THIS_MACHINE else this_machine())
        ways = [budget(target, drafter, engine, precision, rates) for engine, precision in UNMEASURED]
    return None, ways


def recipes_for(target: str) -> tuple[str, ...]:
    """Shipped recipes whose target this is."""
    return tuple(
        name for name, file in shipped_recipes().items() if load_recipe(file).get("target") == target
    )
