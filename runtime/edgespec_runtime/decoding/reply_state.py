"""The text of a reply so far: where it ends, when its context shifts, and what the caches of both models hold of it.

Its methods are the parts of a block. Those that the reply's clock tells apart end with a lap of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence

from edgespec.core.errors import NoNumbers
from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.block_clock import CHOOSE, DRAFT, PREFILL, REREAD, VERIFY, BlockClock
from edgespec_runtime.decoding.drafters import Drafter, propose, window_of
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import FROM_MODEL, Schedule
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.acceptance import Draft, Rule
from edgespec_runtime.rules.sampling import TokenSource, Warp
from edgespec_runtime.rules.table import MAX_DRAFT

NOTHING = Draft()  # of a plain step: making one takes microseconds


class ReplyState:
    """The text of a reply so far, and what both caches hold of it. Arguments without a name here are those of `decode`.

    Args:
        source: what its random choices come from.

    Attributes:
        ids: prompt and reply, as far as the context shows them.
        emitted: how many of them have left the loop; what follows them is being tried.
        finish: why the reply is over: eos, length, context; '' where it is not.
        unread: the prompt, until the drafter has read it before its first draft; there may be none.
        end: length of the longest reply, prompt included.
    """

    def __init__(
        self,
        target: CachedEngine,
        drafter: Drafter | None,
        prompt: Sequence[int],
        options: DecodingOptions,
        stop: Collection[int],
        counts: RawCounts,
        source: TokenSource,
    ) -> None:
        self.target, self.drafter, self.ids, self.stop = target, drafter, list(prompt), stop
        self.how, self.source, self.counts, self.clock = Warp.of(options), source, counts, BlockClock(counts)
        self.emitted, self.finish = len(prompt), ""
        self.unread = [] if drafter is None else list(prompt)
        if drafter is not None:
            drafter.restart(prompt)
        self._window, self._limit = window_of(target, options), target.engine.context_length
        self._longest = min(target.engine.block_length - 1, MAX_DRAFT)
        self.end = len(prompt) + options.max_new_tokens
        self._shift_at = self._limit
        if self._window is None:
            self.end, self._shift_at = min(self.end, self._limit), sys.maxsize

    def prefill(self) -> None:
        """The target reads all but the last token."""
        self.target.prefill(self.ids[:-1])
        self.clock.lap(PREFILL)

    def prefill_drafter(self, part: int = PREFILL) -> None:
        """The drafter reads what is unread."""
        assert self.drafter is not None
        for _ in self.drafter.prefill_steps(self.unread):
            pass
        self.unread = []
        self.clock.lap(part)

    def is_full(self) -> bool:
        """Whether the context must shift, or the target's keys no longer fit the text."""
        length = len(self.ids)
        return length >= self._shift_at or not self.target.holds_for(length)

    def make_room(self) -> None:
        """Shift where the context is full; the target reads the text again."""
        again = False
        if self._window is not None and len(self.ids) >= self._shift_at:
            dropped = self._window.surplus(len(self.ids))
            del self.ids[self._window.keep : self._window.keep + dropped]
            self.end -= dropped
            self.source.shift(dropped)
            if self.drafter is not None:
                self.drafter.restart(self.ids)
                again, self.unread = not self.unread, list(self.ids)  # it had read what is dropped
        self.target.prefill(self.ids[:-1])
        if again:
            self.prefill_drafter(REREAD)  # behind the target, whose hidden states a head reads
        self.clock.lap(REREAD)

    def choose(self, schedule: Schedule) -> int:
        """γ of the next block, at most what there is room for, from whoever can draft it."""
        context = len(self.ids)
        left = min(self.end, self._limit) - context - 1
        room = min(left, self.target.reach(context) - context, self._longest)
        origins = self.drafter.origins(self.ids) if self.drafter else ()
        length = schedule.draft_length(context, room, origins)
        self.clock.lap(CHOOSE)
        return length

    def draft(self, length: int, how: Warp, rule: Rule, origin: int) -> Draft:
        """At most `length` tokens that may follow; nothing where nobody drafts. The arguments are those of `propose`."""
        found = NOTHING
        if self.drafter is not None:
            if self.unread and origin == FROM_MODEL:
                self.prefill_drafter()
            found = propose(self.drafter, self.ids, length, how, self.source, rule, origin)
        self.clock.lap(DRAFT)
        return found

    def verify(self, drafted: list[int], size: int) -> Logits:
        """One pass of the target over the last token and the draft, padded to `size` where there is room; logits [size, V]."""
        last, context = self.ids[-1], len(self.ids)
        if size > 1 + len(drafted):
            size = min(size, self.target.reach(context) - context + 1)
        rows = self.target.forward([last, *drafted, *[last] * (size - 1 - len(drafted))])
        self.clock.lap(VERIFY)
        return rows

    def check_numbers(self, logits: Logits, drawn: int | None) -> None:
        """Raise NoNumbers where the target's logits [V] behind what stays of a block have a NaN.

        `drawn`: the token that a rule drew from them, None for a rule that may have drawn it from the drafter's. An entry that is
        NaN has all of p (see `warp`), so the token drawn from p is that one, and no search is needed.
        """
        if math.isnan(logits[logits.argmax() if drawn is None else drawn]):
            raise NoNumbers(self.target.engine.name)

    def emit(self, new: list[int]) -> list[int]:
        """Append a block up to a stop token; returns its tokens, and sets `finish` where the reply ends."""
        for position, token in enumerate(new):
            if token in self.stop:
                del new[position + 1 :]
                self.finish = "eos"
                break
        self.ids += new
        self.emitted = len(self.ids)
        if not self.finish and self.emitted >= self.end:
            self.finish = "context" if self.end == self._limit and self._window is None else "length"
        return new

    def settle(self) -> None:
        """Both caches hold at most what was emitted, less the last token, which the next block reads."""
        self.target.rewind(len(self.ids) - 1)
        if self.drafter is not None and not self.unread:
            self.drafter.settle(len(self.ids) - 1)
