"""A bench as a picture: block efficiency and token rate for each draft length. Needs matplotlib (the extra 'plot')."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.core.pictures import bars, new_figure, save, tidy
from edgespec_runtime.bench.report import AUTO, PLAIN, Summary

_TARGET, _DRAFT = "#555555", "#1f6f8b"


def plot_bench(file: Path, summaries: Sequence[Summary], title: str) -> None:
    """Write a PNG with two panels: τ, and tokens per second with the plain line. Bars are 95 % intervals."""
    plain = next(summary for summary in summaries if summary.draft_length == PLAIN)
    drafted = [summary for summary in summaries if summary.draft_length > PLAIN]
    chosen = [summary for summary in summaries if summary.draft_length == AUTO]
    lengths = [summary.draft_length for summary in drafted]
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=11)

    _points(left, lengths, [summary.block_efficiency for summary in drafted], "measured")
    most = [length + 1 for length in lengths]
    left.plot(lengths, most, ":", color=_TARGET, linewidth=1, label="most possible, γ + 1")
    left.set_ylabel("block efficiency τ (tokens per target pass)")

    value, low, high = plain.token_rate
    right.axhline(value, color=_TARGET, linewidth=1.5, label="plain decoding")
    right.axhspan(low, high, color=_TARGET, alpha=0.15, linewidth=0)
    _points(right, lengths, [summary.token_rate for summary in drafted], "speculative decoding")
    for summary in chosen:
        look = {"color": _DRAFT, "linestyle": "--", "linewidth": 1.2, "label": "γ chosen block by block"}
        left.axhline(summary.block_efficiency[0], **look)
        right.axhline(summary.token_rate[0], **look)
    left.set_ylim(bottom=1)
    right.set_ylim(bottom=0)
    right.set_ylabel("tokens per second (prefill apart)")
    for axes in (left, right):
        axes.set_xlabel("draft length γ")
        axes.set_xticks(lengths)
        tidy(axes)
        axes.legend(frameon=False, fontsize=9)
    save(figure, file)


def _points(
    axes: Any, lengths: Sequence[int], values: Sequence[tuple[float, float, float]], label: str
) -> None:
    middle, errors = bars(values)
    look = {"fmt": "o-", "color": _DRAFT, "capsize": 3, "markersize": 4, "linewidth": 1.5}
    axes.errorbar(lengths, middle, yerr=errors, **look, label=label)
