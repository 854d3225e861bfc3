"""What drafter steps and target passes cost now: the measured table times one slowly moving factor per size of pass.

A laptop gets hot, another program starts, sampling takes its time: the table alone would be wrong soon. Knows costs and seconds;
nothing of acceptance.
"""

from __future__ import annotations

from edgespec_runtime.chooser.pass_costs import Costs, CostsAt
from edgespec_runtime.decoding.schedule import FROM_MODEL, Outcome

WEIGHT = 0.1  # of the newest block in a factor: some ten blocks move it, one does not
CLIP = 2.0  # times what was expected: a block that took longer was held up by another program and tells nothing more


class _Factor:
    """Times what the table says: the mean of the first blocks, then slowly moving. The table counts as one block.

    Attributes:
        block: number of the newest block that it learnt from.
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value, self._seen, self.block = value, 1, 0

    def learn(self, seconds: float, table: float) -> float:
        """Returns the seconds that were believed."""
        seconds = min(seconds, CLIP * self.value * table)
        self._seen += 1
        self.value += max(WEIGHT, 1.0 / self._seen) * (seconds / table - self.value)
        return seconds


class CurrentCosts:
    """Seconds of drafts, passes and blocks.

    Args:
        costs: measured on this device for this pair.
        mixes: the drafter also speaks behind the draft, as a rule wants that mixes p and q (acceptance.Rule).
        memory: blocks after which a size that was not made is forgotten. It was last seen on a machine that may have been busy
            then, and as long as it looks dear nobody would make it again.

    Attributes:
        row: the table near the present context. It moves when a length is chosen: a block is held against what it was chosen by.
    """

    def __init__(self, costs: Costs, mixes: bool, memory: int) -> None:
        self._costs, self._mixes, self._memory = costs, mixes, memory
        self._drafting = _Factor()
        self._passes: dict[int, _Factor] = {}  # by size, of those that were made lately
        self._blocks = 0
        self.row: CostsAt = costs.at(costs.contexts[0])

    def move(self, context: int) -> None:
        """Take the table's row at this context."""
        self.row = self._costs.at(context)

    def block(self, length: int, *, copies: bool = False) -> float:
        """Expected seconds of a block with a draft of `length` tokens; 0: of a plain step. Copies cost no drafter steps."""
        row = self.row
        drafting, size = (0 if copies else length + self._mixes) * row.draft, row.size[length]
        return drafting * self._drafting.value + row.passes[size] * self._factor(size).value

    def learn(self, outcome: Outcome) -> float:
        """Move the factors by what a block took. Returns its seconds, a pass that was held up clipped."""
        row = self.row
        drafting, size = outcome.draft_seconds, outcome.size
        table = (outcome.drafted + self._mixes) * row.draft
        if table and outcome.origin == FROM_MODEL:
            drafting = self._drafting.learn(drafting, table)
        self._blocks += 1
        first = self._blocks - self._memory
        self._passes = {made: each for made, each in self._passes.items() if each.block >= first}
        self._passes[size] = factor = self._factor(size)
        factor.block = self._blocks
        # a pass, and the sampling and the loop's work around it
        return drafting + factor.learn(outcome.seconds - outcome.draft_seconds, row.passes[size])

    def _factor(self, size: int) -> _Factor:
        """Of a size that was not made lately, the nearest one's: it tells how fast the machine is."""
        if size in self._passes or not self._passes:
            return self._passes.get(size) or _Factor()
        return _Factor(self._passes[min(self._passes, key=lambda made: abs(made - size))].value)
