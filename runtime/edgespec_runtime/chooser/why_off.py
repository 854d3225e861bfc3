"""Why no drafts are made now, in figures that a person can check. Knows costs and rates; chooses nothing.

A draft of γ tokens pays where the tokens it is expected to give, τ, exceed what it and its pass cost in plain steps. Both sides
are said as acceptance rates: the α that would pay for it, and the α whose τ the drafter reaches here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.metrics import acceptance_rate_of


@dataclass(frozen=True)
class Off:
    """Of the draft length that comes nearest to paying.

    Attributes:
        length: its γ; 0 where the engine takes no pass of several tokens.
        cost: plain steps that a draft of so many tokens and its pass take.
        needed: the α that pays for it; None where no α does.
        has: the drafter's α, as far as it is known here.
        lost: share of the session's time that drafts have cost, where that is why there are none; else 0.
        copies: the drafter model rests, and copies from the text go on.
    """

    length: int
    cost: float
    needed: float | None
    has: float
    lost: float = 0.0
    copies: bool = False

    def __str__(self) -> str:
        return self._reason() + ("; copies from the text go on" if self.copies else "")

    def _reason(self) -> str:
        if self.length == 0:
            return "off: this engine takes one token in a pass"
        if self.lost:
            return f"off for now: drafts have cost {max(0.01, self.lost):.0%} of this session's time"
        tokens = f"{self.length} token{'s' * (self.length > 1)}"
        here = f"off: a draft of {tokens} and its pass cost {self.cost:.2f} plain steps here"
        if self.needed is None:
            return f"{here} and give {self.length + 1} tokens at most"
        return f"{here}; the drafter would need α {self.needed:.2f}, it has {self.has:.2f}"


def why_off(token_rates: Sequence[float], tokens: Sequence[float], lost: float = 0.0) -> Off:
    """What to say of a choice among γ = 0, 1, ...

    Args:
        token_rates: expected tokens a second at each γ; that of γ = 0 is plain decoding's.
        tokens: expected tokens of a block at each γ.
        lost: see `Off`.
    """
    found = []
    for length in range(1, len(tokens)):
        cost = token_rates[0] * tokens[length] / token_rates[length]
        needed, has = acceptance_rate_of(cost, length), acceptance_rate_of(tokens[length], length)
        found.append(Off(length, cost, needed, 1.0 if has is None else has, lost))
    return min(
        found, key=lambda off: 1.0 if off.needed is None else off.needed, default=Off(0, 1.0, None, 0.0)
    )
