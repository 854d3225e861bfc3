"""What a bundle's evaluation says of its drafter: the acceptance rate α to expect before anything was decoded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = 0.6  # a distilled drafter's on an everyday reply; a first guess that decoding soon replaces


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
            where = "greedy" if temperature == 0 else f"T = {temperature:g}"
            where += f", top-p {top_p:g}" if temperature and top_p < 1 else ""
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
