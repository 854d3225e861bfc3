"""Acceptance: τ and α, also by position in the draft, with intervals; sample replies with what was accepted in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from edgespec.core.errors import InputError
from edgespec.core.pictures import bars
from edgespec.report.fields import Fields, Interval, clean
from edgespec.report.figures import RUNS, drawn, legend
from edgespec.report.gather import BENCH, Run
from edgespec.report.measured import by_position
from edgespec.report.parts import Cell, Figure, Part, Reply, Section, Table, between, number, of_run

DASHES = ("-", "--", ":", "-.")  # one for each sampling of a run
MARKS = "osD^"
MOST_REPLIES = 6
MOST_PIECES = 2000  # of one reply
CHARACTERS = 6000  # of one reply that are shown, and 1,000 of its prompt


class Row(NamedTuple):
    """One way of drafting. `positions`: of the longest drafts alone, which have them all; `style`: which of a run's lines."""

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
        found = {run.number: rows for run in runs if (rows := rows_of(run))}
        if any(row.positions for rows in found.values() for row in rows):
            section.parts.append(_figure(found, kind, words, len(runs)))
        section.beside({run: _tables(rows, words) for run, rows in found.items()}, missing, command)
    return section


def _benched(run: Run) -> list[Row]:
    """A row for every fixed γ."""
    if (bench := run.bench) is None:
        return []
    longest = max(one.draft_length for one in bench.drafted)
    return [
        Row(
            one.name,
            one.tau,
            number(one.number("acceptance_rate")),
            by_position(bench.counts.get(longest, [])) if one.draft_length == longest else [],
        )
        for one in bench.drafted
    ]


def _evaluated(run: Run) -> list[Row]:
    """A row for every way of sampling and γ."""
    longest = {one.sampling: one.draft_length for one in run.settings}  # they ascend
    return [
        Row(
            f"{one.sampling}, γ = {one.draft_length}",
            one.metric("tau"),
            between(one.metric("alpha_empirical")),
            by_position(one.counts) if one.draft_length == longest[one.sampling] else [],
            list(longest).index(one.sampling),
        )
        for one in run.settings
    ]


def _tables(rows: Sequence[Row], title: str) -> list[Part]:
    """τ and α of every row; then α by position, a column for each row that has it."""
    cells = [[Cell(row.name), between(row.tau), row.alpha] for row in rows]
    tables: list[Part] = [Table(["", "τ", "α"], cells, title=title)]
    if long := [row for row in rows if row.positions]:
        places = zip_longest(*(row.positions for row in long))
        cells = [
            [Cell(str(place)), *(between(one) if one else Cell("") for one in values)]
            for place, values in enumerate(places, 1)
        ]
        tables.append(Table(["position", *(row.name for row in long)], cells, title="α by position"))
    return tables


def _figure(found: Mapping[int, Sequence[Row]], kind: str, words: str, runs: int) -> Figure:
    lines = [(run, row) for run, rows in found.items() for row in rows if row.positions]

    def draw(axes: Any) -> None:
        longest = max(len(row.positions) for _, row in lines)
        for place, (run, row) in enumerate(lines):
            shift = 0.06 * (place - (len(lines) - 1) / 2)  # so that intervals stand beside each other
            values, errors = bars(row.positions)
            axes.errorbar(
                [1 + at + shift for at in range(len(values))], values, yerr=errors, color=RUNS[run], elinewidth=1.0,
                marker=MARKS[row.style % len(MARKS)], linestyle=DASHES[row.style % len(DASHES)],
                label=of_run(row.name, run, runs),
            )  # fmt: skip
        axes.set(xlim=(0.6, longest + 0.4), xticks=range(1, longest + 1), xlabel="position in the draft")
        axes.set(ylim=(0, 1.02), ylabel="α at the position")
        if len(lines) > 1:
            legend(axes, 2)

    svg = drawn(f"acceptance-{kind}", draw)
    return Figure(svg, f"Acceptance rate by position in the draft. {words}.", f"{words}.")


def replies_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "replies",
        "Sample replies",
        "Marked text was proposed by the drafter and kept by the target; the rest the target wrote itself.",
    )
    section.beside(
        {run.number: list(map(_reply, run.fields(BENCH).objects("samples", MOST_REPLIES))) for run in runs},
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
    length, tokens, passes, accepted = map(found.whole, ("draft_length", "tokens", "passes", "accepted"))
    words = [f"γ = {length}"] if length else []
    if tokens and passes:
        words.append(f"{tokens:,} tokens in {passes:,} target passes")
    if tokens and accepted is not None:
        words.append(f"{accepted:,} of them ({accepted / tokens:.0%}) proposed by the drafter")
    return Reply(found.text("prompt", 1000, lines=True), pieces, ", ".join(words))
