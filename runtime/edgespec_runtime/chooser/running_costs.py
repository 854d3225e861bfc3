"""What passes and drafts take now: seconds measured beforehand, moved by what the blocks of the replies take.

A machine is slow at one moment and fast at the next, for all passes alike: one running ratio of real to measured seconds says so.
Beside it passes of each size, and a draft's steps, have a ratio of their own, since what was measured beforehand of one size is
easily a tenth off; it is learnt from them alone and fades while there are none. A draft's beginning and the tokens that the
drafter missed in plain steps are learnt in seconds. One slow pass (another program's turn) changes nothing.
Knows costs and seconds; nothing of acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec_runtime.chooser.pass_costs import PADDING_GAIN, Costs
from edgespec_runtime.decoding.schedule import Outcome

BUCKET = 64  # tokens of context that share a row of costs: interpolating for every block would cost as much as sampling
# Weight of a block's time in the running ratio of measured to calibrated seconds, and in what passes before a draft: tokens that
# the drafter missed in plain steps and reads first, drafts that came to nothing.
DRIFT, CATCHING_UP = 0.1, 0.3
# What every block takes from what is known of passes of each size, and every plain step from what is particular to drafting: a
# few that were slow once, beside another program perhaps, must not stay so.
FORGETTING, FORGETTING_PLAIN = 0.02, 0.009
# How far what was measured beforehand of passes of one size may be off, as a share: the more what passes take differs from one
# moment to the next, the more of them it is worth, one at least. What is unexpected by more than SURPRISE is another matter.
ERROR, SURPRISE, SURPRISES = 0.1, 0.25, 0.05  # ... and the weight of one pass in what they differ by
# Passes of a size after which an unexpected one speaks for the machine as much as for its size. Several in a row are of one
# moment: they count as the root of their number.
TRUSTED = 4.0
# Share by which a size may be cheaper than it seems that was never seen in a reply, and one of which little was seen lately.
UNSEEN, UNSURE = 0.2, 0.07
# Drafts after which what one takes is known, and what every plain step leaves of that.
FRESH, FADING = 12, 0.9
COLD = 0.3  # trust in what a pass takes that follows plain steps: caches and threads have to find their way first
# Times what is expected: more is another program's turn, and so much is believed only where the last one was as long.
HICCUP, BELIEVED = 1.3, 1.25
BEGINNING = 9.0  # share of a draft's beginning in what its time tells, against γ² of its steps and n² of n missed tokens


@dataclass(frozen=True)
class Row:
    """Costs at one context: `verify[n]` seconds of a pass of n tokens, `size[γ]` the cheapest pass for a draft of γ."""

    draft: float
    verify: list[float]
    size: list[int]


class Blocks:
    """What blocks of one kind came to, drafts of one length before passes of one size, since they were last learnt from.

    Args:
        row: costs at the context of the first.
        outcomes: at least one.
        longest: seconds of a pass that is none of another program's.
    """

    def __init__(self, row: Row, outcomes: Sequence[Outcome], longest: float) -> None:
        self.row, self.drafted, self.size, self.count = (
            row,
            outcomes[0].drafted,
            outcomes[0].size,
            len(outcomes),
        )
        # draft tokens that were looked at, and how many of them stayed
        self.tests: list[tuple[int, int]] = []
        self.emitted = 0
        self.draft_seconds = self.pass_seconds = self.choosing_seconds = 0.0
        for _, drafted, accepted, emitted, _, draft_seconds, _, seconds, choosing in outcomes:
            self.tests.append((min(drafted, emitted), accepted))
            self.emitted += emitted
            self.draft_seconds += draft_seconds
            self.pass_seconds += min(seconds - draft_seconds, longest)
            self.choosing_seconds += choosing

    @property
    def seconds(self) -> float:
        """Drafts and passes; a pass that another program held up counts for what one takes by itself."""
        return self.draft_seconds + self.pass_seconds


class _Passes:
    """Those of one size: the ratio of what they take to what the machine's moment and the measured seconds say."""

    __slots__ = ("at_best", "count", "last", "lately", "mean", "ratio", "seen")

    def __init__(self) -> None:
        self.seen = 0.0  # all of them
        self.count = 0.0  # the same, those before others for less
        self.lately = 0.0  # ... and those before plain steps for much less
        self.mean = 1.0  # ratio of those
        self.ratio = 1.0  # ... and of what was measured beforehand
        self.at_best = 1.0 - UNSEEN  # what it may be
        self.last = 0.0  # the last one's to the measured seconds alone; a slow one must not stay

    def fade(self, kept: float, measured: float) -> None:
        self.count *= kept
        self.ratio = (self.count * self.mean + measured) / (self.count + measured)
        self.at_best = self.ratio * (1.0 - UNSURE / (1.0 + self.count))

    def learn(self, ratio: float, count: float, measured: float) -> None:
        self.count += count
        self.mean += count / self.count * (ratio - self.mean)
        self.fade(1.0, measured)


