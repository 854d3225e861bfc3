"""Speed beside the raw counts: passes timed alone, what a plain step costs, the metrics of one run in a form to print or dump."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, TypeVar

from edgespec.core.metrics import RawCounts, mbsu, median
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.sampling import Uniforms, draw

STEPS = 5
MAX_SECONDS = 0.5

Rival = TypeVar("Rival")


def shuffled(rivals: Sequence[Rival], turn: int) -> list[Rival]:
    """The order in which they run in one turn: the same whenever it is asked for, and another one in every turn.

    Whoever runs before leaves caches and waiting threads behind, so nobody may always follow the same one.
    """
    return random.Random(turn).sample(rivals, len(rivals))


class TimedEngine(CachedEngine):
    """One whose passes are timed apart from all else: 0.4 µs a pass.

    Attributes:
        seconds: spent in `forward` so far.
    """

    seconds = 0.0

    def forward(self, tokens: Sequence[int], of: int | None = None) -> Logits:
        start = perf_counter()
        logits = super().forward(tokens, of)
        self.seconds += perf_counter() - start
        return logits


def plain_step_seconds(target: CachedEngine, options: DecodingOptions) -> float | None:
    """Median seconds of one autoregressive step (forward and sampling) where the target's cache ends; the cache stays as it was.

    At most `STEPS` steps or about half a second. None where the context has no room for a step or the cache is empty.
    """
    length = len(target.tokens)
    if not 0 < length < target.engine.context_length:
        return None
    token = target.tokens[-1]
    source = Uniforms(0)
    times: list[float] = []
    while len(times) < STEPS and sum(times) < MAX_SECONDS:
        start = perf_counter()
        draw(target.forward([token])[-1], options, source, length)
        times.append(perf_counter() - start)
        target.rewind(length)
    return median(times)


def metrics_of(
    counts: RawCounts, draft_length: int | None, cost_ratios: dict[str, float]
) -> dict[str, float | None]:
    """Metrics of a run: tokens per second, τ, α, mean γ, MBSU for each cost ratio (None where they mean nothing).

    MBSU is that of `draft_length`, or of the mean γ where it was chosen block by block; what was copied costs nothing, and a
    drafter step behind a draft costs what the others do.
    """
    values: dict[str, float | None] = {"tokens_per_second": counts.token_rate if counts.emitted else None}
    if counts.drafted and counts.blocks:  # a drafter that wrote alone made no block
        values["block_efficiency"] = counts.block_efficiency
        values["acceptance_rate"] = counts.acceptance_rate
        values["mean_draft_length"] = counts.mean_draft_length
        steps = counts.computed(draft_length or counts.mean_draft_length)
        for name, ratio in cost_ratios.items():
            values[f"mbsu_{name}"] = mbsu(counts.block_efficiency, steps, ratio)
    return values


def dump(counts: RawCounts) -> dict[str, Any]:
    """Raw counts as plain values, seconds rounded to the microsecond."""
    return {
        name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(counts).items()
    }
