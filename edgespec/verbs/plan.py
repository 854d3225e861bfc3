"""Before you download, train or pay: does a drafter for a target fit, does it pay, and how long does the build take? With
--devices: the device profiles, and whether the pair fits there. With --rehearse: every stage of a build at the target's true
size, with random weights.

    edgespec plan --target llama-2-7b-chat --recipe paper-llama-2-7b-chat --gpus 8xA100-80GB --device laptop-cpu-x86
    edgespec plan --target llama-2-7b-chat --devices
    edgespec plan --target llama-2-7b-chat --rehearse
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgespec.building.rehearse import run as run_rehearsal
from edgespec.building.rehearse_stages import RehearsalOptions
from edgespec.core.errors import InputError
from edgespec.core.options import as_flags, command_line, from_mapping, help_of, knob, section, with_default
from edgespec.core.output import write_result
from edgespec.planning.devices_fit import overview, shown, usual_fit
from edgespec.planning.plan import PlanOptions, make, read_options
from edgespec.planning.plan_report import as_json, text
from edgespec.recipe.devices import FORMAT_OF, Profile, profile, profiles
from edgespec.recipe.schema import Recipe


@dataclass(frozen=True)
class Options(PlanOptions):
    target: str = with_default(Recipe, "target", "")
    devices: bool = knob(
        False, "show the device profiles, or all about that of --device; with --target, whether the pair fits"
    )
    rehearse: bool = knob(
        False, "run every stage of a build at the target's true size, with random weights; takes minutes"
    )
    rehearsal: RehearsalOptions = section(RehearsalOptions, "what --rehearse does, and what it may take")


MODES = {"devices": {"target", "device", "json"}, "rehearse": {"target", "rehearsal", "json"}}
"""What an option that asks for another answer than the plan goes with."""


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, {name: given[name] for name in (*MODES, "rehearsal") if name in given})
    modes = [name for name in MODES if getattr(options, name)]
    rest = {name: value for name, value in given.items() if name not in MODES}
    if modes:
        _check_alone(modes, rest)
    if options.devices:
        return _devices(**{name: str(value) for name, value in rest.items()})
    if "rehearsal" in rest and not options.rehearse:
        flag = as_flags({"rehearsal": rest["rehearsal"]})[0].partition("=")[0]
        raise InputError(f"{flag} belongs to --rehearse; give both or neither")
    if not rest.get("target"):
        raise InputError(f"target is missing: {help_of(Recipe.__dataclass_fields__['target'])}")
    if options.rehearse:
        command = command_line("plan", Options, given)
        return run_rehearsal(rest["target"], options.rehearsal, command, str(rest.get("json", "")))
    how, recipe = read_options(rest)
    plan = make(recipe, how)
    print(text(plan))
    write_result(str(rest.get("json", "")), as_json(plan))
    return 0


def _check_alone(modes: list[str], rest: dict[str, Any]) -> None:
    """Raises InputError where an option is given that has no effect on the answer."""
    strange = [f"--{mode}" for mode in modes[1:]]
    strange += as_flags({name: value for name, value in rest.items() if name not in MODES[modes[0]]})
    if strange:
        flag = strange[0].partition("=")[0]
        raise InputError(f"{flag} has no effect with --{modes[0]}; leave one of them out")


def _devices(target: str = "", device: str = "", json: str = "") -> int:
    chosen = [profile(device)] if device else list(profiles().values())
    print(shown(chosen[0]) if device else overview(target))
    if device and target:
        print(f"\n{usual_fit(chosen[0], target).text(_flags_of(chosen[0]))}")
    write_result(json, [asdict(one) for one in chosen])
    return 0


def _flags_of(one: Profile) -> tuple[str, str]:
    """What changes the context and the precision: --devices takes neither, other verbs do."""
    return (
        "build-drafter's --export.context or export's --context",
        f"build-drafter's --export.{FORMAT_OF[one.engine]} or export's --precisions",
    )
