"""The figures of one reply, while it comes and when it is complete, as one line. Knows no terminal and runs no engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edgespec.core.metrics import RawCounts
from edgespec.core.table import many
from edgespec_runtime.chat.replies import Piece

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
