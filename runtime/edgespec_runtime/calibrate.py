"""Measure on this device what passes of every size cost, and how far a block's logits are from those of single steps.

Every size takes its turn in every round, so that a slow moment of the machine hits all of them; medians are kept. A drafter's
steps are timed where the loop makes them, after a pass of the target that took its place in the processor's caches, and plain
steps one after another, as plain decoding makes them. Knows engines; no rules, no text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InputError
from edgespec.metrics import median
from edgespec.options import knob
from edgespec_runtime.bundle import Pair
from edgespec_runtime.device import engine_version, free_share, this_device
from edgespec_runtime.pass_costs import LONGEST_PASS, Costs, Subject, read_costs, write_costs
from edgespec_runtime.session import CachedEngine

LEAST_PASS = 4  # passes of fewer tokens are measured however little time there is
DRAFT_STEPS = 3
PLAIN_STEPS = 2
MOST_SWEEPS = 3
BUSY = 0.85  # of the processors' time: with less of it, what is measured is not kept
# Kept costs hold while the middle one of a few plain steps is less than this many times faster or slower: else it was busy
# then, or is now.
STALE, PROBES = 1.5, 3
PREFILL_SHARE = 0.25  # of the time may go into filling the caches


@dataclass(frozen=True)
class CalibrateOptions:
    """`seconds` is kept to where one round over all sizes fits into it."""

    seconds: float = knob(20.0, "time to spend on measuring, about", at_least=0.0)
    contexts: tuple[int, ...] = knob(
        (32, 256, 1024), "context lengths to measure at, in tokens, as far as the models go", at_least=1
    )


QUICK = CalibrateOptions(seconds=1.5, contexts=(256,))  # before a chat: people wait for it


@dataclass(frozen=True)
class Difference:
    """Logits of blocks against those of single steps: the largest difference, and argmaxes that changed among `positions`."""

    largest: float
    flips: int
    positions: int

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest:.1g}, {self.flips} of {self.positions} argmaxes changed"
        )


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
    room = min(model.engine.context_length for model in models)
    if room < 2:
        raise InputError(
            f"{target.engine.name}: a context of {room} token has no room for a pass behind it; load it with a longer --context"
        )
    try:
        return _Measurement(target, draft, how, room, longest).run()
    finally:
        for model in models:
            model.rewind(0)


class _Measurement:
    def __init__(
        self, target: CachedEngine, draft: CachedEngine | None, how: CalibrateOptions, room: int, longest: int
    ) -> None:
        self._start = perf_counter()
        self._target, self._draft = target, draft
        self._models = [model for model in (target, draft) if model is not None]
        self._seconds, self._room = how.seconds, room
        self._generator = np.random.default_rng(0)
        vocabulary = min(model.engine.vocab_size for model in self._models)
        self._ids: list[int] = self._generator.integers(0, vocabulary, room).tolist()
        block = min(model.engine.block_length for model in self._models)
        self._longest = min(longest, block, room - 1)
        self._wanted = how.contexts
        self._verify: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._step: defaultdict[int, list[float]] = defaultdict(list)
        self._read2: defaultdict[int, list[float]] = defaultdict(list)

    def run(self) -> Costs:
        self._ramp()
        for sweep in range(self._sweeps):
            for model in self._models:
                model.prefill(self._ids[: self._contexts[-1]])
            for place, context in enumerate(reversed(self._contexts)):  # going down costs nothing
                left = self._seconds - (perf_counter() - self._start)
                turns = (self._sweeps - sweep) * len(self._contexts) - place
                end = perf_counter() + left / turns
                self._round(context)
                while perf_counter() < end:
                    self._round(context)
        return self._costs()

    def _ramp(self) -> None:
        """Warm up with passes of 1, 2, 4 ... tokens, and see what the time suffices for."""
        times: dict[int, float] = {}
        size = 1
        for model in self._models:
            model.rewind(0)
        while size <= self._longest:
            for _ in range(2):  # the second one counts: the first may read the weights from the disk
                times[size] = self._time(self._target, self._ids[:size], 0)
            if self._draft is not None:
                self._time(self._draft, self._ids[:1], 0)
            if size >= LEAST_PASS and perf_counter() - self._start > self._seconds / 8:
                break
            size *= 2
        sizes = sorted(times)
        while len(sizes) > 1 and sizes[-1] > LEAST_PASS:
            passes = range(1, min(self._longest, sizes[-1]) + 1)
            if 2 * float(np.interp(passes, sizes, [times[size] for size in sizes]).sum()) < self._seconds:
                break
            sizes.pop()
        slow = sizes[-1] * 2 <= self._longest
        self._longest = sizes[-1] if slow else self._longest
        token = times[sizes[-1]] / sizes[-1]
        affordable = int(PREFILL_SHARE * self._seconds / token)
        limit = self._room - self._longest
        fitting = sorted({min(context, limit) for context in self._wanted})
        self._contexts = [context for context in fitting if context <= affordable] or [
            max(1, min(fitting[0], affordable))
        ]
        self._sweeps = max(1, min(MOST_SWEEPS, affordable // self._contexts[-1]))

    def _round(self, context: int) -> None:
        """Plain steps, then every longer pass once, in random order, each after a few steps of the drafter."""
        for model in self._models:
            model.rewind(context)
        after = self._ids[context:]
        target = self._target
        self._time(target, after[:1], context)
        for _ in range(PLAIN_STEPS):
            self._verify[(context, 1)].append(self._time(target, after[:1], context))
        sizes = self._generator.permutation(np.arange(2, self._longest + 1)).tolist()
        for turn, size in enumerate(sizes or [1]):
            self._draft_steps(context, after, reads_two=bool(turn % 2))
            seconds = self._time(target, after[:size], context)
            if size > 1:
                self._verify[(context, size)].append(seconds)

    def _draft_steps(self, context: int, after: list[int], *, reads_two: bool) -> None:
        draft = self._draft
        if draft is None:
            return
        if reads_two:
            self._read2[context].append(self._time(draft, after[:2], context))
            return
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

    def _costs(self) -> Costs:
        def middle(times: list[float]) -> float:
            return median(times[1:] if len(times) > 3 else times)  # the first of a shape also allocates

        contexts = self._contexts
        verify = tuple(
            tuple(middle(self._verify[context, size]) for size in range(1, self._longest + 1))
            for context in contexts
        )
        if self._draft is None:
            return Costs(tuple(contexts), verify, (0.0,) * len(contexts))
        read2 = tuple(middle(self._read2[context]) for context in contexts) if self._read2 else None
        return Costs(
            tuple(contexts), verify, tuple(middle(self._step[context]) for context in contexts), read2
        )


def step_seconds(target: CachedEngine) -> float:
    """Seconds of a plain step now, after the first few tokens of a context: the middle one of three. The cache is empty after.

    Raises InputError where the context has no room for two tokens.
    """
    try:
        target.rewind(0)
        target.forward([0])  # reads the weights from the disk, the first time
        times = []
        for _ in range(PROBES):
            start = perf_counter()
            target.forward([0])
            times.append(perf_counter() - start)
            target.rewind(1)
        return median(times)
    finally:
        target.rewind(0)


def block_difference(
    target: CachedEngine,
    prompts: Sequence[Sequence[int]],
    positions: int,
    sizes: Sequence[int] = (2, 4, 5, 8),
) -> Difference:
    """Feed prompts in blocks of each size and in single steps, `positions` tokens each way in all; the cache is empty after.

    Another processor has other kernels, so what was measured where the bundle was made need not hold here.
    """
    largest, flips, compared = 0.0, 0, 0
    left = positions
    try:
        for prompt in prompts:
            ids = prompt[: min(left, target.engine.context_length)]
            left -= len(ids)
            if not ids:
                continue
            single = _fed(target, ids, 1)
            for size in sizes:
                block = _fed(target, ids, size)
                largest = max(largest, float(np.abs(block - single).max()))
                flips += int((block.argmax(axis=1) != single.argmax(axis=1)).sum())
                compared += len(ids)
    finally:
        target.rewind(0)
    return Difference(largest, flips, compared)


def _fed(target: CachedEngine, ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """Logits [n, V] of `ids` fed `size` at a time from an empty cache."""
    target.rewind(0)
    size = min(size, target.engine.block_length)
    return np.concatenate(
        [np.array(target.forward(ids[start : start + size])) for start in range(0, len(ids), size)]
    )


def subject_of(pair: Pair) -> Subject:
    """What measurements of a loaded pair are measurements of."""
    manifest = pair.manifest
    roles = ("target",) if pair.draft is None else ("target", "drafter")
    models: dict[str, str] = {}
    for role in roles:
        model = getattr(manifest, role)
        fast = pair.fast_graph or role == "drafter"  # a drafter runs from its fast graph in either mode
        files = manifest.files_of(role, pair.engine, pair.precision, fast=fast)
        models |= {name: file.sha256 for name, file in files.items()}
        if model.vocabulary is not None:
            models[model.vocabulary] = manifest.files[model.vocabulary].sha256
    return Subject(
        models=models,
        engine=pair.engine,
        engine_version=engine_version(pair.engine),
        precision=pair.precision,
        threads=pair.threads,
        flash_attention=pair.flash_attention,
        context_length=pair.target.engine.context_length,
    )


def load_costs(pair: Pair, note: Callable[[str], None], *, at_least_seconds: float = 0.0) -> Costs | None:
    """The costs of a pair that were measured on this device and kept; None where there are none."""
    return read_costs(subject_of(pair), this_device(), note, at_least_seconds=at_least_seconds)


def store_costs(pair: Pair, costs: Costs, seconds: float) -> None:
    """Keep the costs of a pair for the next time."""
    models = {"target": pair.manifest.target.shape, "drafter": pair.manifest.drafter.shape}
    write_costs(subject_of(pair), this_device(), costs, seconds, models)


def costs_of(
    pair: Pair, how: CalibrateOptions, note: Callable[[str], None], *, fresh: bool = False
) -> tuple[Costs, bool]:
    """(costs of a pair, whether they were kept from an earlier time). Measured, and then kept, where none are or `fresh` is set.

    Measured as well where a plain step is now STALE times faster or slower than the kept costs say; slower ones are then not
    kept, since that may pass. What was measured while other programs held the processors is not kept either, and a cache folder
    that cannot be written to is no reason to stop: `note` is told. The caches are empty after.
    """
    kept, slower = None if fresh else load_costs(pair, note, at_least_seconds=how.seconds), 1.0
    if kept is not None:
        slower = step_seconds(pair.target) / kept.verify(1, 1)
        if 1 / STALE < slower < STALE:
            return kept, True
        note(f"a plain step takes {slower:.2g} times what the kept costs say, so they are measured again")
    share = free_share(pair.threads)
    costs = calibrate(pair.target, pair.draft, how)
    share = min(free_share(pair.threads), share)
    if share < BUSY:
        note(
            f"other programs hold {1 - share:.0%} of the processors, so these costs are wrong and are not kept; "
            "close them and measure again"
        )
        return costs, False
    if slower > STALE:
        return costs, False
    try:
        store_costs(pair, costs, how.seconds)
    except (InputError, OSError) as error:
        note(f"the measured costs are not kept: {error}")
    return costs, False
