"""The arms of a trade-off study, from names of rules and values of their parameter. Knows the rules table; runs nothing.

An arm is one way to answer: the target alone (AR-large), the drafter alone (AR-small), or the pair with one acceptance rule at
one value of its parameter. A curve is one rule through the values of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edgespec.core.errors import InputError
from edgespec_runtime.rules.table import RULES, SEQUENCE_CASCADE, TOKEN_CASCADE, rule_of, words_of

SWEPT = "a"
PARAMETERS = (SWEPT, "epsilon")  # what the points of a curve differ in


@dataclass(frozen=True)
class Arm:
    """`name`: what `--rule` takes, or AR-large, AR-small. `value` of `parameter` (a, epsilon): None where there is neither."""

    name: str
    curve: str
    parameter: str = ""
    value: float | None = None

    @property
    def at(self) -> str:
        """`a=0.3`"""
        return "" if self.value is None else f"{self.parameter}={self.value:g}"

    @property
    def tests_drafts(self) -> bool:
        """Whether the target reads what the drafter wrote; in sequential cascades it writes itself instead."""
        return self not in ENDS and self.curve.partition(":")[0] not in (TOKEN_CASCADE, SEQUENCE_CASCADE)


LARGE, SMALL = Arm("AR-large", "AR-large"), Arm("AR-small", "AR-small")
ENDS = (LARGE, SMALL)


def arms_of(rules: Sequence[str], alphas: Sequence[float]) -> list[Arm]:
    """Both end points, then every rule at every value.

    Args:
        rules: as `--rule` takes them, split at commas: a word with "=" and no ":" belongs to the rule before it.
        alphas: values for the rules that have a parameter a and name no value of it.

    Raises InputError: no rules, an unknown one, a value that a rule does not take.
    """
    joined: list[str] = []
    for word in map(str.strip, rules):
        if joined and "=" in word and ":" not in word:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    arms = [*ENDS, *(arm for rule in joined for arm in _points(rule, alphas))]
    if arms == list(ENDS):
        raise InputError(
            "there is no point to measure; name rules, as --rules opt,token-v3, and values in --alphas"
        )
    return list(dict.fromkeys(arms))


def _points(rule: str, alphas: Sequence[float]) -> Iterator[Arm]:
    rule_of(rule)
    name, given = words_of(rule)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(RULES[name].parameters)}
    parameter = next((known for known in PARAMETERS if known in defaults), "")
    others = ",".join(f"{key}={value}" for key, value in given.items() if key != parameter)
    curve = f"{name}:{others}" if others else name
    if not parameter:
        yield Arm(rule, curve)
        return
    swept = parameter == SWEPT and SWEPT not in given
    for value in alphas if swept else [float((defaults | given)[parameter])]:
        point = f"{curve}{',' if others else ':'}{parameter}={value!r}"
        try:
            rule_of(point)
        except InputError as error:
            raise InputError(
                f"{error} (a of --alphas, for {name}); leave {value:g} out, or give {name} values of its own: {name}:a=0.5"
            ) from error
        yield Arm(point, curve, parameter, value)
