"""Acceptance: τ and α, also by position in the draft, with intervals; sample replies with what was accepted in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.pictures import bars
from edgespec.report.fields import Fields, Interval, clean
from edgespec.report.figures import MUTED, RUNS, drawn, legend
from edgespec.report.gather import Run
from edgespec.report.measured import by_position
from edgespec.report.parts import Cell, Figure, Reply, Section, Table, between, number, of_run
from edgespec.report.sources import BENCH

DASHES = ("-", "--", ":", "-.")  # one for each sampling of a run
MARKS = "osD^"
MOST_REPLIES = 6
MOST_PIECES = 2000  # of one reply
CHARACTERS = 6000  # of one reply that are shown, and 1,000 of its prompt


@dataclass(frozen=True)
class Row:
    """One way of drafting. `number`: of its run; `style`: which of that run's lines."""

    number: int
    name: str
    tau: Interval | None
    alpha: Cell
    positions: list[Interval]
    style: int = 0


def acceptance_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "acceptance",
        "What is accepted",
        "τ is tokens per target pass, between 1 and γ + 1. α is the share of tested draft tokens that the target kept. A token "
        "is tested only if all before it in its draft were kept, so later positions have fewer tests and wider intervals.",
    )
    for kind, rows_of, words, missing, command in (
        (
            "bench",
            _benched,
            "Measured by bench on the exported files",
            "acceptance of the exported files",
            "edgespec bench BUNDLE --json bench.json",
        ),
        (
            "torch",
            _evaluated,
            "Measured on held-out prompts when it was built",
            "acceptance when it was built",
            "edgespec build-drafter, whose evaluation measures it",
        ),
    ):
        found = {run.number: rows_of(run) for run in runs}
        if lines := [row for rows in found.values() for row in rows if row.positions]:
            section.parts.append(_figure(lines, kind, words, len(runs)))
        tables = {number: _tables(rows, words) for number, rows in found.items() if rows}
        section.beside(tables, missing, command)
    return section


def _benched(run: Run) -> list[Row]:
    """A row for every fixed γ; positions of the longest drafts alone, which have them all."""
    bench = run.bench
    if bench is None:
        return []
    return [
        Row(
            run.number,
            one.name,
            one.tau,
            number(one.alpha),
            by_position(bench.counts.get(one.draft_length, [])) if one.draft_length == bench.longest else [],
        )
        for one in bench.drafted
    ]


def _evaluated(run: Run) -> list[Row]:
    """A row for every way of sampling and γ; positions of the longest drafts of each way."""
    longest: dict[str, int] = {}
    for one in run.settings:
        longest[one.where] = max(one.draft_length, longest.get(one.where, 0))
    return [
        Row(
            run.number,
            f"{one.where}, γ = {one.draft_length}",
            one.tau,
            between(one.alpha),
            by_position(one.counts) if one.draft_length == longest[one.where] else [],
            list(longest).index(one.where),
        )
        for one in run.settings
    ]


def _tables(rows: Sequence[Row], title: str) -> list[Table]:
    """τ and α of every row; then α by position, a column for each row that has it."""
    cells = [[Cell(row.name), between(row.tau), row.alpha] for row in rows]
    tables = [Table(["", "τ", "α"], cells, title=title)]
    if long := [row for row in rows if row.positions]:
        places = enumerate(zip_longest(*(row.positions for row in long)), 1)
        cells = [
            [Cell(str(place)), *(between(one) if one else Cell("") for one in values)]
            for place, values in places
        ]
        tables.append(Table(["position", *(row.name for row in long)], cells, title="α by position"))
    return tables


def _figure(rows: Sequence[Row], kind: str, words: str, runs: int) -> Figure:
    def draw(axes: Any) -> None:
        longest = max(len(row.positions) for row in rows)
        for place, row in enumerate(rows):
            shift = 0.06 * (place - (len(rows) - 1) / 2)  # so that intervals stand beside each other
            xs = [1 + at + shift for at in range(len(row.positions))]
            values, errors = bars(row.positions)
            colour, name = RUNS[row.number], of_run(row.name, row.number, runs)
            axes.errorbar(
                xs, values, yerr=errors, color=colour, elinewidth=1.0, marker=MARKS[row.style % len(MARKS)],
                linestyle=DASHES[row.style % len(DASHES)], label=name,
            )  # fmt: skip
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0.6, longest + 0.4)
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlabel("position in the draft", color=MUTED)
        axes.set_ylabel("α at the position", color=MUTED)
        if len(rows) > 1:
            legend(axes, 2)

    svg = drawn(f"acceptance-{kind}", draw)
    return Figure(svg, f"Acceptance rate by position in the draft. {words}.", f"{words}.")


def replies_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "replies",
        "Sample replies",
        "Marked text was proposed by the drafter and kept by the target; the rest the target wrote itself.",
    )
    replies = {
        run.number: list(map(_reply, run.fields(BENCH).objects("samples", MOST_REPLIES))) for run in runs
    }
    section.beside(
        replies,
        "replies with accepted tokens marked",
        "edgespec bench BUNDLE --json bench.json, of this version or later",
    )
    return section


def _reply(found: Fields) -> Reply:
    pieces, left = [], CHARACTERS
    for part in found.lists("parts", MOST_PIECES):
        if len(part) != 2 or not isinstance(part[0], str) or not isinstance(part[1], bool):
            raise InputError(
                f"{found.where}: a piece of 'parts' is {clean(repr(part), 80)}; [text, true or false] is wanted: measure it again"
            )
        if left > 0 and part[0]:
            pieces.append((clean(part[0], left, lines=True), part[1]))
            left -= len(part[0])
    tokens, passes, accepted = (found.whole(key) for key in ("tokens", "passes", "accepted"))
    length = found.whole("draft_length")
    words = [
        f"γ = {length}" if length else "",
        f"{tokens:,} tokens in {passes:,} target passes" if tokens is not None and passes else "",
        f"{accepted:,} of them ({accepted / tokens:.0%}) proposed by the drafter"
        if accepted is not None and tokens
        else "",
    ]
    return Reply(found.text("prompt", 1000, lines=True), pieces, ", ".join(filter(None, words)))
