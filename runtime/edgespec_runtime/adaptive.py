"""A draft length for every block from measured costs and what was accepted so far; 0 where plain decoding is faster.

Expected tokens per second of a draft of γ:

    (1 + Σ_j Π_{i ≤ j} a_i) / (γ · draft + verify(γ + 1))      a_i: acceptance at position i of the block

The best γ is taken block by block, γ = 0 (a plain step) among them. What speculation has lost against plain steps in this reply
is kept on an account with a small allowance. A draft must be affordable, even if nothing of it is accepted: from a larger credit
where it likely pays, from a small one where it only might. Where it surely pays (by a wide margin, if the credit would do for
enough of such drafts) it borrows from the time of the tokens that may follow. So a reply of sixty tokens or more is hardly ever
slower than plain decoding by 2 % (benchmarks/schedule_replay.py), and one of which the drafter unexpectedly knows nothing loses a
few steps at most.
Knows costs and counts; no engines, no tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec_runtime.acceptance_rates import MEMORY, AcceptanceRates
from edgespec_runtime.pass_costs import Costs
from edgespec_runtime.schedule import Outcome

CURIOSITY, CAUTION = 3.0, 0.45  # standard deviations above and below
ALLOWED_STEPS = 0.3  # what trying may lose in a reply, in plain steps ...
ALLOWED_SHARE = 0.01  # ... and in shares of the time so far
CREDIT_SHARE = 0.018  # what a draft that seems to pay may lose, in shares of the time so far ...
CREDIT_STEPS = 64.0  # ... or of as many plain steps, where the reply is shorter yet
# Times faster than plain steps, at the low estimate: such a draft makes good what bad luck loses, and borrows from what may come.
# The higher bar is for drafts that risk little, CHEAP plain steps at most: the credit pays for enough of them.
SURE, SURE_IF_CHEAP, CHEAP = 1.12, 1.6, 0.35
# Of the reply's room counts as time already taken, at most so many tokens; and what more may be lost, in plain steps, in a reply
# that may become long enough to win them back.
LOOK_AHEAD = 128
WIN_BACK, WIN_BACK_STEPS = 100, 3.7
WORTH = 1.03  # times faster a draft must be expected to be: costs and rates are not known better than that
BUCKET = 64  # tokens of context that share a row of costs: interpolating for every block would cost as much as sampling
# All gains are measured by a plain step: those before the very first draft (the one that follows a prompt is a cold one), and the
# blocks after which one more shows again what it takes.
FIRST_STEPS, REFRESH = 4, 40
# Plain steps after which drafting is considered again: considering takes microseconds too, so ever later where it never pays.
SHORT_REST, LONG_REST = 8, 32
# Weight of a block's time in the running ratio of measured to calibrated seconds, and in what passes before a draft: tokens that
# the drafter missed in plain steps and reads first, drafts that came to nothing.
DRIFT, CATCHING_UP = 0.1, 0.3
# What is taken back, at every draft, of what is particular to passes of other sizes, and, at every plain step, of what is
# particular to drafting: a few that were slow once, beside another program perhaps, must not stay so.
FORGETTING, FORGETTING_PLAIN = 0.02, 0.009
COLD = 0.3  # trust in what a pass takes that follows plain steps: caches and threads have to find their way first
HICCUP = 1.3  # times what is expected: more is another program's turn
BEGINNING = 9.0  # share of a draft's beginning in what its time tells, against γ² of its steps and n² of n missed tokens


@dataclass(frozen=True)
class _Row:
    """Costs at one context: `verify[n]` seconds of a pass of n tokens, `size[γ]` the cheapest pass for a draft of γ."""

    draft: float
    verify: list[float]
    size: list[int]


def _row_of(costs: Costs, bucket: int) -> _Row:
    middle = bucket * BUCKET + BUCKET // 2
    verify = [0.0, *(costs.verify(count, middle) for count in range(1, costs.longest + 1))]
    return _Row(costs.draft(middle), verify, costs.cheapest_lengths(middle))


class Adaptive:
    """Schedule of one reply after another; what it learnt about acceptance and the machine's speed stays.

    Args:
        costs: measured on this device for this pair.
        acceptance_rate: first guess, as the bundle's evaluation measured it.
        most: longest draft.
    """

    def __init__(self, costs: Costs, acceptance_rate: float, most: int = 8) -> None:
        self._costs = costs
        self._most = min(most, costs.longest - 1)
        self._rates = AcceptanceRates(acceptance_rate, self._most)
        self._draft_ratio = self._verify_ratio = 1.0
        # of passes of one size, which need not all be off alike, with the sampling and the loop's work that follow them
        self._size_ratio: dict[int, float] = {}
        self._seen: dict[int, float] = {}  # passes of each size
        self._drafts = 0  # those that were timed
        # what the last pass of a size and the last draft were, in the same units: one slow one must not stay
        self._last_ratio: dict[int, float] = {}
        self._last_draft = 1.0
        self._due = FIRST_STEPS  # plain steps to be made before the next draft
        self._since_plain = 0
        # seconds in which a drafter begins, whatever the length, and in which it reads one of the tokens it has missed
        self._begin_draft = self._catch_up = 0.0
        # beforehand, since making one takes a tenth of a small target's step; costs are the same behind the last context
        self._rows = [_row_of(costs, bucket) for bucket in range(costs.contexts[-1] // BUCKET + 2)]
        # Plain steps are only counted, and learnt from when drafting is next considered: counting takes no time.
        self._plain_steps, self._plain_seconds, self._plain_context = 0, 0.0, 0
        self._longest_step = math.inf
        self._asked = 0  # tokens of the last draft, of which the drafter may have made none
        # seconds of such empty drafts since the last real one, and of those before one usually
        self._in_vain = self._usually_in_vain = 0.0
        self._vain_at = 0  # of `_idle`, when the last one came
        self._idle = 0  # blocks since a draft was last tested
        self._rest = SHORT_REST
        self.begin()

    def begin(self) -> None:
        """The account of a new reply is empty; what is known of acceptance and the machine stays."""
        self._count_plain_steps()
        self._lost = self._spent = 0.0
        self._resting = self._missed = 0

    def acceptance(self) -> list[float]:
        """Estimated probability, for every position of a block, that its token is accepted where those before it were."""
        return self._rates.estimate(self._idle + self._plain_steps)[0]

    def _seconds(self, row: _Row, length: int) -> float:
        """Expected seconds of a block with a draft of `length`; 0: of a plain step."""
        size = row.size[length]
        verifying = self._size_ratio.get(size, self._verify_ratio) * row.verify[size]
        return self._draft_seconds(row, length) + verifying

    def _draft_seconds(self, row: _Row, length: int) -> float:
        return self._begin_draft + length * self._draft_ratio * row.draft if length else 0.0

    def _vain(self) -> float:
        """Seconds of empty drafts since the last real one, long ago ones for less."""
        return MEMORY ** (self._idle + self._plain_steps - self._vain_at) * self._in_vain

    def _row(self, context: int) -> _Row:
        return self._rows[min(context // BUCKET, len(self._rows) - 1)]

    def draft_length(self, context: int, room: int) -> int:
        self._asked = 0
        if self._resting:
            self._resting -= 1
            return 0
        if self._due:
            return 0
        self._count_plain_steps()
        length = self._asked = self._best(context, room)
        if length:
            self._rest = SHORT_REST
        else:
            self._resting = self._rest - 1
            self._rest = min(2 * self._rest, LONG_REST)
        return length

    def _best(self, context: int, room: int) -> int:
        """The draft length of most tokens a second that may be tried now; 0 where plain steps are faster."""
        if room < 1:
            return 0
        row = self._row(context)
        step = self._seconds(row, 0)
        before = self._missed * self._catch_up + max(self._usually_in_vain, self._vain())
        plain = 1.0 / step
        account = ALLOWED_STEPS * step + ALLOWED_SHARE * self._spent - self._lost
        credit = CREDIT_SHARE * max(self._spent, CREDIT_STEPS * step) - self._lost
        long = room + self._spent / step >= WIN_BACK
        ahead = CREDIT_SHARE * min(room, LOOK_AHEAD) + (WIN_BACK_STEPS if long else 0.0)
        borrowed = CREDIT_SHARE * self._spent + ahead * step - self._lost
        estimates, doubt = self._rates.estimate(self._idle)
        cheap = before + self._seconds(row, 1) - step <= CHEAP * step
        sure = (SURE_IF_CHEAP if cheap else SURE) * plain
        likely, likely_rate, hoped, hoped_rate = 0, WORTH * plain, 0, WORTH * plain
        # expected tokens so far, 1 + Σ_j Π_{i ≤ j} a_i, and the last product: for a low, the likely and a high estimate
        low = middle = high = low_reach = middle_reach = high_reach = 1.0
        for length in range(1, min(self._most, room) + 1):
            estimate, seconds = estimates[length - 1], before + self._seconds(row, length)
            low_reach *= max(estimate - CAUTION * doubt, 0.0)
            middle_reach *= estimate
            high_reach *= min(estimate + CURIOSITY * doubt, 1.0)
            low, middle, high = low + low_reach, middle + middle_reach, high + high_reach
            risk = seconds - step  # lost if nothing of it is accepted
            affordable = risk <= account
            needed = plain if risk <= credit else sure if risk <= borrowed else math.inf
            if middle / seconds > likely_rate and (affordable or low / seconds > needed):
                likely, likely_rate = length, middle / seconds
            if high / seconds > hoped_rate and affordable:
                hoped, hoped_rate = length, high / seconds
        return likely or hoped

    def pass_length(self, count: int, context: int) -> int:
        sizes = self._row(context).size
        return sizes[count - 1] if count <= len(sizes) else count

    def observe(self, outcome: Outcome) -> None:
        context, drafted, accepted, emitted, size, draft_seconds, _, seconds = outcome
        if not drafted:
            self._plain_steps += 1
            self._plain_seconds += min(seconds - draft_seconds, self._longest_step)
            self._plain_context = context
            self._due, self._since_plain = max(0, self._due - 1), 0
            if self._asked:  # the drafter ended its draft before it began
                self._lost += draft_seconds
                self._in_vain = self._vain() + draft_seconds
                self._vain_at = self._idle + self._plain_steps
            return
        row, trust = self._row(context), COLD if self._missed else 1.0
        self._since_plain += 1
        self._due = int(self._since_plain >= REFRESH)
        self._spent += seconds
        known = HICCUP * self._seconds(row, drafted) if self._seen.get(size, 0) > 1 else math.inf
        self._lost += min(seconds, known) - emitted * self._seconds(row, 0)
        self._learn_drafting(row, drafted, draft_seconds)
        self._rates.learn(min(drafted, emitted), accepted, self._idle)
        self._usually_in_vain += CATCHING_UP * (self._in_vain - self._usually_in_vain)
        self._in_vain, self._vain_at, self._idle = 0.0, 0, 0
        self._learn_pass(row, size, seconds - draft_seconds, trust)
        self._forget(row, 1.0 - FORGETTING, size)

    def _forget(self, row: _Row, kept: float, but: int = 0) -> None:
        """Passes of other sizes than a plain step's and `but` go back to what all passes are like."""
        for size, ratio in self._size_ratio.items():
            if size not in (but, row.size[0]):
                self._size_ratio[size] = self._verify_ratio + kept * (ratio - self._verify_ratio)

    def _count_plain_steps(self) -> None:
        steps, seconds = self._plain_steps, self._plain_seconds
        if steps:
            self._missed += steps
            self._idle += steps
            self._spent += seconds
            row = self._row(self._plain_context)
            self._learn_pass(row, row.size[0], seconds / steps, steps)
            kept = (1.0 - FORGETTING_PLAIN) ** steps
            self._forget(row, kept)
            self._draft_ratio = self._verify_ratio + kept * (self._draft_ratio - self._verify_ratio)
            self._begin_draft *= kept
            self._plain_steps, self._plain_seconds = 0, 0.0
            self._longest_step = HICCUP * self._seconds(row, 0)

    def _learn_pass(self, row: _Row, size: int, seconds: float, count: float) -> None:
        """`count` passes of `size` took `seconds` each, with the sampling and the loop's work; below 1: one not to be trusted."""
        if size >= len(row.verify):
            return
        seen = self._seen[size] = self._seen.get(size, 0.0) + count
        known = self._size_ratio.get(size, self._verify_ratio)
        measured = seconds / row.verify[size]
        # Plain steps come many at a time, without those that are too long to be true.
        plain = size == row.size[0]
        ratio = measured if plain else _middle(known, self._last_ratio.get(size, known), measured)
        self._last_ratio[size] = measured
        weight = 1.0 - (1.0 - DRIFT) ** count
        if not self._drafts:  # the machine's speed is all that is known of other passes and of the drafter's
            self._verify_ratio = self._draft_ratio = ratio
        self._verify_ratio += weight * (ratio - self._verify_ratio)
        self._size_ratio[size] = known + max(weight, count / (seen + (not plain))) * (ratio - known)

    def _learn_drafting(self, row: _Row, length: int, seconds: float) -> None:
        """One number tells of three: the beginning, the steps and the missed tokens share what is unexpected of it."""
        missed, self._missed = self._missed, 0
        if not row.draft:
            return
        self._drafts += 1
        known = self._draft_seconds(row, length) + missed * self._catch_up
        if missed:  # these drafts are rare, so each must tell
            error = CATCHING_UP * (seconds - known)
        else:
            surprise = seconds / known
            weight = max(DRIFT, 1.0 / self._drafts)  # nothing is known of the beginning before the first ones
            error = weight * known * (_middle(1.0, self._last_draft, surprise) - 1.0)
            self._last_draft = surprise
        error /= BEGINNING + length * length + missed * missed
        self._begin_draft = max(0.0, self._begin_draft + BEGINNING * error)
        self._draft_ratio = max(0.5 * self._draft_ratio, self._draft_ratio + length * error / row.draft)
        self._catch_up = max(0.0, self._catch_up + missed * error)


def _middle(known: float, last: float, now: float) -> float:
    """One slow pass (another program's turn) changes nothing; two that agree do."""
    return max(min(known, last), min(max(known, last), now))
