"""The acceptance rate α to expect: as the bundle's evaluation measured it, then as drafts are accepted here. Knows no costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from edgespec.core.table import sampling_words

UNKNOWN = 0.6  # a distilled drafter's on an everyday reply; a first guess that decoding soon replaces
DECAY = 0.98  # of all counts, per block: about the last 50 blocks count, so a new topic shows after some sentences
PRIOR = 8.0  # offered tokens that the first guess is worth: one lucky or unlucky draft must not overrule it


@dataclass(frozen=True)
class Acceptance:
    """α as the bundle's evaluation measured it, or as the user gave it. `where`: greedy, T = 1 ..."""

    where: str
    rate: float
    temperature: float = field(default=0.0, compare=False)


def acceptances_of(metrics: Mapping[str, Any]) -> tuple[Acceptance, ...]:
    """α of the distilled drafter (else the last one listed) for each sampling, the mean over draft lengths; () where unknown.

    `metrics` is a manifest's, which may come from a stranger: what is not of the exporter's form is passed over.
    """
    settings = metrics.get("settings")
    found: dict[str, dict[tuple[str, float], list[float]]] = {}
    for setting in settings if isinstance(settings, list) else []:
        try:
            rate = float(setting["metrics"]["alpha_empirical"][0])
            temperature, top_p = float(setting["temperature"]), float(setting["top_p"])
            drafter = str(setting["drafter"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            continue
        if 0.0 <= rate <= 1.0:
            where = sampling_words(temperature, top_p)
            found.setdefault(drafter, {}).setdefault((where, temperature), []).append(rate)
    if not found:
        return ()
    rates = found.get("distilled") or found[list(found)[-1]]
    return tuple(
        Acceptance(where, sum(values) / len(values), temperature)
        for (where, temperature), values in rates.items()
    )


def expected_rate(metrics: Mapping[str, Any], temperature: float) -> float:
    """α at the evaluated temperature nearest to this one."""
    known = acceptances_of(metrics)
    return min(known, key=lambda one: abs(one.temperature - temperature)).rate if known else UNKNOWN


class AcceptanceRates:
    """α by position, from decayed counts: a_i = accepted_i / offered_i, where the tokens before token i stayed.

    Args:
        first_guess: in [0, 1].
        longest: positions, the tokens of the longest draft.

    Attributes:
        tried, stayed: first tokens of all drafts so far, and those of them that the target kept.
    """

    def __init__(self, first_guess: float, longest: int) -> None:
        self._first_guess = first_guess
        self.tried = self.stayed = 0
        self._accepted, self._offered = [0.0] * longest, [0.0] * longest

    def learn(self, offered: int, accepted: int) -> None:
        """The target looked at the first `offered` tokens of a draft, and the first `accepted` of them stayed."""
        self.fade(1)
        self.tried, self.stayed = self.tried + (offered > 0), self.stayed + (accepted > 0)
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

    def tokens(self) -> list[float]:
        """Expected tokens of a block for γ = 0, 1, ... longest: 1 + Σ_{j <= γ} Π_{i <= j} a_i."""
        return list(accumulate(accumulate(self.estimate(), mul, initial=1.0)))
