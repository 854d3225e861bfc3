"""What passes and drafts take now: seconds measured beforehand, moved by what the blocks of the replies take.

A ratio of measured to calibrated seconds is kept for passes of every size and for the steps of a draft; a draft's beginning and
the tokens that the drafter missed in plain steps are learnt in seconds. A machine is slow at one moment and fast at the next, for
all passes alike, so what one size shows moves the others. One slow pass (another program's turn) changes nothing.
Knows costs and seconds; nothing of acceptance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec_runtime.pass_costs import Costs

BUCKET = 64  # tokens of context that share a row of costs: interpolating for every block would cost as much as sampling
# Weight of a block's time in the running ratio of measured to calibrated seconds, and in what passes before a draft: tokens that
# the drafter missed in plain steps and reads first, drafts that came to nothing.
DRIFT, CATCHING_UP = 0.1, 0.3
# What is taken back, at every draft, of what is particular to passes of other sizes, and, at every plain step, of what is
# particular to drafting: a few that were slow once, beside another program perhaps, must not stay so.
FORGETTING, FORGETTING_PLAIN = 0.02, 0.009
# Drafts after which what one takes is known, and what every plain step leaves of that.
FRESH, FADING = 12, 0.9
COLD = 0.3  # trust in what a pass takes that follows plain steps: caches and threads have to find their way first
HICCUP = 1.3  # times what is expected: more is another program's turn
BEGINNING = 9.0  # share of a draft's beginning in what its time tells, against γ² of its steps and n² of n missed tokens


@dataclass(frozen=True)
class Row:
    """Costs at one context: `verify[n]` seconds of a pass of n tokens, `size[γ]` the cheapest pass for a draft of γ."""

    draft: float
    verify: list[float]
    size: list[int]


class Blocks:
    """What blocks of one kind came to, drafts of one length before passes of one size, since they were last learnt from."""

    def __init__(self, row: Row, drafted: int, size: int, longest: float) -> None:
        self.row, self.drafted, self.size = row, drafted, size
        self._longest = longest  # seconds of one that is none of another program's
        self.tests: list[
            tuple[int, int]
        ] = []  # draft tokens that were looked at, and how many of them stayed
        self.emitted = 0
        self.draft_seconds = self.seconds = 0.0

    def add(self, tested: int, accepted: int, emitted: int, draft_seconds: float, seconds: float) -> None:
        self.tests.append((tested, accepted))
        self.emitted += emitted
        self.draft_seconds += draft_seconds
        self.seconds += min(seconds, self._longest)


class RunningCosts:
    """Seconds of plain steps, drafts and blocks.

    Args:
        costs: measured on this device for this pair.
    """

    def __init__(self, costs: Costs) -> None:
        # beforehand, since making one takes a tenth of a small target's step; costs are the same behind the last context
        self._rows = [_row_of(costs, bucket) for bucket in range(costs.contexts[-1] // BUCKET + 2)]
        self._draft_ratio = self._verify_ratio = 1.0
        # of passes of one size, which need not all be off alike, with the sampling and the loop's work that follow them
        self._size_ratio: dict[int, float] = {}
        self._seen: dict[int, float] = {}  # passes of each size
        self._drafts = 0  # those that were timed
        self._recent: dict[int, float] = {}  # the same, those before others for less
        # what the last pass of a size and the last draft were, in the same units: one slow one must not stay
        self._last_ratio: dict[int, float] = {}
        self._last_draft = 1.0
        # seconds in which a drafter begins, whatever the length, and in which it reads one of the tokens it has missed
        self._begin_draft = self._catch_up = 0.0
        self.missed = 0  # tokens of plain steps since the last draft, which the drafter has yet to read

    def begin(self) -> None:
        """A new reply: the drafter reads its prompt and has missed nothing of it."""
        self.missed = 0

    @property
    def catching_up(self) -> float:
        """Seconds in which the drafter reads what it has missed."""
        return self.missed * self._catch_up

    def fresh(self, size: int) -> bool:
        """Whether passes of `size` were so many lately that what the next ones take is known."""
        return self._recent.get(size, 0.0) >= FRESH

    def row(self, context: int) -> Row:
        return self._rows[min(context // BUCKET, len(self._rows) - 1)]

    def block(self, row: Row, length: int) -> float:
        """Expected seconds of a block with a draft of `length`; 0: of a plain step."""
        size = row.size[length]
        return self._draft(row, length) + self._size_ratio.get(size, self._verify_ratio) * row.verify[size]

    def blocks(self, row: Row, most: int) -> list[float]:
        """`block` of every length up to `most`."""
        begin, token = self._begin_draft, self._draft_ratio * row.draft
        ratios, usual, verify = self._size_ratio, self._verify_ratio, row.verify
        seconds = [ratios.get(size, usual) * verify[size] + begin for size in row.size[: most + 1]]
        seconds[0] -= begin
        return [block + length * token for length, block in enumerate(seconds)]

    def longest(self, row: Row, length: int, size: int) -> float:
        """Seconds that such a block takes by itself, not beside another program; infinite where that is not known."""
        if size >= len(row.verify) or self._seen.get(size, 0.0) <= 1.0:
            return math.inf
        ratio = max(self._size_ratio[size], self._last_ratio[size])
        return HICCUP * (self._draft(row, length) + ratio * row.verify[size])

    def learn_steps(self, row: Row, count: int, seconds: float) -> None:
        """`count` plain steps took `seconds` in all."""
        self.missed += count
        self._fade(FADING**count)
        self._learn_pass(row, row.size[0], seconds / count, count)
        kept = (1.0 - FORGETTING_PLAIN) ** count
        self._forget(row, kept)
        self._draft_ratio = self._verify_ratio + kept * (self._draft_ratio - self._verify_ratio)
        self._begin_draft *= kept

    def learn(self, blocks: Blocks) -> None:
        count = len(blocks.tests)
        trust = COLD if self.missed else 1.0  # of the first of them
        drafting, seconds = blocks.draft_seconds / count, blocks.seconds / count
        self._fade((1.0 - FORGETTING) ** count)
        self._recent[blocks.size] = self._recent.get(blocks.size, 0.0) + count
        self._learn_drafting(blocks.row, blocks.drafted, drafting, count)
        self._learn_pass(blocks.row, blocks.size, seconds - drafting, trust + count - 1)
        self._forget(blocks.row, (1.0 - FORGETTING) ** count, blocks.size)

    def _draft(self, row: Row, length: int) -> float:
        return self._begin_draft + length * self._draft_ratio * row.draft if length else 0.0

    def _fade(self, kept: float) -> None:
        for size in self._recent:
            self._recent[size] *= kept

    def _forget(self, row: Row, kept: float, but: int = 0) -> None:
        """Passes of other sizes than a plain step's and `but` go back to what all passes are like."""
        for size, ratio in self._size_ratio.items():
            if size not in (but, row.size[0]):
                self._size_ratio[size] = self._verify_ratio + kept * (ratio - self._verify_ratio)

    def _learn_pass(self, row: Row, size: int, seconds: float, count: float) -> None:
        """`count` passes of `size` took `seconds` each, with the sampling and the loop's work; below 1: one not to be trusted."""
        if size >= len(row.verify):
            return
        # Plain steps come many at a time, without those that are too long to be true.
        plain = size == row.size[0]
        if not plain and size not in self._seen:
            count = min(count, 1.0)  # nothing says yet whether these are too long to be true
        seen = self._seen[size] = self._seen.get(size, 0.0) + count
        known = self._size_ratio.get(size, self._verify_ratio)
        measured = seconds / row.verify[size]
        ratio = measured if plain else _middle(known, self._last_ratio.get(size, known), measured)
        self._last_ratio[size] = measured
        weight = _weight(count)
        if not self._drafts:  # the machine's speed is all that is known of other passes and of the drafter's
            self._verify_ratio = self._draft_ratio = ratio
        self._verify_ratio += weight * (ratio - self._verify_ratio)
        if plain or self.fresh(size):  # else it may be the draft that was misjudged, and not the moment
            self._move_all(1.0 + weight * (ratio - known) / known)
            known = self._size_ratio.get(size, known)
        self._size_ratio[size] = known + max(weight, count / (seen + (not plain))) * (ratio - known)

    def _move_all(self, factor: float) -> None:
        """The machine is faster or slower than a moment ago."""
        for size in self._size_ratio:
            self._size_ratio[size] *= factor
        self._draft_ratio *= factor
        self._begin_draft *= factor

    def _learn_drafting(self, row: Row, length: int, seconds: float, count: int) -> None:
        """`count` drafts took `seconds` each. One number tells of three: the beginning, the steps and the missed tokens share
        what is unexpected of it."""
        missed, self.missed = self.missed / count, 0  # by the first of them
        if not row.draft:
            return
        self._drafts += count
        known = self._draft(row, length) + missed * self._catch_up
        if missed:  # these drafts are rare, so each must tell
            error = CATCHING_UP * (seconds - known)
        else:
            surprise = seconds / known
            weight = max(
                _weight(count), count / self._drafts
            )  # nothing is known of the beginning before the first ones
            error = weight * known * (_middle(1.0, self._last_draft, surprise) - 1.0)
            self._last_draft = surprise
        error /= BEGINNING + length * length + missed * missed
        self._begin_draft = max(0.0, self._begin_draft + BEGINNING * error)
        self._draft_ratio = max(0.5 * self._draft_ratio, self._draft_ratio + length * error / row.draft)
        self._catch_up = max(0.0, self._catch_up + missed * error)


def _row_of(costs: Costs, bucket: int) -> Row:
    middle = bucket * BUCKET + BUCKET // 2
    verify = [0.0, *(costs.verify(count, middle) for count in range(1, costs.longest + 1))]
    return Row(costs.draft(middle), verify, costs.cheapest_lengths(middle))


def _weight(count: float) -> float:
    """Of what `count` blocks showed, in a running mean."""
    return 1.0 - math.pow(1.0 - DRIFT, count)


def _middle(known: float, last: float, now: float) -> float:
    """One slow pass changes nothing; two that agree do."""
    return max(min(known, last), min(max(known, last), now))
