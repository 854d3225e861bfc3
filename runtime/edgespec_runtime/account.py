"""What speculation has lost against plain steps, and what it may lose yet: in this reply, or in short ones together.

Every reply has a small share of its time to lose, from its beginning as much as CREDIT_STEPS plain steps bring. 2 % of a reply
shorter than that is less than a single draft, so short ones share one account: what they leave serves those that follow, and
what they lose in advance those have to bring in.
Knows seconds; nothing of drafts or of acceptance.
"""

from __future__ import annotations

ALLOWED_STEPS = 0.3  # what trying may lose in a reply, in plain steps ...
ALLOWED_SHARE = 0.01  # ... and in shares of the time so far
CREDIT_SHARE = 0.018  # what a draft that seems to pay may lose, in shares of the time so far ...
CREDIT_STEPS = 60.0  # ... or of as many plain steps, where the reply is shorter yet
# Of what short replies leave each gives the next ones so many plain steps at most, since those may be of another kind; together
# they give, or owe, so many at most. How long replies are: a running mean of so many.
LEFT_STEPS, CARRIED_STEPS, LENGTHS = 1.0, 6.0, 8
# Of the reply's room counts as time already taken, at most so many tokens; and what more may be lost, in plain steps, in a reply
# that may become long enough to win them back.
LOOK_AHEAD = 128
WIN_BACK, WIN_BACK_STEPS = 100, 3.7


class Account:
    """Of one reply after another."""

    def __init__(self) -> None:
        self.spent = self._lost = 0.0  # seconds of this reply: all, and those lost against plain steps
        self._carried = 0.0  # seconds that short replies before it have left; less than 0: that they owe
        self._tokens = self._replies = 0  # of this reply; how many there were, up to LENGTHS
        self._usual_tokens = CREDIT_STEPS  # of a reply

    def begin(self, step: float) -> None:
        """A new reply. `step`: seconds of a plain step."""
        if self._tokens:
            self._replies = min(self._replies + 1, LENGTHS)
            self._usual_tokens += (self._tokens - self._usual_tokens) / self._replies
            left = self._carried + min(CREDIT_SHARE * self.spent - self._lost, LEFT_STEPS * step)
            most = CARRIED_STEPS * step
            self._carried = max(-most, min(left, most)) if self.short else 0.0
        self.spent = self._lost = 0.0
        self._tokens = 0

    @property
    def short(self) -> bool:
        """Whether replies are so short lately that they share one account."""
        return self._usual_tokens < CREDIT_STEPS

    def lasts(self, tokens: int) -> bool:
        """Whether a reply is usually longer than so many tokens."""
        return tokens < self._usual_tokens

    def take(self, seconds: float, lost: float, tokens: int) -> None:
        """Blocks of `tokens` in all took `seconds`, `lost` more than plain steps; less than 0: so much was won."""
        self.spent += seconds
        self._lost += lost
        self._tokens += tokens

    def allowance(self, step: float) -> float:
        """Seconds that a draft may lose that only might pay."""
        return ALLOWED_STEPS * step + ALLOWED_SHARE * self.spent - self._net

    def credit(self, step: float) -> float:
        """Seconds that one may lose that likely pays."""
        return CREDIT_SHARE * max(self.spent, CREDIT_STEPS * step) - self._net

    def borrowed(self, step: float, room: int) -> float:
        """Seconds that one may lose that surely pays, from the time of the `room` tokens that may follow."""
        long = room + self.spent / step >= WIN_BACK
        ahead = CREDIT_SHARE * min(room, LOOK_AHEAD) + (WIN_BACK_STEPS if long else 0.0)
        return CREDIT_SHARE * self.spent + ahead * step - self._net

    @property
    def _net(self) -> float:
        return self._lost - self._carried
