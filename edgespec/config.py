"""Show what your config file and the environment set, and every variable that edgespec reads; or tell where the file is.

A flag wins over the environment, the environment over the config file. docs/shell.md has the file's form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.cli import VERBS, parser_of, settings
from edgespec.core.errors import did_you_mean
from edgespec.core.options import from_mapping, knob, words_of
from edgespec.core.output import json_knob, note, write_result
from edgespec.core.table import table
from edgespec.shell.environment import HIDDEN, OPTION, VARIABLES, config_file, shown
from edgespec.shell.settings import EVERY, read_config, variable_of


@dataclass(frozen=True)
class Options:
    action: str = knob(
        "show",
        "show: what is set and where, and the variables; path: the config file's name, there or not",
        choices=("show", "path"),
        positional=True,
    )
    json: str = json_knob()


SECRET = ("key", "token")  # ends of names of options whose value is never printed


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    file = config_file()
    about: dict[str, Any] = {"file": str(file), "exists": file.is_file()}
    if options.action == "path":
        print(file)
    else:
        rows = list(set_options())
        print(f"config file: {file}{'' if file.is_file() else ' (not there)'}\n")
        if rows:
            print(table(("option", "value", "set in"), rows, left=3), end="\n\n")
        variables = [(name, shown(name) or "-", one.what) for name, one in VARIABLES.items()]
        print(table(("variable", "value", "what it is"), variables, left=3))
        about["options"] = [dict(zip(("option", "value", "set_in"), row, strict=True)) for row in rows]
        about["variables"] = {
            name: {"value": shown(name) or None, **asdict(one)} for name, one in VARIABLES.items()
        }
        for name in strange():
            note(
                f"the variable {name} is set, and edgespec reads none of that name{did_you_mean(name, VARIABLES)}"
            )
    write_result(options.json, about)
    return 0


def set_options() -> Iterator[tuple[str, Any, str]]:
    """(option, value, where it is set) of everything that the config file and the environment set. Raises InputError."""
    config = read_config(VERBS)
    yield from ((name, config[name], str(config_file())) for name in EVERY if name in config)
    for verb in VERBS:
        if verb in config or any(name.startswith(f"{variable_of(verb, '')}_") for name in os.environ):
            chosen = settings(verb, parser_of(verb)[0], {})
            for dotted, origin in chosen.origins.items():
                value: Any = chosen.values
                for part in dotted.split("."):
                    value = value[part]
                if dotted.endswith(SECRET):
                    value = HIDDEN
                yield f"{verb} --{words_of(dotted)}", value, origin


def strange() -> list[str]:
    """Variables that begin as edgespec's do and are none: a misspelt name would be passed over."""
    known = {*VARIABLES, *(variable_of("", name) for name in EVERY)} - {OPTION}
    begins = tuple(f"{variable_of(verb, '')}_" for verb in VERBS)
    return sorted(
        name
        for name in os.environ
        if name.startswith("EDGESPEC_") and name not in known and not name.startswith(begins)
    )
