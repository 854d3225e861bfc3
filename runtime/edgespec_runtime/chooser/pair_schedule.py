"""Which schedule a pair decodes with: the draft length that was asked for, or one chosen from costs measured on this device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from edgespec_runtime.chooser.adaptive import AdaptiveSchedule
from edgespec_runtime.chooser.calibrate import QUICK
from edgespec_runtime.chooser.expected_acceptance import AcceptanceRates, acceptances_of, expected_rate
from edgespec_runtime.chooser.kept_costs import costs_of
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.options import NOBODY, DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed, Schedule
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.rules.acceptance import Rule, at_temperature

FAR_BELOW = 0.25  # of α, in the ENOUGH first tokens: with half the α, of 0.4 to 0.6, a session in ten or fewer seems so low
ENOUGH = 32
MOST_KEPT = 64  # a server's clients may each choose another temperature, thousands of them


How = tuple[str, int, float, bool]
"""What a chosen draft length depends on: who drafts, the longest draft, the temperature, whether the rule mixes."""


def _how(options: DecodingOptions) -> How | None:
    """None where no length is chosen: it is given, nobody drafts, or the rule has a loop and draft lengths of its own."""
    rule = options.acceptance_rule()
    if options.draft_length is not None or options.who == NOBODY or not isinstance(rule, Rule):
        return None
    mixes = at_temperature(rule, options.temperature).mixes
    return options.who, options.max_draft_length, options.temperature, mixes


class Schedules:
    """The schedules of a loaded pair, one for each choice of who drafts and how; what one learnt stays from reply to reply.

    Of more than MOST_KEPT the one that was asked for longest ago is forgotten.

    Costs that were measured earlier on this device serve while a plain step takes about what they say; else they are measured
    when first needed, in a second or two, and `note` is told so. Both empty the caches.
    """

    def __init__(self, pair: Pair, note: Callable[[str], None]) -> None:
        self._pair, self._note = pair, note
        self._made: dict[How, AdaptiveSchedule] = {}

    def of(self, options: DecodingOptions) -> Schedule:
        how = _how(options)
        if how is None:
            return Fixed(options.draft_length or 0)
        made = self._made.pop(how, None)
        if made is None:
            _, most, temperature, mixes = how
            expected = expected_rate(self._pair.manifest.metrics, temperature)
            made = AdaptiveSchedule(self._costs, expected, most, mixes=mixes)
        self._made[how] = made  # the newest is the last
        if len(self._made) > MOST_KEPT:
            del self._made[next(iter(self._made))]
        return made

    def why_no_drafts(self, options: DecodingOptions) -> str | None:
        """Why replies with these options have no drafts now; None where they have some, and before the first such reply."""
        if options.who == NOBODY:
            return "no drafter was loaded" if self._pair.draft is None else "drafts are off"
        how = _how(options)
        made = None if how is None else self._made.get(how)
        if how is None or made is None or made.off is None:
            return None
        return made.off + self._suspicion(made.model, how[2])

    def _suspicion(self, seen: AcceptanceRates, temperature: float) -> str:
        """What to do where the drafter's α is far below the one that the bundle was measured with; '' elsewhere."""
        measured = expected_rate(self._pair.manifest.metrics, temperature)
        known = bool(acceptances_of(self._pair.manifest.metrics))
        if not known or seen.tried < ENOUGH or seen.stayed >= FAR_BELOW * measured * seen.tried:
            return ""
        return (
            f"; the bundle was measured with α {measured:.2f}, so these prompts are of another kind or its files are broken: "
            "`edgespec verify` tells"
        )

    @cached_property
    def _costs(self) -> Costs:
        begin = f"(measuring this machine for {QUICK.seconds:g} s; edgespec doctor measures thoroughly)"
        return costs_of(self._pair, QUICK, self._note, begin=begin)[0]
