"""The options of a verb from four places: flag > environment > config file > default. Knows the places, not the verbs.

The config file is YAML, the user's own:

    quiet: true
    chat:
      temperature: 0.7
    serve: {port: 8081}
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import read_bounded
from edgespec.core.options import check, from_mapping, given, knob, knobs_of, merge, underscored, words_of
from edgespec.core.texts import parse_yaml
from edgespec.shell.environment import config_file

MOST_BYTES = 65_536  # of a file that people write by hand


@dataclass(frozen=True)
class EveryVerb:
    """Options that every verb has; in the config file they stand at the top."""

    quiet: bool = knob(False, "no notes and no progress; results and errors stay")


EVERY = tuple(EveryVerb.__annotations__)


@dataclass(frozen=True)
class Settings:
    """A verb's options without its defaults, nested as `from_mapping` reads them.

    origins: dotted name -> where it was set, for those that no flag set.
    """

    values: dict[str, Any]
    every: EveryVerb
    origins: dict[str, str] = field(default_factory=dict)

    def origins_named_in(self, message: str) -> str:
        """Where the options that a complaint names were set; '' where it names none of them."""
        named = [
            f"{name} comes from {origin}"
            for name, origin in self.origins.items()
            if {name, words_of(name)} & set(re.findall(r"[\w.-]+\w", message.replace("--", "")))
        ]
        return f" ({'; '.join(named)})" if named else ""


def settings_of(
    verb: str, kind: type[Any], flags: dict[str, Any], *, verbs: Collection[str], recipe: Collection[str] = ()
) -> Settings:
    """Everything that is set for one verb with the options `kind`.

    flags: what the command line gave, nested. verbs: all names, which a config file may have as keys. recipe: options that only
    a recipe file or a flag sets, so that a build can be repeated from its recipe.

    Raises InputError: an unknown key, an option that cannot be set there, a value out of its bounds, each with its place.
    """
    # arguments without a flag cannot be set beforehand
    known = {name: about for name, about in knobs_of(kind) if not about[1].metadata.get("positional")}
    config, file = read_config(verbs), config_file()
    where = f"{file}: {verb}"
    low = dict(_of_file(underscored(config.get(verb) or {}, where), known, where))
    high = dict(_of_environment(verb, verbs, known))
    origins = dict.fromkeys(low, str(file)) | {name: variable_of(verb, name) for name in high}
    for name, origin in origins.items():
        if name.partition(".")[0] in recipe:
            raise InputError(
                f"{name} is set in {origin} and belongs in a recipe, from which a build can be repeated; give --recipe FILE.yaml"
            )
    variables = {name: os.environ.get(variable_of("", name)) for name in EVERY}
    every = {name: config[name] for name in EVERY if name in config}
    every |= {name: value for name, value in variables.items() if value}
    every |= {name: flags[name] for name in EVERY if name in flags}
    values = merge(_nested(low), merge(_nested(high), flags))
    return Settings(
        {name: value for name, value in values.items() if name not in EVERY},
        from_mapping(EveryVerb, every),
        {name: origin for name, origin in origins.items() if not _has(flags, name)},
    )


def read_config(verbs: Collection[str]) -> dict[str, Any]:
    """The config file: verb -> its options, and the options of every verb. {} where there is none. Raises InputError."""
    file, keys = config_file(), {*verbs, *EVERY}
    if not file.exists():
        return {}
    values = parse_yaml(read_bounded(file, limit=MOST_BYTES), str(file))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise InputError(f"{file} holds {type(values).__name__}; it must map verbs to their options")
    for key, value in values.items():
        if key not in keys:
            raise InputError(f"{file}: unknown key {str(key)!r}{did_you_mean(str(key), keys)}")
        if key in verbs and not isinstance(value, dict | None):
            raise InputError(f"{file}: {key} is {value!r}; it must be a mapping of options")
    return values


def _of_file(
    values: Mapping[Any, Any], known: Mapping[str, tuple[Any, Field[Any]]], where: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    names = {words_of(name): name for name in known}
    for key, value in values.items():
        words = words_of(f"{prefix}{key}")
        if isinstance(value, Mapping) and any(one.startswith(f"{words}.") for one in names):
            yield from _of_file(value, known, where, f"{words}.")
        elif words not in names:
            raise InputError(f"{where}: unknown option {prefix + str(key)!r}{did_you_mean(words, names)}")
        else:
            yield names[words], check(value, *known[names[words]], name=f"{where}.{prefix}{key}")


def variable_of(verb: str, name: str) -> str:
    """EDGESPEC_CHAT_TEMPERATURE; without a verb EDGESPEC_QUIET."""
    words = "_".join(filter(None, ["edgespec", verb, words_of(name)]))
    return words.replace("-", "_").replace(".", "_").upper()


def _of_environment(
    verb: str, verbs: Collection[str], known: Mapping[str, tuple[Any, Field[Any]]]
) -> Iterator[tuple[str, Any]]:
    """Options in variables. One that begins with this verb and names none of its options is refused."""
    names = {variable_of(verb, name): name for name in known}
    begins = f"{variable_of(verb, '')}_"
    others = tuple(f"{variable_of(one, '')}_" for one in verbs if one.startswith(f"{verb}-"))
    for variable, value in os.environ.items():
        if variable in names:
            yield names[variable], check(value, *known[names[variable]], name=variable)
        elif variable.startswith(begins) and not variable.startswith(others):
            raise InputError(f"the variable {variable} names no option{did_you_mean(variable, names)}")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return given(argparse.Namespace(**flat))


def _has(nested: Mapping[str, Any], dotted: str) -> bool:
    """Whether a nested mapping has the option."""
    first, _, rest = dotted.partition(".")
    return first in nested and (not rest or _has(nested[first], rest))
