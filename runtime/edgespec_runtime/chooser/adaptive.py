"""A draft length γ for every block, chosen from measured costs and from what was accepted so far.

    γ* = argmax over γ >= 0 of  (1 + Σ_j Π_{i <= j} a_i) / (γ · d + v(γ + 1))      tokens a second; γ = 0 is plain decoding

a_i: acceptance rate at position i of a draft (acceptance_rates.py); d, v(n): seconds of a drafter step and of a target pass of n
tokens, now (current_costs.py). This is Leviathan et al. 2023, Theorem 3.8, with measured costs and rates by position.

Where γ* = 0 we decode plainly for a while, then try some drafts, then decode plainly for twice as long, and so on: without drafts
nothing would be learnt about them. The same happens where speculation has lost too much of the session's time (`Guard`).
"""

from __future__ import annotations

from edgespec_runtime.chooser.acceptance_rates import AcceptanceRates
from edgespec_runtime.chooser.current_costs import CurrentCosts
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.chooser.why_off import Off, why_off
from edgespec_runtime.decoding.schedule import Outcome

EVERY = 8  # blocks for which a length stays: choosing takes microseconds, and a few blocks change the estimates little
REFRESH = 64  # blocks with a draft after which one plain step is made: it shows what drafts are compared with
REST = 32  # plain steps before drafts are tried again, the first time; then twice as many, and so on
LONGEST_REST = 1024  # plain steps before drafts are tried again, at most: a long chat goes on trying
LOSS = 0.02  # share of the session's time that speculation may lose: less than a person notices
FEW = 2.0  # plain steps that it may lose at any rate: at a session's beginning the share is next to nothing


class Guard:
    """What speculation has lost against plain decoding in this session, in seconds; a gain is a negative loss."""

    def __init__(self) -> None:
        self.spent = self.lost = 0.0

    def add(self, seconds: float, plain_seconds: float) -> None:
        """A block took `seconds`; plain decoding would have taken `plain_seconds` for its tokens."""
        self.spent += seconds
        self.lost += seconds - plain_seconds

    def stops(self, step: float) -> bool:
        """Whether the loss is too large; `step`: seconds of a plain step."""
        return self.lost > max(LOSS * self.spent, FEW * step)

    @property
    def share(self) -> float:
        """The loss as a share of the session's time."""
        return self.lost / self.spent if self.spent else 0.0


class Adaptive:
    """Schedule of a session: what it learns in one reply serves in the next.

    Args:
        costs: measured on this device for this pair.
        acceptance_rate: first guess, as the bundle's evaluation measured it.
        most: longest draft.
        mixes: the rule mixes p and q, so the drafter computes one step more in every block, also where γ = 0.

    Attributes:
        off: why the present blocks have no drafts; None where they have some.
    """

    def __init__(self, costs: Costs, acceptance_rate: float, most: int = 8, *, mixes: bool = False) -> None:
        self._most = min(most, costs.longest - 1)
        self._rates = AcceptanceRates(acceptance_rate, self._most)
        self._costs = CurrentCosts(costs, mixes)
        self._guard = Guard()
        self._length = 0  # γ of the present blocks
        self._left = 0  # blocks for which it stays
        self._rest = REST
        self._asked = 0  # γ of the last block
        self._since_plain = REFRESH  # blocks with a draft; a session begins with a plain step
        self.off: Off | None = None

    def begin(self) -> None:
        pass  # a new reply changes nothing

    def draft_length(self, context: int, room: int) -> int:
        if not self._left:
            self._choose(context)
        if self._since_plain >= REFRESH:
            self._asked = 0
        else:
            self._left -= 1
            self._asked = min(self._length, max(0, room))
        return self._asked

    def pass_length(self, count: int, context: int) -> int:
        return self._costs.row(context).size[count - 1]

    def observe(self, outcome: Outcome) -> None:
        row = self._costs.row(outcome.context)
        seconds = self._costs.learn(outcome) + outcome.choosing_seconds
        plainly = outcome.emitted * self._costs.block(row, 0) if self._asked else seconds
        self._guard.add(seconds, plainly)
        self._since_plain = self._since_plain + 1 if outcome.drafted else 0
        if outcome.drafted:
            self._rates.learn(min(outcome.drafted, outcome.emitted), outcome.accepted)

    def step_seconds(self, context: int) -> float:
        """What a plain step takes now."""
        return self._costs.block(self._costs.row(context), 0)

    def _choose(self, context: int) -> None:
        """The length of the next blocks."""
        rested = self._length == 0 and self._rest > REST
        tokens = self._tokens()
        row = self._costs.row(context)
        rates = [expected / self._costs.block(row, length) for length, expected in enumerate(tokens)]
        best = max(range(1, len(rates)), key=rates.__getitem__, default=0)
        gains = best > 0 and rates[best] > rates[0]
        pays = gains and not self._guard.stops(1.0 / rates[0])
        if pays or (rested and best):
            if pays and not rested:
                self._rest = REST
            self._length, self._left, self.off = best, EVERY, None
        else:
            self._length, self._left = 0, self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self.off = why_off(rates, tokens, self._guard.share if gains else 0.0)

    def _tokens(self) -> list[float]:
        """Expected tokens of a block for γ = 0, 1, ... `most`."""
        tokens, reached = [1.0], 1.0
        for accepted in self._rates.estimate():
            reached *= accepted
            tokens.append(tokens[-1] + reached)
        return tokens
