"""Trade-off curves as a picture: each metric against latency and against rejection rate. Needs matplotlib (the extra 'plot')."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.core.files import whole_file
from edgespec_runtime.bench.plot import require_matplotlib
from edgespec_runtime.tradeoff.arms import LARGE, SMALL
from edgespec_runtime.tradeoff.report import Study, Summary, curves_of

_COLOURS = (
    "#1f6f8b",
    "#c1666b",
    "#4d7c3a",
    "#8a5fa8",
    "#d9822b",
    "#3a9d9d",
    "#a0527a",
    "#7a6a4f",
    "#2b4c9b",
    "#888c1f",
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_ENDS = {LARGE: ("*", 13, "#222222"), SMALL: ("d", 8, "#777777")}


def plot_tradeoff(file: Path, study: Study, summaries: Sequence[Summary]) -> None:
    """Write a PNG: a row of two panels for each metric, a line for each rule through its values of a.

    Bars are 95 % intervals of the difference from AR-large, paired by prompt.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    metrics = study.metrics
    figure = Figure(figsize=(11, 0.8 + 3.7 * len(metrics)), dpi=130, layout="constrained")
    about = study.about
    figure.suptitle(f"{about['title']}: {about['pair']}, {about['engine']} {about['precision']}", fontsize=11)
    panels = figure.subplots(len(metrics), 2, squeeze=False)
    for row, metric in zip(panels, metrics, strict=True):
        _panel(row[0], summaries, metric, lambda s: s.latency[0])
        _panel(row[1], summaries, metric, lambda s: s.rejection_rate)
        row[0].set_ylabel(study.label(metric))
        row[1].sharey(row[0])
    for axes, words in zip(
        panels[-1], ("seconds per token / AR-large's", "rejected / tested draft tokens"), strict=True
    ):
        axes.set_xlabel(words)
    handles = {
        label: handle
        for axes in panels[0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=9)
    with whole_file(file) as temporary:
        figure.savefig(temporary, format="png")


def _panel(
    axes: Any, summaries: Sequence[Summary], metric: str, place: Callable[[Summary], float | None]
) -> None:
    """Points at `place` on the x axis; an end point that has none is a horizontal line alone."""
    for number, (name, points) in enumerate(curves_of(summaries).items()):
        placed = [(x, point) for point in points if (x := place(point)) is not None]
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        xs, ys = [x for x, _ in placed], [point.quality[metric][0] for _, point in placed]
        behind = [point.behind[metric] for _, point in placed]
        errors = [
            [max(0.0, value - low) for value, low, _ in behind],
            [max(0.0, high - value) for value, _, high in behind],
        ]
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
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
