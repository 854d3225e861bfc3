"""The knobs of a chat: those of the command line, and how a running chat changes them. Knows no terminal."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.options import check, help_of, knob
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.pair.bundle import LoadOptions

AUTOMATIC = ("auto", "default")
"""What a person says for a knob's default."""


@dataclass(frozen=True, kw_only=True)
class Options(DecodingOptions, LoadOptions):
    bundle: str = knob(
        "",
        help="bundle folder, or the name of a ready pair (default: choose from those found)",
        positional=True,
    )
    system: str = knob("", "system prompt")
    continue_: bool = knob(False, "go on with the last chat of this bundle")
    draft: bool = knob(True, "speculate with the drafter")
    colour: bool = knob(True, "colour the drafter's tokens that the target accepted, on a terminal")
    markdown: bool = knob(True, "show a reply's Markdown formatted once it is complete, on a terminal")


_CHANGEABLE = {field.name for field in dataclasses.fields(DecodingOptions)} | {"draft", "colour", "markdown"}
SETTABLE = {field.name: field for field in dataclasses.fields(Options) if field.name in _CHANGEABLE}
_HINTS = typing.get_type_hints(Options)


def shown(value: Any) -> str:
    """A knob's value as a person reads it."""
    return "auto" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)


def parted(argument: str) -> tuple[str, str]:
    """(knob, value) of `KNOB VALUE` or `KNOB=VALUE`; a rule has '=' of its own."""
    name, value = (*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), "")[:2]
    return name.replace("-", "_"), value.strip()


def changed(options: Options, /, **values: str) -> Options:
    """The options with other knobs, each given as text and checked as the command line does. Raises InputError."""
    new: dict[str, Any] = {}
    for name, value in values.items():
        if name not in SETTABLE:
            raise InputError(f"unknown knob {name!r}{did_you_mean(name, SETTABLE)}")
        if value in AUTOMATIC:
            new[name] = SETTABLE[name].default
        else:
            new[name] = check(value, _HINTS[name], SETTABLE[name], name)
    return dataclasses.replace(options, **new)


def choices_of(name: str) -> list[str]:
    """The values of a knob that can be listed, for completion."""
    field = SETTABLE.get(name)
    if field is None:
        return []
    if _HINTS[name] is bool:
        return ["on", "off"]
    known = [str(choice) for choice in field.metadata.get("choices") or field.metadata["names"]()]
    return [*known, "auto"] if field.default is None else known


def listed(options: Options) -> list[str]:
    """Every knob that can be changed, its value and what it is."""
    return [
        f"  {name} = {shown(getattr(options, name))}: {help_of(field)}" for name, field in SETTABLE.items()
    ]
