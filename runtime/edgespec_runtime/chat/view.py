"""What shows a chat to a person or a program, in plain text; screen.py draws it on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgespec.core.output import is_quiet
from edgespec.core.texts import harmless
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.chat.status import Tally

Show = Callable[[str, bool], None]
"""Takes the next text of a reply, '' for none yet, and whether the drafter wrote it."""


class View:
    """For pipes, dumb terminals and NO_COLOR: replies and nothing else go to standard output, everything else to standard error,
    without one escape code. With `--quiet`, only replies, what `say` is given and `side_by_side` show.
    """

    def say(self, text: str) -> None:
        """What somebody asked for beside a reply, or what went wrong."""
        print(harmless(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """What nobody asked for."""
        if not is_quiet():
            self.say(text)

    @contextmanager
    def reply(self, tally: Tally, options: Options) -> Iterator[Show]:
        """A reply comes, whose figures are in `tally`; leaving it ends the reply's text."""
        begun = False

        def show(text: str, drafted: bool) -> None:
            nonlocal begun
            begun = begun or tally.counts.emitted > 0
            self._write(text)

        try:
            yield show
        finally:  # also where an engine fails: what it says about it stands on a line of its own
            if begun:
                self._write("\n")

    @contextmanager
    def working(self, tally: Tally) -> Iterator[Show]:
        """Something is decoded of which only the figures show."""
        yield lambda text, drafted: None

    def status(self, line: str) -> None:
        """The figures of a reply that is complete."""
        self.note(f"[{line}]")

    def side_by_side(self, runs: list[Tally], colour: bool) -> None:
        """The same prompt answered in several ways."""
        for run in runs:
            self.say(run.heading())
            self._write("".join(piece.text for piece in run.pieces) + "\n")

    def legend(self) -> None:
        """What the colours mean, where there are some."""

    @staticmethod
    def _write(text: str) -> None:
        if text:
            print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
