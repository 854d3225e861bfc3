"""The decoding loop's own cost per emitted token: everything beside the engines' forward passes.

    python -m benchmarks.speed.loop_overhead [--json FILE]

Two replay engines return precomputed logits at no cost, peaked as a language model's are (Zipf's law over a shuffled
vocabulary), and a drafter's that are the target's with noise. The acceptance rule is `lossless`. Bars: 0.15 ms per emitted token
at a vocabulary of 4,096 and 0.6 ms at 32,000, on one core. Processor time is measured, so other programs hardly disturb it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time

import numpy as np
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.rules.table import LOSSLESS
from numpy.typing import NDArray

from benchmarks.common import command_line
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, median
from edgespec.core.table import table

BARS_MS = {4096: 0.15, 32000: 0.6}
DRAFT_LENGTHS = (0, 3, 5)
WARPS = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "T=0.6 top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "T=1 top-k 50": {"temperature": 1.0, "top_k": 50},
}
POSITIONS = 64
ZIPF_EXPONENT = 1.3
DRAFT_NOISE = 0.7
NEW_TOKENS = 256
REPEATS = 5


class ReplayEngine:
    """An Engine whose logits depend on the position only and cost a slice; its own time is counted apart."""

    name = "replay"
    block_length = 16

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = np.concatenate([logits, logits[: self.block_length]])
        self.vocab_size = logits.shape[1]
        self.context_length = 1 << 20
        self.n_past = 0
        self.seconds = 0.0

    def forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        start = process_time()
        row = self.n_past % POSITIONS
        self.n_past += len(tokens)
        rows = self._logits[row : row + len(tokens)]
        self.seconds += process_time() - start
        return rows

    def rewind(self, n_past: int) -> None:
        self.n_past = n_past

    def close(self) -> None:
        pass


def peaked_logits(vocab_size: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """[POSITIONS, V]: log-probabilities of Zipf's law, each row in an order of its own."""
    zipf = -ZIPF_EXPONENT * np.log(np.arange(1, vocab_size + 1))
    return np.stack([generator.permutation(zipf) for _ in range(POSITIONS)]).astype(np.float32)


def overhead_ms(vocab_size: int, warp: dict[str, float], draft_length: int) -> tuple[float, float]:
    """(median milliseconds of processor time per emitted token outside the engines, tokens per block)."""
    generator = np.random.default_rng(0)
    logits = peaked_logits(vocab_size, generator)
    noise = generator.normal(scale=DRAFT_NOISE, size=logits.shape).astype(np.float32)
    options = DecodingOptions(
        max_new_tokens=NEW_TOKENS,
        rule=LOSSLESS,  # sampled replies without a seed take `block`, whose decision takes longer
        drafter=MODEL,  # the replayed texts repeat, and copies would be drafted in its place
        draft_length=max(draft_length, 1),
        **warp,  # type: ignore[arg-type]
    )
    times, counts = [], RawCounts()
    for _ in range(REPEATS):
        engines = [ReplayEngine(logits), ReplayEngine(logits + noise)]
        target, draft = (CachedEngine(engine) for engine in engines)
        start = process_time()
        for _block in decode(target, draft if draft_length else None, [1], options, (), counts):
            pass
        seconds = process_time() - start - sum(engine.seconds for engine in engines)
        times.append(1e3 * seconds / NEW_TOKENS)
    return median(times), counts.block_efficiency


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if hasattr(os, "sched_setaffinity"):  # one core
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows, worst = [], 0.0
    for vocab_size, bar in BARS_MS.items():
        for name, warp in WARPS.items():
            for draft_length in DRAFT_LENGTHS:
                value, efficiency = overhead_ms(vocab_size, warp, draft_length)
                worst = max(worst, value / bar)
                rows.append((vocab_size, name, draft_length, efficiency, value, bar))
    shown = [
        (f"{v:,}", n, g, f"{t:.2f}", f"{x:.4f}", bar, "" if x <= bar else "over")
        for v, n, g, t, x, bar in rows
    ]
    print(table(("vocabulary", "sampling", "γ", "τ", "ms per token", "bar", ""), shown, left=2))
    if given.json:
        names = ("vocab_size", "sampling", "draft_length", "block_efficiency", "ms_per_token", "bar_ms")
        write_json(given.json, [dict(zip(names, row, strict=True)) for row in rows])
    return int(worst > 1.0)


if __name__ == "__main__":
    sys.exit(main())
