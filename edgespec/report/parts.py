"""What a page is made of: sections of tables, figures, replies and sentences. Knows nothing of what they tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.core.table import byte_size
from edgespec.report.fields import Interval

ABSENT = "–"


@dataclass(frozen=True)
class Cell:
    """A value, and in small type below it what belongs to it: an interval, a unit. `bar`: a share from 0 to 1 to draw."""

    text: str
    note: str = ""
    bar: float | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Columns of numbers to the right of the first `left` ones. `runs`: the number of the run that each column is of, or None."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: int = 1
    title: str = ""
    runs: Sequence[int | None] = ()


@dataclass(frozen=True)
class Figure:
    """A picture as SVG; `words` say what it shows to those who do not see it."""

    svg: Any
    words: str
    caption: str = ""


@dataclass(frozen=True)
class Code:
    """Something to read as it is, folded away on a screen where it has a `title`."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Reply:
    """A prompt and its reply in pieces; `pieces`: (text, whether the drafter proposed it)."""

    prompt: str
    pieces: Sequence[tuple[str, bool]]
    caption: str


Part = Table | Figure | Code | Reply | str
"""A string is a paragraph."""


@dataclass
class Section:
    """`lead`: a sentence or two below the title. `missing`: what is not there, and the command that makes it.

    Among its parts a mapping holds those of several runs, side by side, by the number of the run.
    """

    anchor: str
    title: str
    lead: str = ""
    parts: list[Part | Mapping[int, Sequence[Part]]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    def beside(self, runs: Mapping[int, Sequence[Part]], what: str, command: str) -> None:
        """The runs that have parts, side by side; where none has, `what` is missing and `command` makes it."""
        if told := {run: parts for run, parts in runs.items() if parts}:
            self.parts.append(told)
        else:
            self.missing.append((what, command))


def letter(run: int) -> str:
    """What a run is called on the page; `run` counts from 0."""
    return chr(ord("A") + run)


def of_run(words: str, run: int, runs: int) -> str:
    """Words that also name their run, where there are several."""
    return words if runs == 1 else f"{letter(run)}: {words}"


def number(value: float | None, form: str = ",.2f", note: str = "") -> Cell:
    return Cell(ABSENT if value is None else format(value, form), note)


def flips(found: int | None, positions: int | None, more: str = "") -> Cell:
    """Most likely tokens that changed, of so many positions; among none nothing was measured."""
    known = None if positions == 0 else found
    of = f"of {positions:,}" if positions and known is not None else ""
    return number(known, ",", ", ".join(filter(None, [of, more])))


def between(value: Interval | None, digits: int = 2, unit: str = "", *, strong: bool = False) -> Cell:
    """A value with its interval as the note."""
    if value is None:
        return Cell(ABSENT)
    middle, low, high = value
    return Cell(f"{middle:,.{digits}f}{unit}", f"{low:,.{digits}f} to {high:,.{digits}f}", strong=strong)


def rate(value: Interval | float | None) -> Cell:
    """Tokens a second, alone or with their interval: three digits are enough."""
    if value is None:
        return Cell(ABSENT)
    middle = value if isinstance(value, float) else value[0]
    digits = 0 if abs(middle) >= 100 else 1 if abs(middle) >= 10 else 2
    return number(value, f",.{digits}f") if isinstance(value, float) else between(value, digits)


def size(count: float | None) -> Cell:
    """Bytes."""
    if count is None:
        return Cell(ABSENT)
    return Cell(byte_size(count) if count >= 2**10 else f"{count:.0f} B")
