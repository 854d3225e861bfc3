"""Which schedule a pair decodes with: the draft length that was asked for, or one chosen from costs measured on this device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec_runtime.adaptive import Adaptive
from edgespec_runtime.bundle import Pair
from edgespec_runtime.calibrate import QUICK, costs_of, load_costs, step_seconds
from edgespec_runtime.decoding import NOBODY, DecodingOptions
from edgespec_runtime.evaluated import expected_rate
from edgespec_runtime.pass_costs import Costs
from edgespec_runtime.schedule import Fixed, Schedule

STALE = 1.5  # times faster or slower: the machine was busy when the costs were kept, or is now


class Schedules:
    """The schedules of a loaded pair, one for each choice of who drafts and how; what one learnt stays from reply to reply.

    Costs that were measured earlier on this device serve while a plain step takes about what they say; else they are measured
    when first needed, in a second or two, and `note` is told so. Both empty the caches.
    """

    def __init__(self, pair: Pair, note: Callable[[str], None]) -> None:
        self._pair, self._note = pair, note
        self._costs: Costs | None = None
        self._made: dict[tuple[Any, ...], Schedule] = {}

    def of(self, options: DecodingOptions) -> Schedule:
        how = (options.drafter, options.draft_length, options.max_draft_length, options.temperature)
        if how not in self._made:
            self._made[how] = self._make(options)
        return self._made[how]

    def _make(self, options: DecodingOptions) -> Schedule:
        if options.draft_length is not None or options.drafter == NOBODY:
            return Fixed(options.draft_length or 0)
        if self._costs is None:
            self._costs = self._costs_now()
        expected = expected_rate(self._pair.manifest.metrics, options.temperature)
        return Adaptive(self._costs, expected, options.max_draft_length)

    def _costs_now(self) -> Costs:
        """Kept costs where they still hold, else measured. A machine that is slower than it was may be so for a moment only."""
        kept, why, slower = load_costs(self._pair, self._note), "", 0.0
        if kept is not None:
            slower = step_seconds(self._pair.target) / kept.verify(1, 1)
            if 1 / STALE < slower < STALE:
                return kept
            why = f"a plain step takes {slower:.2g} times what the kept costs say: "
        self._note(
            f"({why}measuring this machine for {QUICK.seconds:g} s; edgespec doctor measures thoroughly)"
        )
        costs, _ = costs_of(self._pair, QUICK, self._note, fresh=True, keep=slower < 1)
        return costs
