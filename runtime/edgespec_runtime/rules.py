"""Every acceptance rule by its name, and its parameters as knobs: `lossless`, `opt:a=0.3`, `lossy:a=0.2,beta=1`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.errors import InputError, did_you_mean
from edgespec.options import from_mapping
from edgespec_runtime.acceptance import LOSSLESS, Rule


@dataclass(frozen=True)
class NoParameters:
    pass


@dataclass(frozen=True)
class Kind:
    """A row of the table: what the rule is, its parameters (a dataclass of knobs), and how it is made of them."""

    help: str
    parameters: type[Any]
    make: Callable[[Any], Rule]


RULES: dict[str, Kind] = {
    "lossless": Kind("the target's own distribution", NoParameters, lambda _: LOSSLESS),
}


def rule_of(text: str) -> Rule:
    """The rule of `name` or `name:key=value,...`. Raises InputError: unknown name or key, value out of range."""
    name, _, rest = text.partition(":")
    if name not in RULES:
        raise InputError(f"unknown acceptance rule {name!r}{did_you_mean(name, RULES)}")
    kind = RULES[name]
    values: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            known = ", ".join(field.name for field in dataclasses.fields(kind.parameters)) or "none"
            raise InputError(
                f"rule {text!r}: {word!r} is no parameter; write name=value ({name} has: {known})"
            )
        values[key.strip()] = value.strip()
    return kind.make(from_mapping(kind.parameters, values, f"rule {name}"))
