"""What speculation has lost against plain steps, and what it may lose yet: in this reply, or in short ones together.

Every reply has a small share of its time to lose, from its beginning as much as CREDIT_STEPS plain steps bring. 2 % of a reply
shorter than that is less than a single draft, so short ones share one account: what they leave serves those that follow, and
what they lose in advance those have to bring in.
Knows seconds; nothing of drafts or of acceptance.
"""

from __future__ import annotations

from typing import NamedTuple

ALLOWED_STEPS = 0.3  # what trying may lose in a reply, in plain steps ...
ALLOWED_SHARE = 0.01  # ... and in shares of the time so far
CREDIT_SHARE = 0.018  # what a draft that seems to pay may lose, in shares of the time so far ...
CREDIT_STEPS = 60.0  # ... or of as many plain steps, where the reply is shorter yet
# Seconds of being asked and told in a plain step, between two passes; plain decoding has none. benchmarks/schedule_overhead.py
# checks it.
ASKED = 1.5e-6
# In plain steps: what a short reply may add to what they keep, or owe, together; and what one of those that follow may use of it,
# for a draft that seems to pay and for one that surely does. A drafter that pays only in the mean over many replies has to bear
# some bad ones in a row; a single reply, which may be of another kind of text, shall not lose all that others won.
ADDED_STEPS, KEPT_STEPS = 6.0, 12.0
USED_STEPS, SURE_STEPS = 1.0, 2.5
LENGTHS = 8  # How long replies are: a running mean of so many.
# Of the reply's room counts as time already taken, for a draft that surely pays, at most so many tokens.
LOOK_AHEAD = 128


class Limits(NamedTuple):
    """Seconds that may be lost.

    Attributes:
        allowance: by a draft that only might pay.
        credit: by one that likely pays.
        borrowed: by one that surely pays, from the time of the tokens that may follow.
        reserve: by several that likely pay, in this reply and the next: the credit with all that short ones have left.
    """

    allowance: float
    credit: float
    borrowed: float
    reserve: float


class Account:
    """Of one reply after another.

    Attributes:
        usual_tokens: of a reply, lately.
        short: whether these are so few that replies share one account.
    """

    def __init__(self) -> None:
        self.spent = self._lost = 0.0  # seconds of this reply: all, and those lost against plain steps
        self._kept = 0.0  # seconds that short replies before it have left; less than 0: that they owe
        self._replies = 0  # how many there were, up to LENGTHS
        self.usual_tokens = CREDIT_STEPS
        self.short = False
        self.unsettled = 0  # replies that have ended since `settle`

    def end_reply(self, tokens: int) -> None:
        """A reply of so many tokens has ended, of which `settle` learns what it took. One of no tokens was none."""
        if not tokens:
            return
        self._replies = min(self._replies + 1, LENGTHS)
        self.usual_tokens += (tokens - self.usual_tokens) / self._replies
        self.short = self.usual_tokens < CREDIT_STEPS
        self.unsettled += 1

    def settle(self, step: float) -> None:
        """Replies have ended, and all that they took is known. `step`: seconds of a plain step."""
        added = min(CREDIT_SHARE * self.spent - self._lost, ADDED_STEPS * step * self.unsettled)
        most = KEPT_STEPS * step
        self._kept = max(-most, min(self._kept + added, most)) if self.short else 0.0
        self.spent = self._lost = 0.0
        self.unsettled = 0

    def take_steps(self, seconds: float, count: int) -> None:
        """Plain steps took `seconds`."""
        self.take(seconds, count * ASKED)

    def take(self, seconds: float, lost: float) -> None:
        """Blocks took `seconds`, `lost` more than plain steps; less than 0: so much was won."""
        self.spent += seconds
        self._lost += lost

    def most_of_a_short_reply(self, step: float) -> float:
        """Seconds that drafts which likely pay may lose in one, however much others have left."""
        return (CREDIT_SHARE * CREDIT_STEPS + USED_STEPS) * step

    def limits(self, step: float, room: int) -> Limits:
        """What drafts may lose now. `step`: seconds of a plain step; `room`: tokens that may follow in this reply."""
        # Of the time so far, or of the first steps, less what being asked will take in those to come.
        ahead = max(0.0, CREDIT_STEPS * step - self.spent)
        share = CREDIT_SHARE * (self.spent + ahead) - (0.0 if self.short else ahead / step * ASKED)
        to_come = CREDIT_SHARE * min(room, LOOK_AHEAD) * step
        # Of what short replies have left, so many steps at most, less what this one has lost.
        kept, lost = self._kept, self._lost
        used = min(kept, USED_STEPS * step) - lost
        return Limits(
            allowance=ALLOWED_STEPS * step + ALLOWED_SHARE * self.spent + used,
            credit=share + used,
            borrowed=CREDIT_SHARE * self.spent + to_come + min(kept, SURE_STEPS * step) - lost,
            reserve=share + min(kept, KEPT_STEPS * step) - lost,
        )