class RunningCosts:
    """Seconds of plain steps, drafts and blocks.

    Args:
        costs: measured on this device for this pair.
    """

    def __init__(self, costs: Costs) -> None:
        # beforehand, since making one takes a tenth of a small target's step; costs are the same behind the last context
        self._rows = [_row_of(costs, bucket) for bucket in range(costs.contexts[-1] // BUCKET + 2)]
        self._machine = 1.0  # real seconds in measured ones, now
        # by size, with the sampling and the loop's work that follow them
        self._passes = [_Passes() for _ in range(costs.longest + 1)]
        self._seen: dict[int, _Passes] = {}  # those that there were
        self._draft_ratio = 1.0  # the same of a draft's steps
        # squared share by which a well-known pass takes more or less than expected
        self._noise = ERROR * ERROR
        self._measured = 1.0  # passes that what was measured beforehand of their size is worth
        self._drafts = 0  # those that were timed
        self._last_draft = 1.0  # in seconds that were expected
        # seconds in which a drafter begins, whatever the length, and in which it reads one of the tokens it has missed
        self._begin_draft = self._catch_up = 0.0
        self.missed = 0  # tokens of plain steps since the last draft, which the drafter has yet to read

    def begin(self) -> None:
        """A new reply: the drafter reads its prompt and has missed nothing of it."""
        self.missed = 0

    @property
    def catching_up(self) -> float:
        """Seconds in which the drafter reads what it has missed."""
        return self.missed * self._catch_up * self._machine

    def seen(self, size: int) -> bool:
        """Whether what passes of `size` took lately says more of them than what was measured beforehand."""
        return self._passes[size].count >= 1.0

    def fresh(self, size: int) -> bool:
        """Whether passes of `size` were so many lately that what the next ones take is known."""
        return self._passes[size].lately >= FRESH

    def row(self, context: int) -> Row:
        return self._rows[min(context // BUCKET, len(self._rows) - 1)]

    def step(self, row: Row) -> float:
        """Expected seconds of a plain step."""
        size = row.size[0]
        return self._machine * self._passes[size].ratio * row.verify[size]

    def block(self, row: Row, length: int, size: int) -> float:
        """Expected seconds of a block with a draft of `length` ≥ 1 and a pass of `size`."""
        return self._machine * (self._draft(row, length) + self._passes[size].ratio * row.verify[size])

    def blocks(self, row: Row, most: int) -> tuple[list[int], list[float], list[float]]:
        """(the pass's size, `block`, and what that may be at best) for every length up to `most`; 0: of a plain step.

        A size of which little is known may be cheaper than it seems, and is worth a try.
        """
        machine, passes, verify = self._machine, self._passes, row.verify
        step = self.step(row)
        sizes, expected, at_best = [row.size[0]], [step], [step]
        drafting, token = machine * self._begin_draft, machine * self._draft_ratio * row.draft
        for size, padded in enumerate(row.size[1 : most + 1], 2):
            known, seconds = passes[size], passes[size].ratio * verify[size]
            if padded > size:
                other = passes[padded]
                longer = other.ratio * verify[padded]
                # One that is well known is held once against the shorter one, which may be cheaper than it seems.
                hoped = known.at_best * verify[size] if other.lately >= FRESH and not known.seen else seconds
                if longer < (1.0 - PADDING_GAIN) * hoped:
                    known, size, seconds = other, padded, longer
            drafting += token
            sizes.append(size)
            expected.append(drafting + machine * seconds)
            at_best.append(drafting + machine * known.at_best * verify[size])
        return sizes, expected, at_best

    def longest(self, row: Row, size: int) -> float:
        """Seconds that a pass takes by itself, not beside another program; infinite where that is not known."""
        if size >= len(row.verify) or self._passes[size].seen <= 1.0:
            return math.inf
        known = self._passes[size]
        return HICCUP * max(self._machine * known.ratio, known.last) * row.verify[size]

    def learn_steps(self, row: Row, count: int, seconds: float) -> None:
        """`count` plain steps took `seconds` in all."""
        self.missed += count
        kept = (1.0 - FORGETTING_PLAIN) ** count
        self._fade(FADING**count, kept)
        self._learn_pass(row, row.size[0], seconds / count, count)
        self._draft_ratio = 1.0 + kept * (self._draft_ratio - 1.0)
        self._begin_draft *= kept

    def learn(self, blocks: Blocks) -> None:
        count = blocks.count
        trust = COLD if self.missed else 1.0  # of the first of them
        kept = (1.0 - FORGETTING) ** count
        self._fade(kept, kept, blocks.row.size[0])
        if blocks.size < len(self._passes):
            self._passes[blocks.size].lately += count
        self._learn_drafting(blocks.row, blocks.drafted, blocks.draft_seconds / count, count)
        self._learn_pass(blocks.row, blocks.size, blocks.pass_seconds / count, trust + count - 1)

    def _draft(self, row: Row, length: int) -> float:
        """In the machine's seconds."""
        return self._begin_draft + length * self._draft_ratio * row.draft if length else 0.0

    def _fade(self, lately: float, kept: float, but: int = 0) -> None:
        for size, known in self._seen.items():
            known.lately *= lately
            if size != but:
                known.fade(kept, self._measured)

    def _learn_pass(self, row: Row, size: int, seconds: float, count: float) -> None:
        """`count` passes of `size` took `seconds` each, with the sampling and the loop's work; below 1: one not to be trusted."""
        if size >= len(row.verify):
            return
        known = self._seen[size] = self._passes[size]
        measured = seconds / row.verify[size]
        plain = size == row.size[0]  # they come many at a time, without those that are too long to be true
        # What was measured beforehand of a longer pass must not pull: where it was off, the machine would seem slow or fast for
        # good, and so would plain steps, by which gains are measured.
        expected = self._machine * (known.ratio if plain else known.mean)
        last, known.last = known.last, measured
        known.seen += count
        if not plain and last <= BELIEVED * expected < measured:
            return
        weight = _weight(count)
        if not plain:
            weight *= known.count / (known.count + TRUSTED)
        elif not self._drafts:
            weight = max(weight, count / known.seen)
        self._machine *= 1.0 + weight * (measured / expected - 1.0)
        # Before any draft the machine's speed is all that plain steps tell: of other passes and of the drafter's too.
        weight = math.sqrt(count)
        if known.count > TRUSTED:
            surprise = min(abs(measured / expected - 1.0), SURPRISE)
            self._noise += SURPRISES * (weight * surprise * surprise - self._noise)
            self._measured = max(1.0, self._noise / (ERROR * ERROR))
        known.learn(measured / self._machine if self._drafts else 1.0, weight, self._measured)

    def _learn_drafting(self, row: Row, length: int, seconds: float, count: int) -> None:
        """`count` drafts took `seconds` each. One number tells of three: the beginning, the steps and the missed tokens share
        what is unexpected of it."""
        missed, self.missed = self.missed / count, 0  # by the first of them
        if not row.draft:
            return
        self._drafts += count
        seconds /= self._machine
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
