"""How far a step is and how long it takes yet: a bar on a terminal, a line for every tenth in a log or a pipe.

`rich` draws the bar, and keeps what a verb prints meanwhile above it. A step of less than two seconds says nothing in a log.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

from edgespec.core.output import is_quiet
from edgespec.core.table import count, duration

SHOWN_AFTER = 2.0  # seconds that a step may take without a word in a log
MIB = 2**20
READ_RATE = 2**30  # bytes in a second that one thread hashes, or a good disk gives, at most
SILENCE = 600.0  # seconds without a line at most: a long training shows that it lives
BAR_WIDTH = 16  # columns of a terminal; the words beside it take about 50


class Bar:
    """How far one step is; this one shows it to nobody. `total` may change on the way, and is None where nobody knows it."""

    def __init__(self, label: str, total: float | None, unit: str, done: float) -> None:
        self.label, self.total, self.unit, self.n = label, total, unit, done
        self._first, self._start, self._said, self._tokens = done, time.monotonic(), "", 0

    def update(self, count: float = 1) -> None:
        """Go on by `count`."""
        self.n += count
        self.refresh()

    def skip(self, count: float) -> None:
        """Go on by `count` that were done before: they say nothing of how long the rest takes."""
        self._first += count
        self.update(count)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """What is at work now, or its rate."""
        self._said = text
        if refresh:
            self.refresh()

    def add_tokens(self, tokens: int) -> None:
        """So many more were written or read: their rate since the step began stands behind its other words."""
        self._tokens += tokens

    def refresh(self) -> None:
        """Show what has changed."""

    def close(self) -> None:
        """The step is over, done or not."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __str__(self) -> str:
        """'30 %, 3 of 10 files, 12.0s, 28.0s left, target int8'."""
        share, of, left, rate, made = "", "", "", "", self.n - self._first
        if self.total:
            share, of = f"{100 * self.n / self.total:.0f} %", f" of {self.total:,.0f}"
            if made and self.n < self.total:
                left = f"{duration(self.seconds * (self.total - self.n) / made)} left"
        if self._tokens:
            rate = f"{count(self._tokens / max(1e-9, self.seconds))} tok/s"
        counted = f"{self.n:,.0f}{of} {self.unit}"
        return ", ".join(filter(None, [share, counted, duration(self.seconds), left, self._said, rate]))


class _Lines(Bar):
    """For logs and pipes: at most a line for each tenth, the first one after SHOWN_AFTER even where nothing was done by then."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._lock, self._tenth, self._last = Lock(), -1, 0.0
        self._timer = Timer(SHOWN_AFTER, self.refresh)
        self._timer.daemon = True
        self._timer.start()

    def refresh(self) -> None:
        tenth = int(10 * self.n / self.total) if self.total else 0
        with self._lock:
            if self.seconds >= SHOWN_AFTER and (tenth > self._tenth or self.seconds - self._last >= SILENCE):
                self._tenth, self._last = max(tenth, self._tenth), self.seconds
                print(f"{self.label}: {self}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._timer.cancel()
        if self.total is None and self.seconds >= SHOWN_AFTER:
            print(f"{self.label}: {self}", file=sys.stderr, flush=True)


class _Drawn(Bar):
    """For terminals. Steps within a step share one picture; an inner one goes from it when it is over."""

    picture: Any = None  # rich's Progress while any bar is drawn

    def __init__(self, *about: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(*about)
        if _Drawn.picture is None:
            rest = Column(no_wrap=True, ratio=1)
            words = TextColumn("{task.fields[bar]}", markup=False, table_column=rest)
            label = TextColumn("{task.description}", markup=False)  # a name in it may have brackets
            columns = label, BarColumn(BAR_WIDTH), words
            console, tables = Console(stderr=True), sys.stdout.isatty()
            _Drawn.picture = Progress(*columns, console=console, redirect_stdout=tables, expand=True)
            _Drawn.picture.start()
        self._picture = _Drawn.picture
        self._task = self._picture.add_task(self.label, total=self.total, completed=self.n, bar=self)

    def refresh(self) -> None:
        self._picture.update(self._task, completed=self.n, total=self.total)

    def close(self) -> None:
        if len(self._picture.tasks) > 1:
            self._picture.remove_task(self._task)
        else:
            self._picture.live.transient = self.seconds < SHOWN_AFTER
            self._picture.stop()
            _Drawn.picture = None


@contextmanager
def progress(label: str, total: float | None, unit: str = "steps", done: float = 0) -> Iterator[Bar]:
    """A bar to `.update(n)` and `.set_postfix_str(text)`; starts at `done` when a stage resumes. `total`: None if not known.

    unit: what is counted, in the plural. Of several processes only the first shows one.
    """
    silent = is_quiet() or sys.stderr is None  # in a program of Python without a console
    drawn = not silent and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    kind = Bar if silent else _Drawn if drawn else _Lines
    bar = kind(label, total, unit, done)
    try:
        yield bar
        if bar.total and bar.n < bar.total:  # it was less than was thought
            bar.total = bar.n
            bar.refresh()
    finally:
        bar.close()


@contextmanager
def reading(label: str, size: int) -> Iterator[Bar]:
    """A bar of MiB for reading `size` bytes, shown where that takes long."""
    if size < SHOWN_AFTER * READ_RATE:
        yield Bar(label, None, "MiB", 0)
    else:
        with progress(label, size / MIB, "MiB") as bar:
            yield bar
