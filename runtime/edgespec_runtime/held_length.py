"""A draft length that was chosen is kept for some blocks: choosing takes microseconds, and many are learnt from at one go.

It is kept while what the blocks may lose together bears what the next one may, and as long as what they won does not pay for the
longer one that was wanted. Where blocks are short it is kept for more of them, through short replies too.
Knows tokens and seconds; nothing of costs or of acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgespec_runtime.running_costs import BUCKET
from edgespec_runtime.schedule import Outcome

HELD, LONGEST_HELD = 5, 40  # blocks
AT_ONCE = 8  # ... that are made, at most, before what they came to is looked at
TRIED = 2  # blocks with a pass of a size of which little is known: they tell it
# Plain steps that so many more blocks may lose of what they have won: the text may be another since.
LOSING_STEPS = 3.0


class HeldLength:
    """Of one choice after another."""

    def __init__(self) -> None:
        self.left = 0  # blocks to come
        self._length = self._context = 0
        self._step = self._risk = self._budget = 0.0
        self._enough = self._most = math.inf

    def choose(
        self,
        length: int,
        blocks: int,
        context: int,
        step: float,
        risk: float,
        budget: float,
        enough: float,
    ) -> None:
        """A length for the next `blocks`; 0 is not kept.

        Args:
            blocks: HELD or TRIED.
            context: tokens before it; costs are the same around it.
            step: seconds of a plain step.
            risk: seconds that a draft loses of which nothing is accepted.
            budget: seconds that drafts may lose together; one is affordable at any rate.
            enough: seconds that they have to win for the longer draft that was wanted; infinite where there is none.
        """
        self.left = blocks if length else 0
        self._length, self._context, self._step, self._risk = length, context, step, risk
        self._budget = max(risk, budget)
        self._enough, self._most = self._budget + enough, math.inf

    def go_on_for(self, blocks: int) -> None:
        """So many blocks in all, within HELD and LONGEST_HELD."""
        self.left = min(max(HELD, blocks), LONGEST_HELD)
        self._most = LOSING_STEPS * self._step

    def take(self, context: int, room: int) -> int:
        """How many blocks have such a draft before it is asked for again, which no longer are `left`; 0: it is not kept.

        They are as many as may all fail.
        """
        if not self.left or not self._risk <= self._budget < self._enough:
            return 0
        if self._length > room or abs(context - self._context) >= BUCKET:
            return 0
        blocks = min(self.left, AT_ONCE)
        if self._enough < math.inf:
            blocks = 1
        elif blocks * self._risk > self._budget:
            blocks = int(self._budget / self._risk)
        self.left -= blocks
        return blocks

    def tell(self, outcomes: Iterable[Outcome]) -> None:
        """Blocks with such a draft came to these."""
        step, risk, most, budget = self._step, self._risk, self._most, self._budget
        for outcome in outcomes:
            budget = min(budget + (outcome.emitted - 1) * step - risk, most)
        self._budget = budget
