"""What shows a chat to a person or a program: figures of a reply as one line, and plain text; screen.py draws on a terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgespec.core.metrics import RawCounts
from edgespec.core.output import is_quiet
from edgespec.core.table import many
from edgespec.core.texts import harmless
from edgespec_runtime.chat.replies import Piece
from edgespec_runtime.chat.settings import Options

WINDOW = 2.0  # seconds of decoding that the present speed is the mean of: some blocks, so that it can be read

NOTES = {
    "stopped": "stopped by Ctrl-C; once more leaves",
    "length": "cut at max_new_tokens {max_new_tokens}",
    "context": "cut: the context of {context} tokens is full",
}
"""Why a reply ended, where it is worth saying."""


@dataclass
class Tally:
    """What is known of a reply.

    Attributes:
        context: tokens that the target's context holds.
        max_new_tokens: the longest reply.
        prompt: tokens of the prompt; `computed`: those that the target computed, the others were in its cache.
        step: seconds of a plain step; None where it is not known.
        first_token: seconds until the first text came.
        off: why there are no drafts now; '' where there are.
        finish: stopped, eos, length, context; '' while the reply comes.
        title: of one of several replies, shown before its figures.
        pieces: what came of it so far.
    """

    context: int
    max_new_tokens: int
    prompt: int = 0
    computed: int = 0
    counts: RawCounts = field(default_factory=RawCounts)
    step: float | None = None
    first_token: float = 0.0
    off: str = ""
    finish: str = ""
    title: str = ""
    pieces: list[Piece] = field(default_factory=list)
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque([(0.0, 0)]))

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    def rate_now(self) -> float:
        """Tokens a second over the last `WINDOW` of decoding; the time that showing them took is not in it."""
        seconds, emitted = self.counts.total_seconds, self.counts.emitted
        while len(self._samples) > 1 and self._samples[1][0] <= seconds - WINDOW:
            self._samples.popleft()
        before, tokens = self._samples[0]
        if seconds > self._samples[-1][0]:
            self._samples.append((seconds, emitted))
        return (emitted - tokens) / (seconds - before) if seconds > before else 0.0

    def live(self) -> str:
        """While the reply comes: the most important figure first, since a narrow terminal cuts the end."""
        if not self.counts.emitted:
            return _joined(
                self.title, f"reading the prompt: {self.computed} of {self.prompt} tokens computed"
            )
        rate = self.rate_now()
        times, drafts = self._drafts(rate)
        return _joined(self.title, f"{rate:.1f} tok/s", times, drafts, self.off, self._context())

    def line(self) -> str:
        """Once it is complete; the speed-up is an estimate from a few plain steps timed where the reply ended."""
        counts = self.counts
        if not counts.emitted:
            return "stopped before the reply began"
        times, drafts = self._drafts(counts.token_rate)
        return _joined(
            many(counts.emitted, "token"),
            f"{counts.token_rate:.1f} tok/s",
            times and f"est. {times}",
            drafts and f"{drafts} ({tau_of(counts)}α {counts.acceptance_rate:.2f})",
            self.off,
            self._context(),
            f"first token after {self.first_token:.2f} s ({self.computed} of {self.prompt} prompt tokens computed)",
            NOTES.get(self.finish, "").format(max_new_tokens=self.max_new_tokens, context=self.context),
        )

    def heading(self) -> str:
        """Above one of several replies."""
        counts = self.counts
        words = f"{self.title}: {counts.total_seconds:.2f} s, {counts.token_rate:.1f} tok/s"
        return f"{words}, {self._drafts(0.0)[1]}" if counts.drafted else words

    def _drafts(self, rate: float) -> tuple[str, str]:
        """(the speed-up at `rate` tokens a second, how many drafted tokens were accepted), '' for what is not known."""
        counts = self.counts
        if not counts.drafted:
            return "", ""
        times = "" if self.step is None else f"{rate * self.step:.2f}x plain"
        return times, f"{sum(counts.accepted)}/{counts.drafted} drafted accepted"

    def _context(self) -> str:
        return f"context {min(self.context, self.prompt + self.counts.emitted)}/{self.context}"


def tau_of(counts: RawCounts) -> str:
    """τ as the beginning of a list of figures; '' where a drafter that wrote alone made no block."""
    return f"τ {counts.block_efficiency:.2f}, " if counts.blocks else ""


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


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
