"""What a training leaves to look at: scalars for TensorBoard, and a picture of its log. Knows rows of numbers only.

Both are extras: without tensorboardX (in `edgespec[train]`) or matplotlib (in `edgespec[plot]`) a training goes on all the same.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.files import writing
from edgespec.core.pictures import save, tidy
from edgespec.core.table import count, duration

FOLDER = "tensorboard"
PANEL = (8.0, 3.4)  # inches, of the loss
ALPHA_HEIGHT = 0.6  # of the panel of α, in that of the loss
DPI = 150
LOG_RANGE = 8.0  # a loss that spans more than this factor is drawn on a logarithmic axis
POINTS = 60  # up to so many rows are drawn as points; more become a pale line under their moving mean

_LOSS, _ALPHA = "#1f6f8b", "#c1666b"


class Curves:
    """TensorBoard's event file under `folder`/tensorboard, one record a row, on the disk when `add` returns.

    A run that goes on from `step` opens a file of its own, which tells the reader to forget what earlier files hold of later
    steps: those are taken again. (SummaryWriter would hand the rows to a thread, and a kill would lose what it still holds.)
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder / FOLDER
        self.writer: Any = None
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        except ImportError:
            return
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = EventsWriter(str(self.folder / "events"), filename_suffix=f".{time.time_ns()}")
            log = SessionLog(status=SessionLog.START)
            self.writer.write_event(Event(wall_time=time.time(), step=step + 1, session_log=log))
            self.writer.flush()

    def add(self, row: dict[str, Any]) -> None:
        """Write the numbers of a row of the log that make a curve, at its step: no lists or names."""
        if self.writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        event = Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
        with writing(self.folder):
            self.writer.write_event(event)
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def plot_curves(log: Path, png: Path, title: str) -> bool:
    """Draw `log` (rows of log.jsonl with step, loss, tokens, seconds; α where measured) as a PNG: the loss, and α below it.

    Returns whether there is a picture: not without matplotlib, nor of an empty log.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return False
    watched = [row for row in rows if "alpha" in row]
    heights = (1.0, ALPHA_HEIGHT)[: 1 + bool(watched)]
    figure = Figure(figsize=(PANEL[0], PANEL[1] * sum(heights)), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    spent = f"{count(rows[-1]['tokens'])} tokens in {duration(rows[-1]['seconds'])}"
    panels[0].set_title(f"{title} ({spent})", fontsize=11)

    losses = [row["loss"] for row in rows]
    _draw(panels[0], [row["step"] for row in rows], losses, _LOSS)
    panels[0].set_ylabel("loss (mean over tokens)")
    if min(losses) > 0 and max(losses) > LOG_RANGE * min(losses):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].grid(which="minor", axis="y", alpha=0.12)
    if watched:
        alphas = [row["alpha"] for row in watched]
        _draw(panels[1], [row["step"] for row in watched], alphas, _ALPHA)
        panels[1].set_ylabel("α on held-out text")
        panels[1].annotate(
            f"{alphas[-1]:.3f}",
            (watched[-1]["step"], alphas[-1]),
            xytext=(0, -12),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_ALPHA,
        )
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    for axes in panels:
        tidy(axes)
    save(figure, png)
    return True


def _draw(axes: Any, steps: Sequence[int], values: Sequence[float], colour: str) -> None:
    """Points joined by a line, or, of many, a pale line under its moving mean."""
    if len(steps) <= POINTS:
        axes.plot(steps, values, "o-", color=colour, markersize=3, linewidth=1.5)
        return
    axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
    index = np.arange(len(values))
    edge = np.minimum(index, index[::-1])  # the window stays symmetric at the ends
    reach = np.minimum(math.ceil(len(steps) / POINTS), edge)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
    axes.plot(steps, means, color=colour, linewidth=1.6)
