"""A draft length for every block from measured costs and what was accepted so far; 0 where plain decoding is faster.

Expected tokens per second of a draft of γ:

    (1 + Σ_j Π_{i ≤ j} a_i) / (γ · draft + verify(γ + 1) + overhead)      a_i: acceptance at position i of the block

The best γ is taken block by block, γ = 0 (a plain step) among them. What speculation has lost against plain steps in this reply
is kept on an account with a small allowance. A draft must be affordable, even if nothing of it is accepted, or pay beyond doubt;
and where none seems to pay, one that might is tried while it is affordable. So a reply is hardly slower than plain decoding.
Knows costs and counts; no engines, no tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec_runtime.costs import Costs
from edgespec_runtime.schedule import Outcome

GUESS_TESTS = (
    8.0  # how many tested tokens the first guess is worth in the acceptance rate of the long run ...
)
LONG_RUN_TESTS = 6.0  # ... and how many that one is worth in the present one
MEMORY = 0.98  # weight that a tested token keeps with every later block: about the last 50 blocks count
POSITION_TESTS = 20.0  # how many tested tokens the common rate is worth at each position
CURIOSITY, CAUTION = 3.0, 1.0  # standard deviations above and below
ALLOWED_STEPS = 0.7  # what speculation may lose in a reply, in plain steps ...
ALLOWED_SHARE = 0.01  # ... and in shares of the time so far
BUCKET = 64  # tokens of context that share a row of costs: interpolating anew for every block would cost as much as sampling
REFRESH = 40  # blocks after which a plain step shows again what it takes: all gains are measured by it
DRIFT = 0.1  # weight of a block's time in the running ratio of measured to calibrated seconds


class _Reach:
    """Expected tokens of a block, 1 + Σ_j Π_{i ≤ j} a_i, as it grows by one position after the other."""

    def __init__(self) -> None:
        self._reach = self._tokens = 1.0

    def tokens(self, acceptance: float) -> float:
        self._reach *= min(max(acceptance, 0.0), 1.0)
        self._tokens += self._reach
        return self._tokens


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
        self._size_ratio: dict[int, float] = {}  # of passes of one size, which need not all be off alike
        self._seen: dict[int, int] = {}  # passes of each size
        self._since_plain = REFRESH
        self._overhead = 0.0  # seconds of a block beside both models
        self._rows: dict[int, _Row] = {}
        self.begin()

    def begin(self) -> None:
        """The account of a new reply is empty; what is known of acceptance and the machine stays."""
        self._lost = self._spent = 0.0

    def acceptance(self) -> list[float]:
        """Estimated probability, for every position of a block, that its token is accepted where those before it were."""
        long_run = (GUESS_TESTS * self._guess + self._all_accepted) / (GUESS_TESTS + self._all_tested)
        tests = LONG_RUN_TESTS + sum(self._tested)
        common = (LONG_RUN_TESTS * long_run + sum(self._accepted)) / tests
        return [
            (POSITION_TESTS * common + accepted) / (POSITION_TESTS + tested)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]

    def _doubt(self) -> float:
        """One standard deviation of the estimates."""
        tests = LONG_RUN_TESTS + sum(self._tested)
        mean = self.acceptance()[0]
        return math.sqrt(mean * (1.0 - mean) / tests)

    def seconds(self, length: int, context: int) -> float:
        """Expected seconds of a block with a draft of `length`; 0: of a plain step."""
        row = self._row(context)
        drafting = length * self._draft_ratio * row.draft
        size = row.size[length]
        return drafting + self._size_ratio.get(size, self._verify_ratio) * row.verify[size] + self._overhead

    def _row(self, context: int) -> _Row:
        bucket = context // BUCKET
        if bucket not in self._rows:
            middle, counts = bucket * BUCKET + BUCKET // 2, range(1, self._costs.longest + 1)
            self._rows[bucket] = _Row(
                self._costs.draft(middle),
                [0.0, *(self._costs.verify(count, middle) for count in counts)],
                [self._costs.cheapest_length(count, middle) for count in counts],
            )
        return self._rows[bucket]

    def draft_length(self, context: int, room: int) -> int:
        if self._since_plain >= REFRESH:
            return 0
        step = self.seconds(0, context)
        account = ALLOWED_STEPS * step + ALLOWED_SHARE * self._spent - self._lost
        estimates, doubt = self.acceptance(), self._doubt()
        likely, hoped = (0, 1.0 / step), (0, 1.0 / step)  # (γ, tokens a second)
        middle, low, high = _Reach(), _Reach(), _Reach()
        for length in range(1, min(self._most, room) + 1):
            estimate, seconds = estimates[length - 1], self.seconds(length, context)
            affordable = seconds - step <= account  # even if nothing of it is accepted
            certain = low.tokens(estimate - CAUTION * doubt) / seconds > 1.0 / step
            rate = middle.tokens(estimate) / seconds
            if rate > likely[1] and (affordable or certain):
                likely = length, rate
            rate = high.tokens(estimate + CURIOSITY * doubt) / seconds
            if rate > hoped[1] and affordable:
                hoped = length, rate
        return likely[0] or hoped[0]

    def pass_length(self, count: int, context: int) -> int:
        sizes = self._row(context).size
        return sizes[count - 1] if count <= len(sizes) else count

    def observe(self, outcome: Outcome) -> None:
        context, drafted = outcome.context, outcome.drafted
        step = self.seconds(0, context)
        self._spent += outcome.seconds
        self._learn(outcome)
        if drafted:
            self._lost += outcome.seconds - outcome.emitted * step
            expected = drafted * self._row(context).draft
            if expected:
                self._draft_ratio += DRIFT * (_within(outcome.draft_seconds / expected) - self._draft_ratio)
        if outcome.size < len(self._row(context).verify):
            ratio = _within(outcome.verify_seconds / self._row(context).verify[outcome.size])
            self._verify_ratio += DRIFT * (ratio - self._verify_ratio)
            self._seen[outcome.size] = seen = self._seen.get(outcome.size, 0) + 1
            known = self._size_ratio.get(outcome.size, self._verify_ratio)
            self._size_ratio[outcome.size] = known + max(DRIFT, 1.0 / (seen + 1)) * (ratio - known)
        self._since_plain = 0 if outcome.size == 1 else self._since_plain + 1
        beside = outcome.seconds - outcome.draft_seconds - outcome.verify_seconds
        self._overhead += DRIFT * (beside - self._overhead)

    def _learn(self, outcome: Outcome) -> None:
        """Plain steps make it forget as well, so that it tries again where the long run promises a gain."""
        for position in range(self._most):
            self._tested[position] *= MEMORY
            self._accepted[position] *= MEMORY
        for position in range(min(outcome.drafted, outcome.emitted, self._most)):
            self._tested[position] += 1.0
            self._all_tested += 1
            if position < outcome.accepted:
                self._accepted[position] += 1.0
                self._all_accepted += 1


def _within(ratio: float) -> float:
    """One slow pass (another program's turn) must not drown ten others."""
    return min(max(ratio, 0.5), 2.0)
