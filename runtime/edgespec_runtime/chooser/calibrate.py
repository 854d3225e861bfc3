"""Measure on this device what passes of every size cost.

A turn of a size is some passes one after another, as decoding makes them. Only the last one counts: the first ones after another
size wait for threads, caches and buffers. In every round each size has one turn, in random order, so that a slow moment of the
machine hits all of them; medians are kept. Drafter steps are timed where the loop makes them, after a pass of the target that
took their place in the caches. Knows engines; no rules, no text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.metrics import median
from edgespec.core.options import knob
from edgespec_runtime.chooser.pass_costs import LONGEST_PASS, Costs
from edgespec_runtime.engines.cached_engine import CachedEngine

# passes of up to so many tokens are measured however little time there is: enough for short drafts
LEAST_PASS = 4
DRAFT_STEPS = 3  # drafter steps between two passes, as in a short draft
SETTLED = 5e-3  # seconds, and at least one pass, before a pass counts: threads that sleep wake up within milliseconds
SHARE = 0.25  # of the time may go into the first turn of every size, and as much into filling the caches: half is left


@dataclass(frozen=True)
class CalibrateOptions:
    """`seconds` is kept to where one round over all sizes takes at most a quarter of it."""

    seconds: float = knob(20.0, "time to spend on measuring, about", at_least=0.0)
    contexts: tuple[int, ...] = knob(
        (32, 256, 1024), "context lengths to measure at, in tokens, as far as the context goes", at_least=1
    )


QUICK = CalibrateOptions(seconds=1.5, contexts=(256,))  # before a chat: people wait for it


def calibrate(
    target: CachedEngine,
    draft: CachedEngine | None,
    how: CalibrateOptions = CalibrateOptions(),
    longest: int = LONGEST_PASS,
) -> Costs:
    """Median seconds of target passes of 1 to `longest` tokens and of drafter steps, at each context the models have room for.

    Without a drafter its steps cost 0. A target so slow that the time does not suffice gets shorter contexts and passes. Both
    caches are empty before and after, also where a pass fails. Raises InputError where the context has no room for two tokens.
    """
    models = [model for model in (target, draft) if model is not None]
    room = min(model.reach(0) for model in models)
    if room < 2:
        raise InputError(
            f"{target.engine.name}: a context of {room} token has no room for a pass behind it; load it with a longer --context"
        )
    longest = min(longest, room - 1, *(model.engine.block_length for model in models))
    try:
        return _Measurement(target, draft, longest, room).run(how)
    finally:
        for model in models:
            model.rewind(0)


class _Measurement:
    def __init__(self, target: CachedEngine, draft: CachedEngine | None, longest: int, room: int) -> None:
        self._target, self._draft, self._longest = target, draft, longest
        self._models = [model for model in (target, draft) if model is not None]
        self._random = np.random.default_rng(0)
        vocabulary = min(model.engine.vocab_size for model in self._models)
        self._ids: list[int] = self._random.integers(0, vocabulary, room).tolist()
        self._verify: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._step: defaultdict[int, list[float]] = defaultdict(list)

    def run(self, how: CalibrateOptions) -> Costs:
        for model in self._models:
            model.rewind(0)
            self._timed(model, [self._ids[:1]], 0)  # may read the weights from the disk
        start = perf_counter()
        self._first_turns(start + SHARE * how.seconds)
        contexts = self._fill(how.contexts, perf_counter() + SHARE * how.seconds)
        for left, context in reversed([*enumerate(contexts, 1)]):  # going down costs nothing
            now = perf_counter()
            self._rounds(context, now + (start + how.seconds - now) / left)
        sizes = range(1, self._longest + 1)
        verify = tuple(tuple(median(self._verify[at, size]) for size in sizes) for at in contexts)
        steps = (median(self._step[at]) if self._draft is not None else 0.0 for at in contexts)
        return Costs(contexts, verify, tuple(steps))

    def _first_turns(self, end: float) -> None:
        """One turn of every size, which allocates its buffers; of longer ones than fit, none is measured."""
        for size in range(1, self._longest + 1):
            self._turn(size, 0)
            if size >= LEAST_PASS and perf_counter() >= end:
                self._longest = size
                break

    def _fill(self, wanted: Sequence[int], end: float) -> tuple[int, ...]:
        """Read tokens into the caches while there is time; the contexts that were reached."""
        limit, filled = len(self._ids) - self._longest, 0
        fitting = sorted({min(context, limit) for context in wanted})
        while filled == 0 or (filled < fitting[-1] and perf_counter() < end):
            piece = self._ids[filled : min(filled + self._longest, fitting[-1])]
            for model in self._models:
                model.forward(piece)
            filled += len(piece)
        return tuple(context for context in fitting if context <= filled) or (filled,)

    def _rounds(self, context: int, end: float) -> None:
        """At least one turn of every size."""
        for model in self._models:
            model.rewind(context)
        while True:
            for size in self._random.permutation(range(1, self._longest + 1)).tolist():
                self._turn(size, context)
            if perf_counter() >= end:
                break

    def _turn(self, size: int, context: int) -> None:
        """Passes of `size` until one counts; those of several tokens follow a few steps of the drafter each."""
        after = self._ids[context:]
        steps = [[token] for token in after[:DRAFT_STEPS]]
        drafter = self._draft if size > 1 or self._longest == 1 else None
        start, counts = perf_counter(), False
        while not counts:
            counts = perf_counter() - start >= SETTLED
            drafting = self._timed(drafter, steps, context) if drafter is not None else 0.0
            verifying = self._timed(self._target, [after[:size]], context)
        self._verify[context, size].append(verifying)
        if drafter is not None:
            self._step[context].append(drafting / len(steps))

    @staticmethod
    def _timed(model: CachedEngine, passes: Sequence[Sequence[int]], context: int) -> float:
        start = perf_counter()
        for tokens in passes:
            model.forward(tokens)
        seconds = perf_counter() - start
        model.rewind(context)
        return seconds
