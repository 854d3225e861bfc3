"""Trade-off curves as a picture: each metric against latency and against rejection rate. Needs matplotlib (the extra 'plot')."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.core.pictures import bars, new_figure, save, tidy
from edgespec_runtime.tradeoff.arms import LARGE, SMALL
from edgespec_runtime.tradeoff.report import Study, Summary, curves_of

_COLOURS = (
    *("#1f6f8b", "#c1666b", "#4d7c3a", "#8a5fa8", "#d9822b"),
    *("#3a9d9d", "#a0527a", "#7a6a4f", "#2b4c9b", "#888c1f"),
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_ENDS = {LARGE: ("*", 13, "#222222"), SMALL: ("d", 8, "#777777")}


def plot_tradeoff(file: Path, study: Study, summaries: Sequence[Summary]) -> None:
    """Write a PNG: a row of two panels for each metric, a line for each rule through its values of a.

    Bars are 95 % intervals of the difference from AR-large, paired by prompt.
    """
    metrics = study.metrics
    figure = new_figure(11, 0.8 + 3.7 * len(metrics))
    about = study.about
    figure.suptitle(f"{about['title']}: {about['pair']}, {about['engine']} {about['precision']}", fontsize=11)
    panels = figure.subplots(len(metrics), 2, squeeze=False)
    for row, metric in zip(panels, metrics, strict=True):
        _panel(row[0], summaries, metric, lambda s: s.latency[0])
        _panel(row[1], summaries, metric, lambda s: s.rejection_rate)
        row[0].set_ylabel(study.label(metric))
        row[1].sharey(row[0])
    panels[-1][0].set_xlabel("seconds per token / AR-large's")
    panels[-1][1].set_xlabel("rejected / tested draft tokens")
    names = panels[0][0].get_legend_handles_labels()  # every arm has a latency
    figure.legend(*names, loc="outside right upper", frameon=False, fontsize=9)
    save(figure, file)


def _panel(
    axes: Any, summaries: Sequence[Summary], metric: str, place: Callable[[Summary], float | None]
) -> None:
    """Points at `place` on the x axis; an end point that has none is a horizontal line alone."""
    for number, (name, points) in enumerate(curves_of(summaries).items()):
        placed = [(x, point) for point in points if (x := place(point)) is not None]
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        xs, ys = [x for x, _ in placed], [point.quality[metric][0] for _, point in placed]
        _, errors = bars([point.behind[metric] for _, point in placed])
        axes.errorbar(xs, ys, yerr=errors, fmt="none", ecolor=colour, alpha=0.25, linewidth=1)
        alone = {"markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.6, "zorder": 6}
        look = alone if len(points) == 1 else {"markersize": 5}  # a single point shows through the others
        axes.plot(xs, ys, marker=mark, color=colour, linewidth=1.4, label=name, **look)
    for end, (mark, size, colour) in _ENDS.items():
        summary = next(s for s in summaries if s.arm == end)
        value, x = summary.quality[metric][0], place(summary)
        axes.axhline(value, color=colour, linestyle=":", linewidth=1)
        if x is not None:
            axes.plot([x], [value], mark, color=colour, markersize=size, zorder=5, label=end.name)
    tidy(axes)
