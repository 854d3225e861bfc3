"""Trade-off curves: what each acceptance rule gives up for its speed, from a study of `edgespec tradeoff`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from edgespec.core.manifest import HEAD
from edgespec.report.fields import Fields, clean
from edgespec.report.figures import INK, MUTED, RUNS, drawn
from edgespec.report.gather import TRADEOFF, Run
from edgespec.report.parts import Cell, Figure, Part, Section, Table, between, number

LARGE, SMALL = "AR-large", "AR-small"
MARKS = "osD^vP"
MOST_POINTS = 200  # arms of a study
MOST_METRICS = 3


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
    found = [one for one in study.objects("summaries", MOST_POINTS) if one.interval("latency") is not None]
    metrics = dict.fromkeys(name for one in found for name in one.keys("quality", MOST_METRICS))
    about = study.object("about")
    how = f"{about.text('engine')} {about.text('precision')}, {about.text('date')}"
    parts: list[Part] = [f"{about.text('title', 100)}: {how}."]
    for place, metric in enumerate(list(metrics)[:MOST_METRICS]):
        parts += [_figure(found, metric, f"{run.number}-{place}"), _table(found, metric)]
    return parts


def _figure(found: Sequence[Fields], metric: str, name: str) -> Figure:
    known = []
    for one in found:
        arm, latency, quality = one.object("arm"), one.interval("latency"), one.object("quality")
        if latency is not None and (value := quality.interval(metric)) is not None:
            known.append((arm.text("curve", 40), arm.number("value") or 0.0, latency[0], value[0]))

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


def _table(found: Sequence[Fields], metric: str) -> Table:
    """A row for every arm; latency in units of AR-large's."""
    rows = []
    for one in found:
        arm = one.object("arm")
        curve, value = arm.text("curve", 40), arm.number("value")
        at = "" if value is None else f"{arm.text('parameter', 20)} = {value:g}"
        quality, behind = (one.object(name).interval(metric) for name in ("quality", "behind"))
        rejected = None if curve in (LARGE, SMALL) else one.number("rejection_rate")
        rows.append(
            [
                Cell(curve, at),
                number(quality[0] if quality else None, ".3f"),
                Cell("") if curve == LARGE or behind is None else between(behind, 3),
                Cell("1") if curve == LARGE else between(one.interval("latency")),
                number(rejected, ".0%"),
            ]
        )
    return Table(["", clean(metric, 40), "minus AR-large's", "latency", "rejected"], rows)
