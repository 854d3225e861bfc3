"""A draft length for every block from measured costs and what was accepted so far; 0 where plain decoding is faster.

Expected tokens per second of a draft of γ:

    (1 + Σ_j Π_{i ≤ j} a_i) / (γ · draft + verify(γ + 1))      a_i: acceptance at position i of the block

The best γ is taken, γ = 0 (a plain step) among them; for a few blocks at a time where they win or that is no risk. What
speculation has lost against plain steps in this reply is kept on an account. A draft must be affordable, even if nothing of it is
accepted: from a larger credit where it likely pays, from a small allowance where it only might. Where it surely pays (by a wide
margin, if the credit would do for enough of such drafts) it borrows from the time of the tokens that may follow. So a reply of
sixty tokens or more is hardly ever slower than plain decoding by 2 % (benchmarks/schedule_replay.py), and one of which the
drafter unexpectedly knows nothing loses a few steps at most. Shorter replies share one account: together they are not slower, and
of what the others left a single one may use a step or two.
Knows costs and counts; no engines, no tokens.
"""

from __future__ import annotations

import math

from edgespec_runtime.acceptance_rates import MEMORY, AcceptanceRates
from edgespec_runtime.account import Account
from edgespec_runtime.held_length import HELD, TRIED, HeldLength
from edgespec_runtime.pass_costs import Costs
from edgespec_runtime.running_costs import CATCHING_UP, Blocks, RunningCosts
from edgespec_runtime.schedule import Outcome

CURIOSITY, CAUTION = 3.0, 0.45  # standard deviations above and below
# Times faster than plain steps, at the low estimate: such a draft makes good what bad luck loses, and borrows from what may come.
# The higher bar is for drafts that risk little, CHEAP plain steps at most: the credit pays for enough of them.
SURE, SURE_IF_CHEAP, CHEAP = 1.12, 1.6, 0.35
WORTH = 1.03  # times faster a draft must be expected to be: costs and rates are not known better than that
# All gains are measured by a plain step: those before the very first draft (the one that follows a prompt is a cold one), and the
# blocks after which one more shows again what it takes.
FIRST_STEPS, REFRESH = 4, 40
# Well-known drafts that take so many times what they do usually (more than one hiccup makes of them) are followed by plain steps:
# these tell whether the machine is slow for all, or drafting alone.
SLOWER, CHECKING_STEPS = 1.31, 2
# Plain steps after which drafting is considered again: ever later where it never pays ...
SHORT_REST, LONG_REST = 8, 32
# ... and where steps are short so late that considering, which takes microseconds, stays a small share of those between.
LONGEST_REST, CONSIDERING_SHARE = 128, 0.005
# Seconds of learning what drafts came to and of choosing the next length (benchmarks/schedule_overhead.py checks it).
CONSIDERING = 5e-5
# Drafts of a length that the credit shall bear to fail; longer ones only where none is that cheap.
FAILURES = 2


