"""List the devices edgespec has a profile of, or show one: its files, its precisions, its memory, and what was run where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping, knob
from edgespec.core.table import table
from edgespec.core.texts import printable_json
from edgespec.planning.devices_fit import fit
from edgespec.recipe.devices import Profile, profile, profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target


@dataclass(frozen=True)
class Options:
    action: str = knob(
        "list", "list: the table; show: everything about one", choices=("list", "show"), positional=True
    )
    name: str = knob("", "with show: a device's name", positional=True)
    target: str = knob("", "with show: also what this target and a drafter of the usual size take there")
    json: bool = knob(False, "print JSON")


OPTIONS = Options


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    if (options.action == "show") != bool(options.name):
        raise InputError(
            f"devices {options.action} {options.name}".rstrip() + ": show takes a NAME and list takes none; "
            f"the names are {', '.join(profiles())}"
        )
    if options.action == "show":
        one = profile(options.name)
        print(printable_json(asdict(one)) if options.json else shown(one))
        if options.target and not options.json:
            print(f"\n{taken(one, options.target)}")
    elif options.json:
        print(printable_json([asdict(one) for one in profiles().values()]))
    else:
        rows = [
            (
                one.name,
                one.engine,
                f"{one.target} / {one.drafter}",
                f"{one.context:,}",
                f"{one.memory_gib:g} GiB",
                ran(one),
            )
            for one in profiles().values()
        ]
        print(table(("device", "engine", "target / drafter", "context", "memory", "run here"), rows, left=3))
        print(
            "\nedgespec devices show NAME says what was run where; edgespec export --device NAME writes its files."
        )
    return 0


def taken(one: Profile, target: str) -> str:
    """What a target and a drafter of the usual size take of a device's memory. Raises InputError for an unknown target."""
    shape = shape_of_target(target)
    found = fit(one, shape, derive(shape, DrafterOptions()))
    verdict = "It fits." if found.fits else f"It does not fit; {found.cure}."
    return f"{found.table()}\n{verdict}"


def ran(one: Profile) -> str:
    """The first words of what was run where."""
    return "yes" if one.ran.startswith("run ") else "no"


def shown(one: Profile) -> str:
    """One profile in lines."""
    files = "; ".join(f"{name} {', '.join(getattr(one, name))}" for name in one.formats)
    rows = {
        "engine": one.engine,
        "files": files,
        "precision": f"target {one.target}, drafter {one.drafter}",
        "draft length": one.policy,
        "context": f"{one.context:,} tokens (a model with a shorter one keeps its own)",
        "memory": f"{one.memory_gib:g} GiB for the pair",
        "bandwidth": f"{one.bandwidth_gb_s:g} GB/s at most ({one.memory}; arithmetic, not measured)",
        "run": one.ran,
    }
    width = max(map(len, rows))
    lines = [f"{one.name}: {one.title}", "", *(f"{name:<{width}}  {value}" for name, value in rows.items())]
    return "\n".join([*lines, "", f"edgespec export --target FOLDER --drafter FOLDER --device {one.name}"])
