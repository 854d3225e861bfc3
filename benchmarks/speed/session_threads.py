"""Two ONNX Runtime sessions side by side: do their waiting threads take the processors from each other?

    python -m benchmarks.speed.session_threads FOLDER [--precision int4] [--seconds 120] [--threads 2] [--json FILE]

FOLDER has the config.json of a target; its weights and its drafter's are random, and α = 0.7 is replayed at γ = 3. A session's
threads spin for a while after a pass, waiting for the next, while the other session's pass runs. Every way is loaded at once and
takes its turn in every round, plain and drafted; ratios are paired by round, in brackets 95 % bootstrap intervals. The share of
the processors that other programs left is printed: spinning costs more where it competes with them, so a way is better only if
it is so on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter, sleep
from unittest import mock

import numpy as np
import onnxruntime as ort
from edgespec_export.synthetic.pair import build
from edgespec_runtime.bench.synthetic import Replay, SyntheticPair
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, plain
from edgespec_runtime.decoding.schedule import Fixed
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.device import free_share
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import load_engine

from benchmarks.common import command_line, sizes_of
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, bootstrap, median
from edgespec.core.table import interval, table
from edgespec.recipe.devices import ONNXRUNTIME

CONTEXT, PROMPT, NEW = 256, 64, 48
RATE, DRAFT_LENGTH = 0.7, 3
PAUSE = 0.02  # seconds between two runs: threads that still spin for the last one stop
Entries = dict[str, str]
NO_SPIN: Entries = {"session.intra_op.allow_spinning": "0"}
STOPS: Entries = {"session.force_spinning_stop": "1"}  # after every pass
AS_IT_IS = "as it is"
# the target's, the drafter's, whether the drafter has all threads
WAYS: dict[str, tuple[Entries, Entries, bool]] = {
    AS_IT_IS: ({}, {}, True),
    "no spinning": (NO_SPIN, NO_SPIN, True),
    "no spinning, drafter": ({}, NO_SPIN, True),
    "spinning ends with the pass": (STOPS, STOPS, True),
    "drafter on one thread": ({}, {}, False),
    "both of these": (STOPS, STOPS, False),
}


def load(pair: SyntheticPair, role: str, threads: int, entries: Entries) -> CachedEngine:
    """One model whose session is made with these entries."""
    usual = ort.SessionOptions

    def options() -> ort.SessionOptions:
        made = usual()
        for name, value in entries.items():
            made.add_session_config_entry(name, value)
        return made

    graph = pair.fast_graphs.get(role) if role == "drafter" else None
    with mock.patch.object(ort, "SessionOptions", options):
        return CachedEngine(load_engine(ONNXRUNTIME, pair.paths[role], CONTEXT, threads, None, graph))


def once(target: CachedEngine, draft: CachedEngine | None, prompt: list[int], turn: int) -> RawCounts:
    counts, options = RawCounts(), DecodingOptions(max_new_tokens=NEW, seed=turn, drafter=MODEL)
    if draft is None:
        blocks = decode(target, None, prompt, plain(options), (), counts)
    else:
        replay = Replay((RATE,), Fixed(DRAFT_LENGTH))
        blocks = decode(target, draft, prompt, options, (), counts, replay, replay.rule)
    for _ in blocks:
        pass
    sleep(PAUSE)
    return counts


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("folder")
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path, help="write every run's counts to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    pair = build(given.folder, ONNXRUNTIME, given.precision)
    models = {
        name: (
            load(pair, "target", given.threads, targets),
            load(pair, "drafter", given.threads if every else 1, drafters),
        )
        for name, (targets, drafters, every) in WAYS.items()
    }
    prompt = np.random.default_rng(0).integers(0, pair.shapes["target"].vocab_size, PROMPT).tolist()
    names = list(WAYS)
    runs: dict[str, list[tuple[RawCounts, RawCounts]]] = {name: [] for name in names}
    free, start, turn = free_share(given.threads), perf_counter(), -1  # round -1 warms up
    while turn < 3 or perf_counter() - start < given.seconds:
        for name in shuffled(names, turn):
            target, draft = models[name]
            found = once(target, None, prompt, turn + 1), once(target, draft, prompt, turn + 1)
            if turn >= 0:
                runs[name].append(found)
        turn += 1
    free = min(free, free_share(given.threads))
    rows = []
    for name in names:
        row = [name]
        for kind in (0, 1):
            ratios = [
                one[kind].token_rate / base[kind].token_rate
                for one, base in zip(runs[name], runs[AS_IT_IS], strict=True)
            ]
            row.append(f"{median([one[kind].token_rate for one in runs[name]]):.1f}")
            row.append("1" if name == AS_IT_IS else interval(*bootstrap(ratios, median)))
        rows.append((*row, f"{1e3 * median([one.draft_seconds / one.drafted for _, one in runs[name]]):.2f}"))
    print(
        f"{sizes_of(pair.shapes)}, {given.precision}, {given.threads} threads, {turn} rounds; "
        f"other programs left {free:.0%} of the processors"
    )
    headers = ("", "plain tok/s", "x as it is", f"γ = {DRAFT_LENGTH} tok/s", "x as it is", "drafter step ms")
    print(table(headers, rows))
    if given.json:
        kept = {name: [[vars(one) for one in both] for both in found] for name, found in runs.items()}
        write_json(given.json, {"free_share": free, "runs": kept})
    return 0


if __name__ == "__main__":
    sys.exit(main())