class Adaptive:
    """Schedule of one reply after another; what it learnt about acceptance and the machine's speed stays.

    Args:
        costs: measured on this device for this pair.
        acceptance_rate: first guess, as the bundle's evaluation measured it.
        most: longest draft.
    """

    def __init__(self, costs: Costs, acceptance_rate: float, most: int = 8) -> None:
        self._costs = RunningCosts(costs)
        self._most = min(most, costs.longest - 1)
        # The cheapest passes, at the context at which a length was last considered.
        self._sizes = self._costs.row(0).size
        self._rates = AcceptanceRates(acceptance_rate, self._most)
        self._due = FIRST_STEPS  # plain steps to be made before the next draft, from those that are not learnt from yet
        self._since_plain = 0
        # Plain steps and blocks are only counted, and learnt from when the length is next considered: counting takes no time.
        self._plain_steps, self._plain_seconds, self._plain_context = 0, 0.0, 0
        self._longest_step = math.inf
        self._blocks: Blocks | None = None
        self._considered = False  # whether the last length was chosen, and not a plain step of a rest ...
        self._asked = 0  # ... and what it was; the drafter may have made no token of it
        self._held = HeldLength()
        self._tokens = 0  # of this reply
        self._step = 0.0  # seconds of a plain step, when the length was chosen
        # seconds of such empty drafts since the last real one, and of those before one usually
        self._in_vain = self._usually_in_vain = 0.0
        self._vain_at = 0  # of `_idle`, when the last one came
        self._idle = 0  # blocks since a draft was last tested
        self._resting, self._rest = 0, SHORT_REST
        # Whether a new reply's empty account may change what was chosen: not where plain steps were chosen with such an account.
        self._forgiving = True
        self._account = Account()
        self.begin()

    def begin(self) -> None:
        """The account of a new reply is empty, or begins with a part of what short ones left; what is known of acceptance and the
        machine stays."""
        if self._tokens:
            self._account.end_reply(self._tokens)
            self._tokens = 0
        if self._held.left >= HELD and self._account.short and not self._plain_steps:
            return  # as if it were one reply: beginning takes as long as considering
        self._learn()
        self._costs.begin()
        self._account.settle(self._step)
        if self._account.short:
            self._rates.begin()
        self._held.left = 0
        # The drafter has missed nothing of a new reply, so a draft is cheapest at its beginning.
        if self._forgiving or (self._account.short and self._account.lasts(self._resting)):
            self._resting = 0

    def acceptance(self) -> list[float]:
        """Estimated probability, for every position of a block, that its token is accepted where those before it were."""
        self._learn()
        return self._rates.estimate(self._idle)[0]

    def draft_length(self, context: int, room: int) -> int:
        if self._resting:
            self._resting -= 1
            return 0
        if self._held.goes_on(context, room):
            return self._asked
        self._learn_blocks()
        if self._account.unsettled:
            self._account.settle(self._step)
        most = min(self._most, room)
        self._considered = most > 0 and self._plain_steps >= self._due
        if not self._considered:
            return 0
        self._learn_steps()
        length = self._asked = self._best(context, room, most)
        self._forgiving = length > 0 or (self._forgiving and self._account.spent > 0.0)
        if length:
            self._rest = SHORT_REST
        else:
            self._resting = self._rest - 1
            self._rest = min(2 * self._rest, LONG_REST)
        return length

    def _best(self, context: int, room: int, most: int) -> int:
        """The draft length of most tokens a second that may be tried now, up to `most`; 0 where plain steps are faster."""
        costs = self._costs
        row = costs.row(context)
        self._sizes, blocks, at_best = costs.blocks(row, most)
        step = self._step = blocks[0]
        before = costs.catching_up + max(self._usually_in_vain, self._vain())
        plain = 1.0 / step
        allowance, credit, borrowed, reserve = self._account.limits(step, room)
        estimates, doubt = self._rates.estimate(self._idle)
        cheap = before + blocks[1] - step <= CHEAP * step
        sure = (SURE_IF_CHEAP if cheap else SURE) * plain
        likely, careful, hoped = 0, 0, 0
        worth = likely_rate = hoped_rate = WORTH * plain
        # expected tokens so far, 1 + Σ_j Π_{i ≤ j} a_i, and the last product: for a low, the likely and a high estimate
        low = middle = high = low_reach = middle_reach = high_reach = 1.0
        for length in range(1, most + 1):
            estimate, seconds = estimates[length - 1], before + blocks[length]
            low_reach *= max(estimate - CAUTION * doubt, 0.0)
            middle_reach *= estimate
            high_reach *= min(estimate + CURIOSITY * doubt, 1.0)
            low, middle, high = low + low_reach, middle + middle_reach, high + high_reach
            risk = seconds - step  # lost if nothing of it is accepted
            affordable = risk <= allowance
            needed = plain if risk <= credit else sure if risk <= borrowed else math.inf
            rate = middle / (before + at_best[length])
            if middle / seconds > worth and rate > likely_rate and (affordable or low / seconds > needed):
                likely, likely_rate = length, rate
                if FAILURES * risk <= reserve:
                    careful = length
            if high / seconds > hoped_rate and affordable:
                hoped, hoped_rate = length, high / seconds
        wanted, likely = likely, careful or likely
        risk = blocks[likely] - step
        # where costs are known, as long as the length would be careful if it were considered again
        known = costs.fresh(self._sizes[likely])
        budget = credit - (FAILURES - 1) * risk if known else 0.0
        # one failure more than it takes: else the longer one is soon too long again
        enough = math.inf if likely == wanted else (FAILURES + 1) * (blocks[wanted] - step) - reserve
        held = HELD if costs.seen(self._sizes[likely]) else TRIED
        self._held.choose(likely, held, context, step, risk, budget, enough)
        if likely and likely == wanted and known and most == self._most:
            self._held.go_on_for(int(CONSIDERING / (CONSIDERING_SHARE * blocks[likely])))
        return likely or hoped

    def pass_length(self, count: int, context: int) -> int:
        return self._sizes[count - 1] if count <= len(self._sizes) else count

    def observe(self, outcome: Outcome) -> None:
        context, drafted, accepted, emitted, size, draft_seconds, _, seconds = outcome
        self._tokens += emitted
        if not drafted:
            if self._considered:
                self._considered = False
                self._account.take(0.0, draft_seconds)  # choosing and drafting take time
                if not self._asked:
                    rest = min(int(draft_seconds / (CONSIDERING_SHARE * self._step)), LONGEST_REST)
                    self._resting = max(self._resting, rest)
                else:  # the drafter ended its draft before it began
                    self._learn_blocks()
                    self._held.left = 0
                    self._in_vain = self._vain() + draft_seconds
                    self._vain_at = self._idle + self._plain_steps + 1
            self._plain_steps += 1
            self._plain_seconds += min(seconds - draft_seconds, self._longest_step)
            self._plain_context = context
            return
        blocks = self._blocks
        if blocks is None or (blocks.drafted, blocks.size) != (drafted, size):
            self._learn_blocks()
            row = self._costs.row(context)
            blocks = self._blocks = Blocks(row, drafted, size, self._costs.longest(row, size))
        blocks.add(min(drafted, emitted), accepted, emitted, draft_seconds, seconds)
        self._held.tell(emitted)

    def _vain(self) -> float:
        """Seconds of empty drafts since the last real one, long ago ones for less."""
        return MEMORY ** (self._idle + self._plain_steps - self._vain_at) * self._in_vain

    def _learn(self) -> None:
        self._learn_blocks()
        self._learn_steps()

    def _learn_blocks(self) -> None:
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            return
        costs, count = self._costs, len(blocks.tests)
        self._since_plain += count
        self._due = int(self._since_plain >= REFRESH)
        self._rates.learn(blocks.tests, self._idle)
        self._usually_in_vain += CATCHING_UP * (self._in_vain - self._usually_in_vain)
        self._in_vain, self._vain_at, self._idle = 0.0, 0, 0
        # Drafts that are well known count for what they usually take: a slow moment is no loss, plain steps are slow then too.
        drafted, size, catching_up = blocks.drafted, blocks.size, costs.catching_up
        usually = costs.fresh(size)
        known = catching_up + count * costs.block(blocks.row, drafted, size)
        costs.learn(blocks)
        if usually and blocks.seconds > SLOWER * known:
            self._due = CHECKING_STEPS
        taken = blocks.seconds
        if usually:
            taken = catching_up + count * costs.block(blocks.row, drafted, size)
        self._account.take(blocks.seconds, taken - blocks.emitted * costs.step(blocks.row))

    def _learn_steps(self) -> None:
        steps, seconds = self._plain_steps, self._plain_seconds
        if steps:
            self._plain_steps, self._plain_seconds = 0, 0.0
            self._due, self._since_plain = max(0, self._due - steps), 0
            self._idle += steps
            self._account.take_steps(seconds, steps)
            row = self._costs.row(self._plain_context)
            self._costs.learn_steps(row, steps, seconds)
            self._longest_step = self._costs.longest(row, row.size[0])
