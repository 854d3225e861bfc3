"""How near the best fixed draft length a schedule can come that must not be slower than plain decoding in any reply.

A draft of which nothing is accepted is lost time, and a reply may lose no more than a share of its own. After a few failures at
its beginning the best schedule decodes plainly to its end, however well drafts would do from there on. So never slower and nearly
the best pull against each other: in short replies, with dear drafts or middling acceptance, nobody keeps both. This finds by
dynamic programming, over the tokens left and what may be lost yet, what the best schedule reaches that knows the reply's length,
all costs and all rates, tokens being accepted independently of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# What may be lost is counted in cells, so many to a plain step (rounded so that it is never more), up to so many steps.
CELLS, SLACK = 1000, 20
ROUNDING = 1e-6


def least_seconds(
    rates: Sequence[float], blocks: Sequence[float], tokens: int, share: float, sure: int | None = None
) -> tuple[list[float], float]:
    """Expected plain steps of a reply: (with one draft length throughout, for each; at best, with any that keep the promise).

    Args:
        rates: acceptance by position of a draft.
        blocks: plain steps that a block takes, by its draft length; `blocks[0]` is 1.
        tokens: of the reply.
        share: of the reply's plain steps, that it may lose at most.
        sure: tokens that the reply is known to have; it may end with every token after them, and keeps the promise then too.
            Default: it is known to have all.
    """
    known = tokens if sure is None else min(sure, tokens)
    slack = np.arange(SLACK * CELLS)  # what may be lost yet
    fixed = [[0.0] for _ in blocks]
    won = [np.zeros(len(slack))]  # at most, by that, for every number of tokens left
    for left in range(1, tokens + 1):
        made_yet = max(tokens - left, known)

        def earned(count: int, left: int = left, made_yet: int = made_yet) -> float:
            """Plain steps that may be lost more after `count` tokens."""
            return share * (max(tokens - left + count, known) - made_yet)

        best = won[-1][_moved(slack, earned(1))]
        for length, expected in enumerate(fixed):
            made = min(length, left - 1)
            reach = np.cumprod([1.0, *rates[:made]])
            chances = reach - np.append(reach[1:], 0.0)  # of one token, two, ...
            seconds = float(chances @ [expected[left - count] for count in range(1, made + 2)])
            expected.append(blocks[made] + seconds)
            if not 0 < length < left:
                continue
            may = slack >= (blocks[length] - 1.0 - earned(1)) * CELLS - ROUNDING
            total = np.zeros(len(slack))
            for count, chance in enumerate(chances, 1):
                gain = count - blocks[length]
                later = _moved(slack, gain + earned(count))
                total += chance * (gain + won[left - count][later])
            best = np.where(may & (total > best), total, best)
        won.append(best)
    allowed = min(int(share * known * CELLS + ROUNDING), len(slack) - 1)
    return [expected[tokens] for expected in fixed], tokens - float(won[tokens][allowed])


def _moved(slack: np.ndarray, steps: float) -> np.ndarray:
    """Cells that are so many plain steps on, as far as there are some."""
    return np.clip(slack + int(np.floor(steps * CELLS + ROUNDING)), 0, len(slack) - 1)
