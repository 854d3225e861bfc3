"""How likely a draft token is accepted, at each position of a block: what held so far, moved by what held lately.

Replies of one kind differ little in their acceptance rate, far less than fifty tests of one of them tell; so what a pair has
shown in all its replies is the better guess, and the recent blocks move it only as far as they prove that this text is another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

GUESS_TESTS = 8.0  # how many tested tokens the first guess is worth in the rates of the long run
POSITION_TESTS = 20.0  # ... and the rate of all positions at each of them
DOUBT_TESTS = 4.0  # how many tests the doubt begins with: fewer than the guess is worth, so that it is tried
FADING = 0.999  # of its sureness that the long run keeps with every block in which nothing is tested
LONG_RUN_TESTS = 40.0  # how many tested tokens the long run is worth beside the recent ones, at most
# ... and how many it is worth where the question is whether drafts might pay at all. With few, a drafter that never pays would be
# tried for ever with all that may be lost; with any number, a pair that comes to another kind of text would hardly be.
TRIED_TESTS = 1000.0
MEMORY = 0.98  # weight that a tested token keeps with every later block: about the last 50 blocks are recent
ANOTHER_TEXT = 0.5  # weight that the tests of a reply keep in the next one, which may be of another kind
MOST = 0.99


class Estimate(NamedTuple):
    """Acceptance rates by position, and one standard deviation of them.

    Attributes:
        rates: where the tokens before it were accepted.
        doubt: of this text, which may be another than those before.
        unexplored: of all texts together. It becomes the smaller the more was tested, and grows again while nothing is.
    """

    rates: list[float]
    doubt: float
    unexplored: float


class AcceptanceRates:
    """Estimates for the positions 1 .. `positions` of a block; learns from block to block and over replies.

    Args:
        guess: acceptance rate before anything was tested.
    """

    def __init__(self, guess: float, positions: int) -> None:
        self._guess = min(max(guess, 1.0 - MOST), MOST)
        self._tested = [0.0] * positions
        self._accepted = [0.0] * positions
        self._tests = 0.0  # at all positions
        self._long_run = [self._guess] * positions
        # recent tests, acceptances, and acceptances that the long run expected of them
        self._recent = self._met = self._expected = 0.0

    def begin(self) -> None:
        """A new reply."""
        self._recent *= ANOTHER_TEXT
        self._met *= ANOTHER_TEXT
        self._expected *= ANOTHER_TEXT

    def estimate(self, idle: int = 0) -> Estimate:
        """After `idle` blocks in which nothing was tested.

        Plain steps make it forget as well, so that drafting is tried again where the long run promises a gain.
        """
        kept = MEMORY**idle
        tests = self._tests
        known = min(GUESS_TESTS + tests, LONG_RUN_TESTS) * self._long_run[0]
        change = (known + kept * self._met) / (known + kept * self._expected)
        rates = [min(change * rate, MOST) for rate in self._long_run]
        # A guess is no test: until there are some, nearly everything is possible; and what was tested long ago may be so no more.
        lasting, recent = FADING**idle, kept * self._recent
        sure = lasting * (DOUBT_TESTS + min(tests, LONG_RUN_TESTS)) + recent
        explored = lasting * (DOUBT_TESTS + min(tests, TRIED_TESTS)) + recent
        variance = rates[0] * (1.0 - rates[0])
        return Estimate(rates, math.sqrt(variance / sure), math.sqrt(variance / explored))

    def learn(self, blocks: Sequence[tuple[int, int]], idle: int) -> None:
        """After `idle` blocks without a draft, each of these tested so many draft tokens, of which the first so many stayed."""
        kept = MEMORY ** (idle + len(blocks))
        self._recent, self._met, self._expected = kept * self._recent, kept * self._met, kept * self._expected
        for tested, accepted in blocks:
            for position in range(min(tested, len(self._tested))):
                self._recent += 1.0
                self._expected += self._long_run[position]
                self._tested[position] += 1.0
                if position < accepted:
                    self._met += 1.0
                    self._accepted[position] += 1.0
        self._tests = sum(self._tested)
        everywhere = (GUESS_TESTS * self._guess + sum(self._accepted)) / (GUESS_TESTS + self._tests)
        self._long_run = [
            (POSITION_TESTS * everywhere + accepted) / (POSITION_TESTS + tested)
            for tested, accepted in zip(self._tested, self._accepted, strict=True)
        ]
