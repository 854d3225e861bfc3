"""A draft length γ for every block, and who drafts it, chosen from measured costs and from what was accepted so far.

    γ* = argmax over γ >= 0 of  (1 + Σ_j Π_{i <= j} a_i) / (γ · d + v(γ + 1))      tokens a second; γ = 0 is plain decoding

a_i: acceptance rate at position i of a draft (expected_acceptance.py); d, v(n): seconds of a drafter step and of a target pass of
n tokens, now (current_costs.py). This is Leviathan et al. 2023, Theorem 3.8, with measured costs and rates by position.

Every origin of drafts, the model and copies, has its own a_i and its own γ*; d is 0 for copies. Of those that can draft a block,
the one whose γ* gives more tokens a second does.

Where γ* = 0 the origin rests for a while, then some of its drafts are tried, then it rests for twice as long, and so on: without
drafts nothing would be learnt about them. The same happens where speculation has lost too much of the session's time (`Guard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.metrics import acceptance_rate_of
from edgespec.core.table import many
from edgespec_runtime.chooser.current_costs import CurrentCosts
from edgespec_runtime.chooser.expected_acceptance import AcceptanceRates
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import FROM_MODEL, ORIGINS, Outcome, Schedule

# a length stays so long: choosing takes microseconds, and a few blocks change the estimates little
BLOCKS_PER_CHOICE = 8
REFRESH = 64  # blocks with a draft after which one plain step is made: it shows what drafts are compared with
FIRST_REST = 32  # blocks without drafts of an origin before they are tried again, the first time; then twice as many, and so on
LONGEST_REST = 256  # the same, at most: eight drafts that lose a third of their time are 1 % of it
LOSS_SHARE = 0.02  # share of the session's time that speculation may lose: less than a person notices
# plain steps that it may lose at any rate: at a session's beginning the share is next to nothing
FREE_LOSS = 2.0


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
        return self.lost > max(LOSS_SHARE * self.spent, FREE_LOSS * step)

    def reason(self) -> str:
        """Why there are no drafts where it stops them."""
        return f"off for now: drafts have cost {max(0.01, self.lost / self.spent):.0%} of this session's time"


@dataclass
class _Origin:
    """What is known of one origin's drafts, and what was chosen for them.

    Attributes:
        length: γ of its present blocks. pace: tokens a second that these are expected to give.
        left: blocks for which both stay. rest: how many there are where its next choice is to make no drafts.
        off: why it makes no drafts; '' where it makes some.
    """

    rates: AcceptanceRates
    length: int = 0
    pace: float = 0.0
    left: int = 0
    rest: int = FIRST_REST
    off: str = ""


class AdaptiveSchedule(Schedule):
    """Schedule of a session: what it learns in one reply serves in the next.

    Args:
        costs: measured on this device for this pair.
        acceptance_rate: first guess, as the bundle's evaluation measured it; of copies too, until some were made.
        most: longest draft.
        mixes: the rule mixes p and q, so the drafter computes one step more in every block, also where γ = 0.

    Attributes:
        model: what is known of the drafter model's drafts.
    """

    def __init__(self, costs: Costs, acceptance_rate: float, most: int = 8, *, mixes: bool = False) -> None:
        most = min(most, costs.longest - 1)
        self._of = {origin: _Origin(AcceptanceRates(acceptance_rate, most)) for origin in ORIGINS}
        self._costs = CurrentCosts(costs, mixes, memory=2 * REFRESH)  # plain steps are never forgotten
        self._guard = Guard()
        self._chosen = 0  # γ of the last block
        self._since_plain = REFRESH  # blocks with a draft; a session begins with a plain step
        self._last_offered = self._of[FROM_MODEL]  # the model where there is one
        self.model = self._last_offered.rates

    @property
    def off(self) -> str | None:
        """Why the model drafts nothing now, or nobody copies where there is no model; None where somebody does."""
        why = self._last_offered.off
        copies = any(one.length for one in self._of.values() if one is not self._last_offered)
        return why + "; copies from the text go on" * copies if why else None

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        best: _Origin | None = None
        if origins:
            self.origin = origins[-1]  # a rule that mixes p and q asks it even where no token is drafted
        for origin in origins:
            one = self._of[origin]
            if not one.left:
                self._choose(one, context, copies=origin != FROM_MODEL)
            if one.length and (best is None or one.pace > best.pace):
                best, self.origin = one, origin
            self._last_offered = one
        self._chosen = 0
        if self._since_plain < REFRESH:
            for one in (self._of[origin] for origin in origins):
                one.left -= one is best or not one.length
            self._chosen = min(best.length, max(0, room)) if best else 0
        return self._chosen

    def pass_length(self, count: int) -> int:
        return self._costs.row.size[count - 1]

    def observe(self, outcome: Outcome) -> None:
        seconds = self._costs.learn(outcome) + outcome.choosing_seconds
        plainly = outcome.emitted * self._costs.block(0) if self._chosen else seconds
        self._guard.add(seconds, plainly)
        self._since_plain = self._since_plain + 1 if outcome.drafted else 0
        if outcome.drafted:
            offered = min(outcome.drafted, outcome.emitted)
            self._of[outcome.origin].rates.learn(offered, outcome.accepted)

    def step_seconds(self) -> float:
        """What a plain step takes now."""
        return self._costs.block(0)

    def _choose(self, one: _Origin, context: int, *, copies: bool) -> None:
        """The length of an origin's next blocks."""
        rested = one.length == 0 and one.rest > FIRST_REST
        self._costs.move(context)
        tokens = one.rates.tokens()
        paces = [
            expected / self._costs.block(length, copies=copies) for length, expected in enumerate(tokens)
        ]
        best = max(range(1, len(paces)), key=paces.__getitem__, default=0)
        gains = best > 0 and paces[best] > paces[0]
        pays = gains and not self._guard.stops(1.0 / paces[0])
        if pays or (rested and best):
            if pays and not rested:
                one.rest = FIRST_REST
            one.length, one.pace, one.left, one.off = best, paces[best], BLOCKS_PER_CHOICE, ""
        else:
            one.length, one.left = 0, one.rest
            one.rest = min(2 * one.rest, LONGEST_REST)
            one.off = self._guard.reason() if gains else why_off(paces, tokens)
            one.rates.fade(one.left)  # it will be old when they are tried again


def why_off(paces: Sequence[float], tokens: Sequence[float]) -> str:
    """Of the γ that comes nearest to paying: what it costs, the α that would pay for that, and the α that is expected.

    Args:
        paces: expected tokens a second for γ = 0, 1, ...; that of γ = 0 is plain decoding's.
        tokens: expected tokens of a block.
    """
    if len(paces) == 1:
        return "off: this engine takes one token in a pass"
    costs = [paces[0] * expected / pace for pace, expected in zip(paces, tokens, strict=True)]
    length = min(range(1, len(costs)), key=lambda length: _alpha(costs[length], length))
    drafts = f"off: a draft of {many(length, 'token')} and its pass cost {costs[length]:.2f} plain steps here"
    needed, has = _alpha(costs[length], length), _alpha(tokens[length], length)
    if costs[length] >= length + 1:
        return f"{drafts} and give {length + 1} tokens at most"
    least, present = f"{needed:.2f}", f"{has:.2f}"
    return f"{drafts}; the drafter would need α {'above ' * (least == present)}{least}, it has {present}"


def _alpha(tokens: float, length: int) -> float:
    """The α at which a block of γ = `length` has so many tokens; 1 where none does."""
    rate = acceptance_rate_of(tokens, length)
    return 1.0 if rate is None else rate
