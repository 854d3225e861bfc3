"""The device profiles in words: a table of all, or one with its files, its precisions, its memory, and what was run where."""

from __future__ import annotations

from edgespec.core.table import table
from edgespec.planning.devices_fit import fit
from edgespec.recipe.devices import Profile, profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.targets import shape_of_target


def overview(target: str = "") -> str:
    """Every profile in a row; with a target, whether its pair fits. Raises InputError for an unknown target."""
    headers = ["device", "engine", "target / drafter", "context", "memory", "run here"]
    rows = [
        [one.name, one.engine, f"{one.target} / {one.drafter}", f"{one.context:,}", f"{one.memory_gib:g} GiB", ran(one)]
        for one in profiles().values()
    ]  # fmt: skip
    if target:
        shape = shape_of_target(target)
        drafter = derive(shape, DrafterOptions())
        headers.append("fits")
        for row, one in zip(rows, profiles().values(), strict=True):
            row.append("yes" if fit(one, shape, drafter).fits else "no")
    return (
        f"{table(headers, rows, left=3)}\n\n"
        "edgespec plan --devices --device NAME says what was run where; edgespec export --device NAME writes its files."
    )


def taken(one: Profile, target: str) -> str:
    """What a target and a drafter of the usual size take of a device's memory. Raises InputError for an unknown target."""
    shape = shape_of_target(target)
    return fit(one, shape, derive(shape, DrafterOptions())).text()


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
