"""A draft length for every block from measured costs and what was accepted so far; 0 where plain decoding is faster.

Expected tokens per second of a draft of γ:

    (1 + Σ_j Π_{i ≤ j} a_i) / (γ · draft + verify(γ + 1))      a_i: acceptance at position i of the block

The best γ is taken, γ = 0 (a plain step) among them. What speculation has lost against plain steps in this reply is kept on an
account. A draft must be affordable, even if nothing of it is accepted: from a larger credit where it likely pays, from a small
allowance where it only might. Where it surely pays (by a wide margin, if the credit would do for enough of such drafts) it
borrows from the time of the tokens that may follow. What is best for every amount that may be lost is considered once and then
looked up for some blocks (draft_ladder.py): where steps are short, considering takes a good part of one.
So a reply of sixty tokens or more is hardly ever slower than plain decoding by 2 % (benchmarks/schedule_replay.py), and one of
which the drafter unexpectedly knows nothing loses a few steps at most. Shorter replies share one account: together they are not
slower, and of what the others left a single one may use a step or two.
Knows costs and counts; no engines, no tokens.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from operator import attrgetter

from edgespec_runtime.chooser.acceptance_rates import MEMORY, AcceptanceRates
from edgespec_runtime.chooser.account import Account
from edgespec_runtime.chooser.draft_ladder import DraftLadder, Rung
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.chooser.running_costs import CATCHING_UP, Blocks, RunningCosts
from edgespec_runtime.decoding.schedule import Outcome

KIND = attrgetter("drafted", "size")  # blocks that are learnt from together

CURIOSITY, CAUTION = 3.0, 0.45  # standard deviations above what is unexplored, and below what is doubted
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
# ... and where steps are short so late that considering, which takes microseconds, is no more than this share of those between:
# of plain steps, which it only makes slower, and of blocks with a draft, among which it finds the best length.
LONGEST_REST, RESTING_SHARE, CONSIDERING_SHARE = 512, 0.0025, 0.005
# Blocks for which a ladder serves, and those with a pass of a size of which little is known: they tell it.
HELD, TRIED = 5, 2
# Plain steps that they may lose of what they have won: the text may be another since.
LOSING_STEPS = 3.0
# Seconds of learning what blocks came to and of choosing the next length, before any were timed
# (benchmarks/schedule_overhead.py checks it); the weight of the last time in their mean, of which one may be so many times.
CONSIDERING, LAST_TIME, SLOW_TIME = 5e-5, 0.3, 2.0
# Drafts of a length that the credit shall bear to fail; longer ones only where none is that cheap. Where short replies share one
# account a failure is one of many replies.
FAILURES, FAILURES_TOGETHER = 2, 4
# Where drafts that surely pay may lose more than there is, shorter ones win it that are hardly slower than plain steps: so many
# times as fast, while so many tokens may follow.
EVEN, EVEN_ROOM = 0.95, 32


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
        self._since_plain = 0  # blocks with a draft
        # Blocks are only noted, and learnt from when a length is next considered: between two passes everything takes long.
        self._outcomes: list[Outcome] = []
        self._ends: list[int] = []  # how many of them there were when a new reply began
        self._tokens = 0  # of this reply, in blocks that were learnt from
        self._ladder = DraftLadder()
        self._length = 0  # of the draft that was last asked for
        self._left = 0  # plain steps to come
        self._chosen = False  # whether it was chosen, and is not one of plain steps that are due
        self._considering = CONSIDERING
        self._longest_step = math.inf
        self._step = 0.0  # seconds of a plain step, when the length was chosen
        # seconds of such empty drafts since the last real one, long ago ones for less, and of those before one usually
        self._in_vain = self._usually_in_vain = 0.0
        self._idle = 0  # blocks since a draft was last tested
        self._rest = SHORT_REST
        # Whether a new reply's empty account may change what was chosen: not where plain steps were chosen with such an account.
        self._forgiving = True
        self._account = Account()

    def begin(self) -> None:
        """The account of a new reply is empty, or begins with a part of what short ones left; what is known of acceptance and the
        machine stays."""
        self._ends.append(len(self._outcomes))
        account, ladder = self._account, self._ladder
        if account.short and ladder.left >= HELD and ladder.begin(account.most_of_a_short_reply(self._step)):
            # It serves for many blocks yet: considering takes time.
            self._left = 0
            return
        ladder.left = 0
        # The drafter has missed nothing of a new reply, so a draft is cheapest at its beginning.
        if self._forgiving or (account.short and self._left < account.usual_tokens):
            self._left = 0

    def acceptance(self) -> list[float]:
        """Estimated probability, for every position of a block, that its token is accepted where those before it were."""
        self._learn()
        return self._rates.estimate(self._idle)[0]

    def draft_length(self, context: int, room: int) -> int:
        if self._left:
            self._left -= 1
            return 0
        self._length = self._ladder.take(context, room) or self._next(context, room)
        return self._length

    def _next(self, context: int, room: int) -> int:
        """The length of the next block, newly considered."""
        ladder = self._ladder
        if self._considering > CONSIDERING_SHARE * self._step and ladder.rest():
            # Where considering is dear, what it would say is known.
            self._rest_plainly()
            return 0
        self._learn()
        most = min(self._most, room)
        self._chosen = most > 0 and not self._due
        if not self._chosen:
            self._left, ladder.left = max(self._due - 1, 0), 0
            return 0
        length = self._best(context, room, most)
        self._forgiving = length > 0 or (self._forgiving and self._account.spent > 0.0)
        if length:
            self._rest = SHORT_REST
        else:
            self._rest_plainly()
        return length

    def _rest_plainly(self) -> None:
        long = int(self._considering / (RESTING_SHARE * self._step))
        self._left = min(max(self._rest, long), LONGEST_REST) - 1
        self._rest = min(2 * self._rest, LONG_REST)

    def _best(self, context: int, room: int, most: int) -> int:
        """The draft length of most tokens a second that may be tried now, up to `most`; 0 where plain steps are faster."""
        costs = self._costs
        row = costs.row(context)
        self._sizes, blocks, at_best = costs.blocks(row, most)
        step = self._step = blocks[0]
        before = costs.catching_up + max(self._usually_in_vain, self._in_vain)
        plain = 1.0 / step
        allowance, credit, borrowed, reserve = self._account.limits(step, room)
        estimates, doubt, unexplored = self._rates.estimate(self._idle)
        cheap = before + blocks[1] - step <= CHEAP * step
        sure = (SURE_IF_CHEAP if cheap else SURE) * plain
        failures = FAILURES_TOGETHER if self._account.short else FAILURES
        hoped, hoped_rate = 0, WORTH * plain
        rungs: list[Rung] = []  # lengths that pay
        even: list[Rung] = []  # ... and those that hardly do
        out_of_reach = False  # whether one that surely pays may lose more than there is
        # expected tokens so far, 1 + Σ_j Π_{i ≤ j} a_i, and the last product: for a low, the likely and a high estimate
        low = middle = high = low_reach = middle_reach = high_reach = 1.0
        for length in range(1, most + 1):
            estimate, seconds = estimates[length - 1], before + blocks[length]
            low_reach *= max(estimate - CAUTION * doubt, 0.0)
            middle_reach *= estimate
            high_reach *= min(estimate + CURIOSITY * unexplored, 1.0)
            low, middle, high = low + low_reach, middle + middle_reach, high + high_reach
            risk = seconds - step  # lost if nothing of it is accepted
            lowest, likely = low / seconds, middle / seconds
            if likely > WORTH * plain:
                bearable = max(allowance, credit) if lowest > plain else allowance
                if lowest > sure:
                    bearable = max(bearable, borrowed)
                start = credit + risk - bearable
                careful = max(start, credit + failures * risk - reserve)
                rate = middle / (before + at_best[length])
                rungs += (Rung(start, False, rate, length), Rung(careful, True, rate, length))
                out_of_reach = out_of_reach or (start > credit and likely > sure)
            elif likely > EVEN * plain:
                even.append(Rung(risk, False, likely, length))
            if high / seconds > hoped_rate and risk <= allowance:
                hoped, hoped_rate = length, high / seconds
        if out_of_reach and room >= EVEN_ROOM:
            rungs += even
        first = self._ladder.build(rungs, blocks, credit, reserve)
        if not first:
            return hoped
        self._hold(first, blocks[first], context, most)
        return self._ladder.take(context, room)

    def _hold(self, first: int, seconds: float, context: int, most: int) -> None:
        """The ladder serves for some blocks, of which the first with a draft of `first` takes `seconds`."""
        costs, sizes = self._costs, self._sizes
        known = [costs.seen(size) for size in sizes]
        held, losing = HELD, LOSING_STEPS * self._step
        if self._considering <= CONSIDERING_SHARE * seconds:
            # It costs next to nothing to learn at once: from the first blocks, and from a failure where costs are not known well.
            if not known[first]:
                held = TRIED
            if not costs.fresh(sizes[first]):
                losing = 0.0
        elif known[first] and most == self._most:
            held = max(HELD, int(self._considering / (CONSIDERING_SHARE * seconds)))
            if self._account.short:  # what one reply may lose is little at any rate
                losing = math.inf
        known[first] = True
        self._ladder.hold(held, context, losing, known)

    def pass_length(self, count: int, context: int) -> int:
        return self._sizes[count - 1] if count <= len(self._sizes) else count

    def observe(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if not self._length:
            return
        if outcome.drafted:
            self._ladder.tell(outcome)
        else:  # the drafter ended its draft before it began
            self._ladder.left = 0

    def _learn(self) -> None:
        """From all blocks that were noted."""
        outcomes, self._outcomes = self._outcomes, []
        ends, self._ends = self._ends, []
        if self._chosen and outcomes:
            self._learn_considering(outcomes[0].choosing_seconds)
            outcomes[0] = outcomes[0]._replace(choosing_seconds=0.0)
        if ends:
            self._learn_from(outcomes[: ends[-1]])
            for begun, end in pairwise([0, *ends]):
                self._account.end_reply(self._tokens + _emitted(outcomes[begun:end]))
                self._tokens = 0
            self._costs.begin()
            self._account.settle(self._step)
            if self._account.short:
                self._rates.begin()
            outcomes = outcomes[ends[-1] :]
        self._learn_from(outcomes)
        self._tokens += _emitted(outcomes)

    def _learn_considering(self, taken: float) -> None:
        taken = min(taken, SLOW_TIME * self._considering)  # more is another program's turn
        self._considering += LAST_TIME * (taken - self._considering)
        self._account.take(taken, taken)
        self._chosen = False

    def _learn_from(self, outcomes: list[Outcome]) -> None:
        for (drafted, _), blocks in groupby(outcomes, KIND):
            if drafted:
                self._learn_blocks(list(blocks))
            else:
                self._learn_steps(list(blocks))

    def _learn_blocks(self, outcomes: list[Outcome]) -> None:
        costs = self._costs
        row, size = costs.row(outcomes[0].context), outcomes[0].size
        blocks = Blocks(row, outcomes, costs.longest(row, size))
        self._since_plain += blocks.count
        self._due = int(self._since_plain >= REFRESH)
        self._rates.learn(blocks.tests, self._idle)
        self._usually_in_vain += CATCHING_UP * (self._in_vain - self._usually_in_vain)
        self._in_vain, self._idle = 0.0, 0
        # Drafts that are well known count for what they usually take: a slow moment is no loss, plain steps are slow then too.
        usually = costs.fresh(size)
        catching_up = costs.catching_up
        known = catching_up + blocks.count * costs.block(row, blocks.drafted, size)
        costs.learn(blocks)
        taken = blocks.seconds
        if usually:
            if taken > SLOWER * known:
                self._due = CHECKING_STEPS
            taken = catching_up + blocks.count * costs.block(row, blocks.drafted, size)
        self._account.take(blocks.seconds, taken + blocks.choosing_seconds - blocks.emitted * costs.step(row))

    def _learn_steps(self, steps: list[Outcome]) -> None:
        count, longest = len(steps), self._longest_step
        seconds = sum(min(step.seconds - step.draft_seconds, longest) for step in steps)
        self._in_vain *= MEMORY**count
        if self._length:
            in_vain = sum(step.draft_seconds for step in steps)
            self._in_vain += in_vain
            self._account.take(0.0, in_vain)
        self._due, self._since_plain = max(0, self._due - count), 0
        self._idle += count
        self._account.take_steps(seconds, count)
        row = self._costs.row(steps[-1].context)
        self._costs.learn_steps(row, count, seconds)
        self._longest_step = self._costs.longest(row, row.size[0])


def _emitted(outcomes: list[Outcome]) -> int:
    return sum(outcome.emitted for outcome in outcomes)
