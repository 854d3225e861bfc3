"""Plain against speculative decoding on the same prompts, side by side.

Every prompt is decoded plainly and with each draft length, one run after the other in an order of its own, so that a machine
that warms up or slows down does so for all of them, and none always follows the same other one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec import __version__
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping, knob, to_mapping, with_default
from edgespec.core.progress import progress
from edgespec_runtime.bench.report import (
    AUTO,
    PLAIN,
    Run,
    Summary,
    cost_table,
    speed_table,
    summarise,
    verdict,
)
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, ReplyOptions, numbered, plain
from edgespec_runtime.decoding.schedule import Schedule
from edgespec_runtime.decoding.speed import dump, shuffled
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.pair.device_defaults import LENGTHS, manifest_of, of_bench
from edgespec_runtime.rules.acceptance import Rule
from edgespec_runtime.text.prompts import read_chats

LEAST_PROMPTS = 3
MOST_REPEATS = 9  # where they are as many as fit in the time: more tell little of a machine that drifts


@dataclass(frozen=True, kw_only=True)
class Options(ReplyOptions, LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    prompts: str = knob("", "a .jsonl file of prompts ('messages' or 'instruction') (default: the bundle's)")
    max_prompts: int = knob(64, "most prompts", at_least=1)
    max_new_tokens: int = knob(64, "tokens generated for a prompt", at_least=2)
    draft_lengths: tuple[int, ...] = knob(LENGTHS, "draft lengths γ", at_least=1)
    choose: bool = knob(
        True, "also let γ be chosen block by block from costs measured here, as chat and generate do"
    )
    max_draft_length: int = with_default(DecodingOptions, "max_draft_length", 8)
    repeats: int = knob(
        0,
        f"runs of every prompt with every draft length; 0: as many as fit in, 1 to {MOST_REPEATS}",
        at_least=0,
    )
    seconds: float = knob(
        18.0, f"time to spend: as many prompts as fit in, at least {LEAST_PROMPTS}", at_least=0.0
    )
    json: str = knob("", "write raw counts of every run, summaries and verdict to this file")
    plot: str = knob("", "draw τ and token rate for each draft length into this PNG file")
    markdown: bool = knob(False, "print Markdown tables")


OPTIONS = Options


def measure(
    pair: Pair,
    prompt: Sequence[int],
    how: DecodingOptions,
    length: int,
    place: tuple[int, int],
    schedule: Schedule | None = None,
) -> Run:
    """Decode one prompt once from empty caches. `place`: index of the prompt and of the repeat."""
    draft = None if length == PLAIN else pair.draft
    for model in (pair.target, pair.draft):
        if model is not None:
            model.rewind(0)
    counts = RawCounts()
    reply: list[int] = []
    first_token = 0.0
    start = perf_counter()
    for block in decode(pair.target, draft, prompt, how, pair.tokenizer.stop_ids, counts, schedule):
        first_token = first_token or perf_counter() - start
        reply += block.tokens
    return Run(place[0], place[1], length, len(prompt), first_token, tuple(reply), counts)


def runs_of(
    pair: Pair, prompts: Sequence[Sequence[int]], options: Options
) -> Iterator[tuple[list[Run], int]]:
    """Yield (runs of a prompt, one with every draft length; how many such there will be as far as one can tell).

    Round after round through the prompts, so that no moment of the machine falls on the repeats of one prompt alone.
    """
    lengths = (PLAIN, *sorted(set(options.draft_lengths)))
    shared = {field.name: getattr(options, field.name) for field in fields(ReplyOptions)}
    shared |= {"rule": options.rule_name, "seed": options.seed or 0}
    how = {length: DecodingOptions(**shared, draft_length=max(length, 1)) for length in lengths}
    how[PLAIN] = plain(how[PLAIN])
    for length in (PLAIN, lengths[-1]):  # warm-up: first calls of both engines allocate
        measure(pair, prompts[0], how[length], length, (0, 0))
    chosen = None
    if options.choose and isinstance(options.acceptance_rule(), Rule):
        longest = options.max_draft_length
        lengths, how[AUTO] = (*lengths, AUTO), DecodingOptions(**shared, max_draft_length=longest)
        chosen = Schedules(pair, lambda text: print(text, file=sys.stderr)).of(how[AUTO])
    start = perf_counter()
    planned, rounds, done = len(prompts), 1, 0
    while done < planned * rounds:
        repeat, index = divmod(done, planned)
        turn = repeat * len(prompts) + index
        runs = []
        for length in shuffled(lengths, turn):
            # prompts that share a seed are not independent
            seeded = numbered(how[length], turn)
            schedule = chosen if length == AUTO else None
            runs.append(measure(pair, prompts[index], seeded, length, (index, repeat), schedule))
        done += 1
        if not repeat:
            affordable = int(options.seconds * done / (perf_counter() - start))
            fitting = affordable // max(1, options.repeats)
            planned = min(len(prompts), max(LEAST_PROMPTS, fitting, done))
            rounds = options.repeats or min(max(1, affordable // planned), MOST_REPEATS)
        yield runs, planned * rounds


def report(pair: Pair, options: Options, runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Everything, for --json: raw counts of every run first, what is derived from them after."""
    return {
        "edgespec": __version__,
        "engine": pair.engine,
        "precision": pair.precision,
        "threads": options.threads or default_threads(),
        "cost_ratios": pair.cost_ratios,
        "exactness": asdict(pair.measured_exactness()),
        "options": to_mapping(options),
        "runs": [{**vars(run), "counts": dump(run.counts)} for run in runs],
        "summaries": [{**asdict(summary), "predicted": summary.predicted} for summary in summaries],
        "verdict": verdict(summaries),
    }


