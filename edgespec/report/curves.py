"""Trade-off curves: what each acceptance rule gives up for its speed, from a study of `edgespec tradeoff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.manifest import HEAD
from edgespec.report.fields import Fields, Interval, clean
from edgespec.report.figures import INK, MUTED, RULES, drawn
from edgespec.report.gather import Run
from edgespec.report.parts import Cell, Figure, Section, Table, Words, between, number
from edgespec.report.sources import TRADEOFF

LARGE, SMALL = "AR-large", "AR-small"
MARKS = "osD^vP"
MOST_POINTS = 200  # arms of a study
MOST_METRICS = 3


@dataclass(frozen=True)
class Point:
    """One arm. `quality` and `behind` by metric; latency in units of AR-large's."""

    curve: str
    at: str
    value: float
    quality: dict[str, Interval | None]
    behind: dict[str, Interval | None]
    latency: Interval
    rejected: float | None


def curves_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "tradeoff",
        "Quality against latency",
        "Each line is one acceptance rule through the values of its parameter; the star is the target alone. Up and to the left "
        "is better. Latency is decoding time per token, in units of the target's own.",
    )
    columns = {run.number: _study(run) for run in runs if TRADEOFF in run.sources}
    heads = [run.manifest is not None and run.manifest.drafter.kind == HEAD for run in runs]
    if columns or not all(heads):  # tradeoff refuses a head
        section.beside(columns, "trade-off curves", "edgespec tradeoff BUNDLE --json tradeoff.json")
    return section


def _study(run: Run) -> list[Any]:
    found = run.fields(TRADEOFF)
    points, metrics = _points(found)
    about = found.object("about")
    how = f"{about.text('engine')} {about.text('precision')}, {about.text('date')}"
    parts: list[Any] = [Words(f"{about.text('title', 100)}: {how}.")]
    for place, metric in enumerate(metrics):
        parts += [_figure(points, metric, f"{run.number}-{place}"), _table(points, metric)]
    return parts


def _points(found: Fields) -> tuple[list[Point], list[str]]:
    """All arms whose latency is known, and the metrics of the study."""
    points, metrics = [], []
    for one in found.objects("summaries", MOST_POINTS):
        arm, latency = one.object("arm"), one.interval("latency")
        if latency is None:
            continue
        quality, behind = one.object("quality"), one.object("behind")
        metrics += [name for name in one.keys("quality", MOST_METRICS) if name not in metrics]
        value, parameter = arm.number("value"), arm.text("parameter", 20)
        points.append(
            Point(
                arm.text("curve", 40),
                "" if value is None else f"{parameter} = {value:g}",
                value or 0.0,
                {name: quality.interval(name) for name in metrics},
                {name: behind.interval(name) for name in metrics},
                latency,
                one.number("rejection_rate"),
            )
        )
    return points, metrics[:MOST_METRICS]


def _figure(points: Sequence[Point], metric: str, name: str) -> Figure:
    known = [(point, value[0]) for point in points if (value := point.quality.get(metric)) is not None]

    def draw(axes: Any) -> None:
        rules = dict.fromkeys(point.curve for point, _ in known if point.curve not in (LARGE, SMALL))
        for place, rule in enumerate(rules):
            own = sorted((one for one in known if one[0].curve == rule), key=lambda one: one[0].value)
            colour = RULES[place % len(RULES)]
            axes.plot(
                [point.latency[0] for point, _ in own],
                [value for _, value in own],
                color=colour, marker=MARKS[place % len(MARKS)], linewidth=1.4, label=clean(rule, 20),
            )  # fmt: skip
        for end, mark in ((LARGE, "*"), (SMALL, "d")):
            for point, value in known:
                if point.curve == end:
                    where = [point.latency[0]], [value]
                    axes.plot(*where, mark, color=INK, markersize=9, linestyle="", label=end)
                    axes.axhline(value, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set_xlabel("seconds per token / the target's", color=MUTED)
        axes.set_ylabel(clean(metric, 40), color=MUTED)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Figure(drawn(f"tradeoff-{name}", draw), f"{clean(metric, 40)} against latency, rule by rule.")


def _table(points: Sequence[Point], metric: str) -> Table:
    rows = []
    for point in points:
        quality, behind = point.quality.get(metric), point.behind.get(metric)
        end = point.curve in (LARGE, SMALL)
        rows.append(
            [
                Cell(point.curve, point.at),
                number(quality[0] if quality else None, ".3f"),
                Cell("") if point.curve == LARGE or behind is None else between(behind, 3),
                Cell("1") if point.curve == LARGE else between(point.latency),
                number(None if end else point.rejected, ".0%"),
            ]
        )
    return Table(["", clean(metric, 40), "minus AR-large's", "latency", "rejected"], rows)
