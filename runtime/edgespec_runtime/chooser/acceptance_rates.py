"""How likely the target accepts the draft token at each position: decayed counts. Knows no costs and no tokens.

a_i = accepted_i / offered_i,   the probability that token i of a draft stays where those before it stayed
"""

from __future__ import annotations

DECAY = 0.98  # of all counts, per block: about the last 50 blocks count, so a new topic shows after some sentences
PRIOR = 8.0  # offered tokens that the first guess is worth: one lucky or unlucky draft must not overrule it


class AcceptanceRates:
    """Args:
    first_guess: acceptance rate of the bundle's evaluation, in [0, 1].
    longest: positions, the tokens of the longest draft.
    """

    def __init__(self, first_guess: float, longest: int) -> None:
        self._first_guess = first_guess
        self._accepted, self._offered = [0.0] * longest, [0.0] * longest

    def learn(self, offered: int, accepted: int) -> None:
        """The target looked at the first `offered` tokens of a draft, and the first `accepted` of them stayed."""
        self.fade(1)
        # Behind the first rejection nothing was tested.
        for position in range(min(offered, accepted + 1, len(self._offered))):
            self._offered[position] += 1.0
            self._accepted[position] += position < accepted

    def fade(self, blocks: int) -> None:
        """So many blocks go by: what was counted before them tells less of what comes."""
        kept = DECAY**blocks
        self._accepted = [kept * count for count in self._accepted]
        self._offered = [kept * count for count in self._offered]

    def estimate(self) -> list[float]:
        """a_1 ... a_longest. The prior of a position is the estimate of the one before it: deep positions are seldom tested."""
        rates, prior = [], self._first_guess
        for accepted, offered in zip(self._accepted, self._offered, strict=True):
            prior = (accepted + PRIOR * prior) / (offered + PRIOR)
            rates.append(prior)
        return rates