def run(given: dict[str, Any]) -> int:
    manifest = manifest_of(given)
    options = from_mapping(Options, of_bench(given, manifest))
    if options.plot:
        from edgespec.core.pictures import require_matplotlib

        require_matplotlib()
    pair = open_pair(Path(options.bundle), options, options.needs_model, manifest)
    try:
        chats = (read_chats(Path(options.prompts)) if options.prompts else pair.prompts())[
            : options.max_prompts
        ]
        prompts = [pair.tokenizer.encode_chat(chat) for chat in chats]
        runs: list[Run] = []
        with progress("bench", len(prompts), "prompt") as bar:
            for group, planned in runs_of(pair, prompts, options):
                runs += group
                bar.total = planned
                bar.update(1)
        summaries = summarise(runs, pair.cost_ratios)
        _print(pair, options, runs, summaries)
        if options.json:
            write_json(Path(options.json), report(pair, options, runs, summaries))
        if options.plot:
            from edgespec_runtime.bench.plot import plot_bench

            title = f"{pair.manifest.target.name} on {pair.engine} {pair.precision}"
            plot_bench(Path(options.plot), summaries, title)
        for file in filter(None, (options.json, options.plot)):
            print(f"wrote {file}", file=sys.stderr)
        return 0
    finally:
        pair.close()


def _print(pair: Pair, options: Options, runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    prompts, repeats = (len({getattr(run, of) for run in runs}) for of in ("prompt", "repeat"))
    greedy = options.temperature == 0
    names = f"{pair.manifest.target.name} with {pair.manifest.drafter.name}"
    print(f"{names}, {pair.engine} {pair.precision}, {options.threads or default_threads()} threads")
    print(
        f"{prompts} prompts x {repeats}, up to {options.max_new_tokens} tokens, "
        f"{options.words()}; medians over prompts, 95 % bootstrap intervals\n"
    )
    print(speed_table(summaries, markdown=options.markdown), end="\n\n")
    print(cost_table(summaries, markdown=options.markdown), end="\n\n")
    print(f"Block of tokens against single steps: {pair.exactness()}.")
    if greedy:
        same = min(summary.identical for summary in summaries)
        print(f"Replies with the same tokens as plain decoding, at every draft length: {same} of {prompts}.")
    print(verdict(summaries))
