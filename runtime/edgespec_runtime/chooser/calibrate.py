"""Measure on this device what passes of every size cost.

Every size takes its turn in every round, so that a slow moment of the machine hits all of them; medians are kept. A turn is some
passes one after another, as decoding makes them, of which the last counts: the first ones after another size wait for threads,
caches and buffers. Drafter steps are timed where the loop makes them, after a pass of the target that took their place in the
processor's caches. Knows engines; no rules, no text.
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
from edgespec_runtime.engines.session import CachedEngine

LEAST_PASS = 4  # passes of fewer tokens are measured however little time there is
DRAFT_STEPS = 3
SETTLED = 5e-3  # seconds of passes of one size, after which the next ones take what they take from then on
PREFILL_SHARE = 0.25  # of the time may go into filling the caches


@dataclass(frozen=True)
class CalibrateOptions:
    """`seconds` is kept to where one round over all sizes fits into it."""

    seconds: float = knob(20.0, "time to spend on measuring, about", at_least=0.0)
    contexts: tuple[int, ...] = knob(
        (32, 256, 1024), "context lengths to measure at, in tokens, as far as the models go", at_least=1
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
    try:
        longest = min(longest, room - 1, *(model.engine.block_length for model in models))
        return _Measurement(target, draft, how.seconds, longest, room).run(how.contexts)
    finally:
        for model in models:
            model.rewind(0)


class _Measurement:
    def __init__(
        self, target: CachedEngine, draft: CachedEngine | None, seconds: float, longest: int, room: int
    ) -> None:
        self._start, self._seconds = perf_counter(), seconds
        self._target, self._draft, self._longest = target, draft, longest
        self._models = [model for model in (target, draft) if model is not None]
        self._generator = np.random.default_rng(0)
        vocabulary = min(model.engine.vocab_size for model in self._models)
        self._ids: list[int] = self._generator.integers(0, vocabulary, room).tolist()
        self._verify: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._step: defaultdict[int, list[float]] = defaultdict(list)

    def run(self, wanted: Sequence[int]) -> Costs:
        contexts = self._affordable(wanted)
        for model in self._models:
            model.prefill(self._ids[: contexts[-1]])
        for left, context in reversed([*enumerate(contexts, 1)]):  # going down costs nothing
            now = perf_counter()
            end = now + (self._seconds - (now - self._start)) / left
            self._round(context)
            while perf_counter() < end:
                self._round(context)
        sizes = range(1, self._longest + 1)
        verify = tuple(tuple(_middle(self._verify[at, size]) for size in sizes) for at in contexts)
        steps = (_middle(self._step[at]) if self._draft is not None else 0.0 for at in contexts)
        return Costs(contexts, verify, tuple(steps))

    def _affordable(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Warm up with passes of 1, 2, 4 ... tokens, and see for which sizes and contexts the time suffices.

        A round of passes of up to 2n tokens takes about 2n times as long as one of n: all of them where the weights decide what a
        pass takes, on average where the tokens do. It may take half of the time.
        """
        size = 1
        while True:
            for _ in range(2):  # the second one counts: the first may read the weights from the disk
                seconds = self._time(self._target, self._ids[:size], 0)
            if 2 * size > self._longest:
                break
            if size >= LEAST_PASS and 2 * size * seconds > self._seconds / 2:
                self._longest = size
                break
            size *= 2
        affordable = int(PREFILL_SHARE * self._seconds * size / seconds)
        limit = len(self._ids) - self._longest
        fitting = sorted({min(context, limit) for context in wanted})
        few = max(1, min(fitting[0], affordable))
        return tuple(context for context in fitting if context <= affordable) or (few,)

    def _round(self, context: int) -> None:
        """Every size in its turn, in random order."""
        for model in self._models:
            model.rewind(context)
        for size in self._generator.permutation(range(1, self._longest + 1)).tolist():
            self._verify[context, size].append(self._settled(context, size))

    def _settled(self, context: int, size: int) -> float:
        """Seconds of the last of some passes of `size`; those of several tokens follow a few steps of the drafter each."""
        after = self._ids[context:]
        spent = seconds = 0.0
        while spent < SETTLED:
            if self._draft is not None and (size > 1 or self._longest == 1):
                self._draft_steps(self._draft, context, after)
            seconds = self._time(self._target, after[:size], context)
            spent += seconds
        return seconds

    def _draft_steps(self, draft: CachedEngine, context: int, after: list[int]) -> None:
        count = min(DRAFT_STEPS, len(after))
        start = perf_counter()
        for token in after[:count]:
            draft.forward([token])
        self._step[context].append((perf_counter() - start) / count)
        draft.rewind(context)

    @staticmethod
    def _time(model: CachedEngine, tokens: Sequence[int], context: int) -> float:
        start = perf_counter()
        model.forward(tokens)
        seconds = perf_counter() - start
        model.rewind(context)
        return seconds


def _middle(times: list[float]) -> float:
    """The first of a shape also allocates."""
    return median(times[1:] if len(times) > 3 else times)
