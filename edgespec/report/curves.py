"""Trade-off curves: what each acceptance rule gives up for its speed, from a study of `edgespec tradeoff`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from edgespec.core.manifest import HEAD
from edgespec.report.fields import Fields, Interval, clean
from edgespec.report.figures import INK, MUTED, RUNS, drawn
from edgespec.report.gather import TRADEOFF, Run
from edgespec.report.parts import Cell, Figure, Part, Section, Table, between, number

LARGE, SMALL = "AR-large", "AR-small"
MARKS = "osD^vP"
MOST_POINTS = 200  # arms of a study
MOST_METRICS = 3


class Point(NamedTuple):
    """One arm of a study. `value`: of its parameter; `latency`: in units of AR-large's; `found`: its summary."""

    curve: str
    value: float | None
    latency: Interval
    found: Fields


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


def _study(run: Run) -> list[Part]:
    study = run.fields(TRADEOFF)
    points = [
        Point(arm.text("curve", 40), arm.number("value"), latency, one)
        for one in study.objects("summaries", MOST_POINTS)
        for arm in [one.object("arm")]
        if (latency := one.interval("latency")) is not None
    ]
    metrics = dict.fromkeys(name for one in points for name in one.found.keys("quality", MOST_METRICS))
    about = study.object("about")
    how = f"{about.text('engine')} {about.text('precision')}, {about.text('date')}"
    parts: list[Part] = [f"{about.text('title', 100)}: {how}."]
    for place, metric in enumerate(list(metrics)[:MOST_METRICS]):
        parts += [_figure(points, metric, f"{run.number}-{place}"), _table(points, metric)]
    return parts


def _figure(points: Sequence[Point], metric: str, name: str) -> Figure:
    known = [
        (point.curve, point.value or 0.0, point.latency[0], quality[0])
        for point in points
        if (quality := point.found.object("quality").interval(metric)) is not None
    ]

    def draw(axes: Any) -> None:
        rules = dict.fromkeys(curve for curve, *_ in known if curve not in (LARGE, SMALL))
        for place, rule in enumerate(rules):
            own = sorted((one for one in known if one[0] == rule), key=itemgetter(1))
            _, _, xs, ys = zip(*own, strict=True)
            axes.plot(
                xs, ys, color=RUNS[place % len(RUNS)], marker=MARKS[place % len(MARKS)], linewidth=1.4,
                label=clean(rule, 20),
            )  # fmt: skip
        for end, mark in ((LARGE, "*"), (SMALL, "d")):
            for curve, _, x, y in known:
                if curve == end:
                    axes.plot([x], [y], mark, color=INK, markersize=9, linestyle="", label=end)
                    axes.axhline(y, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set(xlabel="seconds per token / the target's", ylabel=clean(metric, 40))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Figure(drawn(f"tradeoff-{name}", draw), f"{clean(metric, 40)} against latency, rule by rule.")


def _table(points: Sequence[Point], metric: str) -> Table:
    rows = []
    for curve, value, latency, found in points:
        quality, behind = (found.object(name).interval(metric) for name in ("quality", "behind"))
        at = "" if value is None else f"{found.object('arm').text('parameter', 20)} = {value:g}"
        rejected = None if curve in (LARGE, SMALL) else found.number("rejection_rate")
        rows.append(
            [
                Cell(curve, at),
                number(quality[0] if quality else None, ".3f"),
                Cell("") if curve == LARGE or behind is None else between(behind, 3),
                Cell("1") if curve == LARGE else between(latency),
                number(rejected, ".0%"),
            ]
        )
    return Table(["", clean(metric, 40), "minus AR-large's", "latency", "rejected"], rows)
