"""A draft length that was chosen is kept for some blocks: choosing takes microseconds, and many are learnt from at one go.

It is kept while what the blocks may lose together bears what the next one may, and as long as what they won does not pay for the
longer one that was wanted. Where blocks are short it is kept for more of them, through short replies too.
Knows tokens and seconds; nothing of costs or of acceptance.
"""

from __future__ import annotations

import math

from edgespec_runtime.running_costs import BUCKET

HELD, LONGEST_HELD = 5, 40  # blocks
TRIED = 2  # blocks with a pass of a size of which little is known: they tell it
# Plain steps that so many more blocks may lose of what they have won: the text may be another since.
LOSING_STEPS = 3.0


class HeldLength:
    """Of one choice after another."""

    def __init__(self) -> None:
        self.left = 0  # further blocks
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
        """A length for the next `blocks`; 0: considered again at once.

        Args:
            blocks: HELD or TRIED.
            context: tokens before it; costs are the same around it.
            step: seconds of a plain step.
            risk: seconds that a draft loses of which nothing is accepted.
            budget: seconds that drafts may lose together; one is affordable at any rate.
            enough: seconds that they have to win for the longer draft that was wanted; infinite where there is none.
        """
        self.left = blocks - 1 if length else 0
        self._length, self._context, self._step, self._risk = length, context, step, risk
        self._budget = max(risk, budget)
        self._enough, self._most = self._budget + enough, math.inf

    def go_on_for(self, blocks: int) -> None:
        """So many blocks in all, within HELD and LONGEST_HELD."""
        self.left = min(max(HELD, blocks), LONGEST_HELD) - 1
        self._most = LOSING_STEPS * self._step

    def goes_on(self, context: int, room: int) -> bool:
        """Whether the next block has a draft of that length as well, which is one less then."""
        if not self.left or not self._risk <= self._budget < self._enough:
            return False
        if self._length > room or abs(context - self._context) >= BUCKET:
            return False
        self.left -= 1
        return True

    def tell(self, emitted: int) -> None:
        """A block with such a draft came to so many tokens."""
        self._budget = min(self._budget + (emitted - 1) * self._step - self._risk, self._most)
