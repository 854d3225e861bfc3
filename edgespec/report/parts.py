"""What a page is made of: sections of tables, figures, replies and sentences. Knows nothing of what they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    kind: str = "table"


@dataclass(frozen=True)
class Figure:
    """A picture as SVG; `words` say what it shows to those who do not see it."""

    svg: Any
    words: str
    caption: str = ""
    kind: str = "figure"


@dataclass(frozen=True)
class Words:
    """One or more sentences."""

    text: str
    kind: str = "words"


@dataclass(frozen=True)
class Code:
    """Something to read as it is, folded away on a screen where it has a `title`."""

    text: str
    title: str = ""
    kind: str = "code"


@dataclass(frozen=True)
class Reply:
    """A prompt and its reply in pieces; `pieces`: (text, whether the drafter proposed it)."""

    prompt: str
    pieces: Sequence[tuple[str, bool]]
    caption: str
    kind: str = "reply"


@dataclass(frozen=True)
class Column:
    """What is told of one run, beside the others."""

    run: int
    parts: Sequence[Any]


@dataclass(frozen=True)
class Columns:
    columns: Sequence[Column]
    kind: str = "columns"


@dataclass
class Section:
    """`lead`: a sentence or two below the title. `missing`: what is not there, and the command that makes it."""

    anchor: str
    title: str
    lead: str = ""
    parts: list[Any] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    def beside(self, columns: Sequence[Column], what: str, command: str) -> None:
        """Runs beside each other; where there are none, `what` is missing and `command` makes it."""
        if columns:
            self.parts.append(Columns(columns))
        else:
            self.lacks(what, command)

    def lacks(self, what: str, command: str) -> Section:
        """Say what is not there, and the command that makes it; gives the section."""
        self.missing.append((what, command))
        return self


def letter(run: int) -> str:
    """What a run is called on the page; `run` counts from 0."""
    return chr(ord("A") + run)


def of_run(words: str, run: int, runs: int) -> str:
    """Words that also name their run, where there are several."""
    return words if runs == 1 else f"{letter(run)}: {words}"


def number(value: float | None, digits: int = 2) -> Cell:
    return Cell(ABSENT if value is None else f"{value:,.{digits}f}")


def between(value: Interval | None, digits: int = 2, unit: str = "", *, strong: bool = False) -> Cell:
    """A value with its interval as the note."""
    if value is None:
        return Cell(ABSENT)
    middle, low, high = value
    return Cell(f"{middle:,.{digits}f}{unit}", f"{low:,.{digits}f} to {high:,.{digits}f}", strong=strong)


def rate(value: Interval | None) -> Cell:
    """Tokens a second: three digits are enough."""
    return between(value, rate_digits(value[0])) if value else Cell(ABSENT)


def rate_digits(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def size(count: float | None) -> Cell:
    """Bytes."""
    if count is None:
        return Cell(ABSENT)
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return Cell(f"{count / unit:,.1f} {name}")
    return Cell(f"{count:.0f} B")
