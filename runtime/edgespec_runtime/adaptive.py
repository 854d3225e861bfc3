"""A draft length for every block from measured costs and what was accepted so far; 0 where plain decoding is faster.

Expected tokens per second of a draft of γ:

    (1 + Σ_j Π_{i ≤ j} a_i) / (γ · draft + verify(γ + 1))      a_i: acceptance at position i of the block

The best γ is taken block by block, γ = 0 (a plain step) among them. What speculation has lost against plain steps in this reply
is kept on an account with a small allowance. A draft must be affordable, even if nothing of it is accepted: from a larger credit
where it likely pays, from a small one where it only might, and from none where it pays by far. So a reply of a hundred tokens or
more is hardly ever slower than plain decoding by 2 %, whatever its luck.
Knows costs and counts; no engines, no tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec_runtime.pass_costs import Costs
from edgespec_runtime.schedule import Outcome

GUESS_TESTS = (
    8.0  # how many tested tokens the first guess is worth in the acceptance rate of the long run ...
)
LONG_RUN_TESTS = 6.0  # ... and how many that one is worth in the present one
MEMORY = 0.98  # weight that a tested token keeps with every later block: about the last 50 blocks count
POSITION_TESTS = 20.0  # how many tested tokens the common rate is worth at each position
CURIOSITY, CAUTION = 3.0, 0.5  # standard deviations above and below
ALLOWED_STEPS = 0.5  # what trying may lose in a reply, in plain steps ...
ALLOWED_SHARE = 0.013  # ... and in shares of the time so far
CREDIT_SHARE = 0.018  # what a draft that seems to pay may lose, in shares of the time so far ...
CREDIT_STEPS = 120.0  # ... or of as many plain steps, where the reply is shorter yet
SURE = 1.3  # times faster than plain steps, at the low estimate: such a draft makes good what bad luck loses
BUCKET = 64  # tokens of context that share a row of costs: interpolating anew for every block would cost as much as sampling
REFRESH = 40  # blocks after which a plain step shows again what it takes: all gains are measured by it
WORTH = 1.03  # times faster than plain steps a draft must be expected to be: costs and rates are not known better than that
REST = 8  # plain steps after which speculation is considered again where it did not pay: considering costs microseconds too
DRIFT = 0.1  # weight of a block's time in the running ratio of measured to calibrated seconds ...
CATCHING_UP = (
    0.3  # ... and in what a drafter takes for each token of the plain steps before, which it reads first
)


@dataclass(frozen=True)
class _Row:
    """Costs at one context: `verify[n]` seconds of a pass of n tokens, `size[γ]` the cheapest pass for a draft of γ."""

    draft: float
    verify: list[float]
    size: list[int]


class Adaptive:
    """Schedule of one reply after another; what it learnt about acceptance and the machine's speed stays.

    Args:
        costs: measured on this device for this pair.
        acceptance_rate: first guess, as the bundle's evaluation measured it.
        most: longest draft.
    """

    def __init__(self, costs: Costs, acceptance_rate: float, most: int = 8) -> None:
        self._costs, self._guess, self._most = (
            costs,
            min(max(acceptance_rate, 0.01), 0.99),
            min(most, costs.longest - 1),
        )
        self._all_tested = self._all_accepted = 0
        self._tested = [0.0] * self._most
        self._accepted = [0.0] * self._most
        self._draft_ratio = self._verify_ratio = 1.0
        # of passes of one size, which need not all be off alike, with the sampling and the loop's work that follow them
        self._size_ratio: dict[int, float] = {}
        self._seen: dict[int, int] = {}  # passes of each size
        self._since_plain = REFRESH
        self._resting = self._idle = (
            0  # plain steps still to come without a look; those since a draft was last tested
        )
        self._catch_up = 0.0  # seconds in which a drafter reads one of the tokens it has missed
        self._rows: dict[int, _Row] = {}
        self.begin()

    def begin(self) -> None:
        """The account of a new reply is empty; what is known of acceptance and the machine stays."""
        self._lost = self._spent = 0.0
        self._resting = self._missed = 0

    def acceptance(self) -> list[float]:
        """Estimated probability, for every position of a block, that its token is accepted where those before it were."""
        return self._estimates()[0]

    def _estimates(self) -> tuple[list[float], float]:
        """The acceptance rates by position, and one standard deviation of them."""
        kept = MEMORY**self._idle
        long_run = (GUESS_TESTS * self._guess + self._all_accepted) / (GUESS_TESTS + self._all_tested)
        tests = LONG_RUN_TESTS + kept * sum(self._tested)
        common = (LONG_RUN_TESTS * long_run + kept * sum(self._accepted)) / tests
        known = POSITION_TESTS * common
        rates = [
            (known + kept * accepted) / (POSITION_TESTS + kept * tested)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]
        return rates, math.sqrt(rates[0] * (1.0 - rates[0]) / tests)

    def _seconds(self, row: _Row, length: int) -> float:
        """Expected seconds of a block with a draft of `length`; 0: of a plain step."""
        size = row.size[length]
        verifying = self._size_ratio.get(size, self._verify_ratio) * row.verify[size]
        return length * self._draft_ratio * row.draft + verifying

    def _row(self, context: int) -> _Row:
        bucket = context // BUCKET
        row = self._rows.get(bucket)
        if row is None:
            middle, counts = bucket * BUCKET + BUCKET // 2, range(1, self._costs.longest + 1)
            row = self._rows[bucket] = _Row(
                self._costs.draft(middle),
                [0.0, *(self._costs.verify(count, middle) for count in counts)],
                [self._costs.cheapest_length(count, middle) for count in counts],
            )
        return row

    def draft_length(self, context: int, room: int) -> int:
        if self._resting:
            self._resting -= 1
            return 0
        if self._since_plain >= REFRESH:
            return 0
        length = self._best(context, min(self._most, room))
        if not length:
            self._resting = REST - 1
        return length

    def _best(self, context: int, most: int) -> int:
        """The draft length of most tokens a second that may be tried now; 0 where plain steps are faster."""
        row = self._row(context)
        step = self._seconds(row, 0)
        missed = self._missed * self._catch_up
        plain = 1.0 / step
        account = ALLOWED_STEPS * step + ALLOWED_SHARE * self._spent - self._lost
        credit = CREDIT_SHARE * max(self._spent, CREDIT_STEPS * step) - self._lost
        estimates, doubt = self._estimates()
        likely, likely_rate, hoped, hoped_rate = 0, WORTH * plain, 0, WORTH * plain
        # expected tokens so far, 1 + Σ_j Π_{i ≤ j} a_i, and the last product: for a low, the likely and a high estimate
        low = middle = high = low_reach = middle_reach = high_reach = 1.0
        for length in range(1, most + 1):
            estimate, seconds = estimates[length - 1], missed + self._seconds(row, length)
            low_reach *= max(estimate - CAUTION * doubt, 0.0)
            middle_reach *= estimate
            high_reach *= min(estimate + CURIOSITY * doubt, 1.0)
            low, middle, high = low + low_reach, middle + middle_reach, high + high_reach
            risk = seconds - step  # lost if nothing of it is accepted
            affordable = risk <= account
            if middle / seconds > likely_rate and (
                affordable or low / seconds > (plain if risk <= credit else SURE * plain)
            ):
                likely, likely_rate = length, middle / seconds
            if high / seconds > hoped_rate and affordable:
                hoped, hoped_rate = length, high / seconds
        return likely or hoped

    def pass_length(self, count: int, context: int) -> int:
        sizes = self._row(context).size
        return sizes[count - 1] if count <= len(sizes) else count

    def observe(self, outcome: Outcome) -> None:
        context, drafted, _, emitted, size, draft_seconds, _, seconds = outcome
        row = self._row(context)
        if drafted:
            self._lost += seconds - emitted * self._seconds(row, 0)
            self._learn_drafting(draft_seconds, drafted * row.draft)
            self._learn(outcome)
        else:
            self._missed += 1
            self._idle += 1
        self._spent += seconds
        if size < len(row.verify):
            seen = self._seen.get(size, 0) + 1
            known = self._size_ratio.get(size, self._verify_ratio)
            ratio = _near(
                known, (seconds - draft_seconds) / row.verify[size]
            )  # sampling and the loop belong to it
            self._verify_ratio += DRIFT * (ratio - self._verify_ratio)
            self._seen[size] = seen
            self._size_ratio[size] = known + max(DRIFT, 1.0 / (seen + 1)) * (ratio - known)
        self._since_plain = 0 if size == 1 else self._since_plain + 1

    def _learn_drafting(self, seconds: float, calibrated: float) -> None:
        """After plain steps a draft takes longer, since the drafter reads them first; less time tells of its steps even so."""
        late = seconds - self._draft_ratio * calibrated
        if self._missed and late > 0.0:
            self._catch_up += CATCHING_UP * (late / self._missed - self._catch_up)
        elif calibrated:
            self._draft_ratio += DRIFT * (_near(self._draft_ratio, seconds / calibrated) - self._draft_ratio)
        self._missed = 0

    def _learn(self, outcome: Outcome) -> None:
        """Plain steps make it forget as well, so that it tries again where the long run promises a gain."""
        kept, self._idle = MEMORY ** (self._idle + 1), 0
        self._tested = [kept * tested for tested in self._tested]
        self._accepted = [kept * accepted for accepted in self._accepted]
        for position in range(min(outcome.drafted, outcome.emitted, self._most)):
            self._tested[position] += 1.0
            self._all_tested += 1
            if position < outcome.accepted:
                self._accepted[position] += 1.0
                self._all_accepted += 1


def _near(known: float, ratio: float) -> float:
    """One slow pass (another program's turn) must not drown ten others; a machine far from its calibration is still found out."""
    return min(max(ratio, 0.5 * known), 2.0 * known)
