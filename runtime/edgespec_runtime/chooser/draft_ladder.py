"""The draft length by what may be lost now: considered once, as that takes microseconds, and looked up for some blocks.

A draft of which nothing is accepted loses time, and a longer one more. So what was considered is a ladder: from so many seconds
on that may be lost, drafts of such a length. Blocks that win lead up on it, blocks that lose lead down. Where blocks are short it
serves for more of them, through short replies too.
Knows tokens and seconds; nothing of costs or of acceptance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgespec_runtime.chooser.running_costs import BUCKET
from edgespec_runtime.decoding.schedule import Outcome

LONGEST_HELD = 40  # blocks
SLOW_BLOCK = (
    1.3  # times what a block usually takes that is held against it, at most: more is another program's turn
)


class Rung(NamedTuple):
    """A draft length worth taking.

    Attributes:
        start: seconds that may be lost from which on it may be taken.
        careful: whether several failures may be borne from there on. Such a rung is taken before all others.
        rate: tokens a second; of several the fastest is taken.
        length: of the draft.
    """

    start: float
    careful: bool
    rate: float
    length: int


class DraftLadder:
    """Of one consideration after another.

    Attributes:
        left: blocks that it serves for yet.
    """

    __slots__ = (
        "_blocks",
        "_context",
        "_known",
        "_least",
        "_lengths",
        "_losing",
        "_reserve",
        "_rested",
        "_slack",
        "_starts",
        "left",
    )

    def __init__(self) -> None:
        self.left = 0
        self._starts: list[float] = []
        self._lengths = [0]
        self._known: Sequence[bool] = ()
        self._blocks: Sequence[float] = ()
        self._context = 0
        # seconds that may be lost now and in the next replies, and with how few it is to be considered again
        self._slack = self._reserve = self._least = self._losing = 0.0
        self._rested = False

    def build(self, rungs: Iterable[Rung], blocks: Sequence[float], slack: float, reserve: float) -> int:
        """A new ladder, and the length to begin with; 0 where none may be taken.

        Args:
            rungs: in any order.
            blocks: seconds of a block by draft length; 0: of a plain step.
            slack: seconds that may be lost now.
            reserve: seconds that may be lost in this reply and the next.
        """
        self._starts, self._lengths = [], [0]
        best = (False, 0.0)
        for start, careful, rate, length in sorted(rungs):
            if (careful, rate) > best:
                best = (careful, rate)
                self._starts.append(start)
                self._lengths.append(length)
        self._blocks, self._slack, self._reserve = blocks, slack, reserve
        self.left, self._rested = 0, False
        return self._lengths[bisect_right(self._starts, slack)]

    def hold(self, blocks: int, context: int, losing: float, known: Sequence[bool]) -> None:
        """Serve for so many blocks, LONGEST_HELD at most.

        Args:
            context: tokens before them; costs are the same around it.
            losing: seconds that they may lose of what they have won.
            known: by draft length, whether it is known what a block takes. The first one is tried at any rate.
        """
        self.left, self._context = min(blocks, LONGEST_HELD), context
        self._losing, self._least = losing, self._slack - losing
        self._known = known

    def begin(self, most: float) -> bool:
        """A new reply, in which at most so many seconds may be lost; whether a draft may be taken then."""
        self._slack = min(self._reserve, most)
        self._least = self._slack - self._losing
        self._rested = False
        return self._slack >= self._starts[0]

    def rest(self) -> bool:
        """Whether no draft may be taken any more, which is asked once in a reply."""
        if self._rested or not self.left or self._slack >= self._starts[0]:
            return False
        self._rested = True
        return True

    def take(self, context: int, room: int) -> int:
        """The draft length of the next block; 0: it has to be considered anew."""
        slack = self._slack
        if not self.left or slack < self._least or not -BUCKET < context - self._context < BUCKET:
            return 0
        length = self._lengths[bisect_right(self._starts, slack)]
        if length > room or not self._known[length]:
            return 0
        self.left -= 1
        return length

    def tell(self, outcome: Outcome) -> None:
        """What a block with such a draft came to."""
        # Between two passes everything takes several times as long as in a loop of its own, so without min and max.
        blocks, taken = self._blocks, outcome.seconds
        usually = blocks[outcome.drafted]
        if taken < usually:
            taken = usually
        elif taken > SLOW_BLOCK * usually:
            taken = SLOW_BLOCK * usually
        won = outcome.emitted * blocks[0] - taken
        self._reserve += won
        slack = self._slack = self._slack + won
        if slack - self._losing > self._least:
            self._least = slack - self._losing
