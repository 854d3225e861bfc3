"""Which schedule a pair decodes with: the draft length that was asked for, or one chosen from costs measured on this device."""

from __future__ import annotations

from collections.abc import Callable

from edgespec_runtime.adaptive import Adaptive
from edgespec_runtime.bundle import Pair
from edgespec_runtime.calibrate import QUICK, costs_of, load_costs
from edgespec_runtime.decoding import NOBODY, DecodingOptions
from edgespec_runtime.evaluated import expected_rate
from edgespec_runtime.schedule import Fixed, Schedule


def schedule_of(pair: Pair, options: DecodingOptions, note: Callable[[str], None]) -> Schedule:
    """Costs that were measured earlier serve; else they are measured now, in a second or two, and `note` is told so."""
    if options.draft_length is not None or options.drafter == NOBODY:
        return Fixed(options.draft_length or 0)
    if load_costs(pair, note) is None:
        note(f"(measuring this machine for {QUICK.seconds:g} s; edgespec doctor measures more thoroughly)")
    costs, _ = costs_of(pair, QUICK, note)
    return Adaptive(
        costs, expected_rate(pair.manifest.metrics, options.temperature), options.max_draft_length
    )
