"""Hours of decoding in one process: does memory grow, does speed drift, does greedy text stay the target's own?

    python -m benchmarks.speed.endurance BUNDLE [--minutes 120] [--ways onnxruntime:fp32,llama.cpp:q8_0] [--threads N]
                                         [--json FILE]

Both engines stay loaded and take turns. Chats of one to five turns, with replies of 8 to 64 tokens, in a context so short that
many fill it, and then stop or shift. Every chat has its own acceptance rule, drafter, temperature, confidence stop and draft
length; they go through all that the drafter can have. One chat in four is greedy and lossless, and each of its replies is
compared with plain decoding of the same prompt, both from empty caches, shifts included. Resident memory is read from the kernel;
its growth is a least-squares line over the second half, since the first one fills the allocators' pools. Speed is that of one
fixed reply, decoded plainly again and again on each engine, so that it does not depend on what else was asked. Whatever ends the
run, Ctrl-C or an error too, what there is until then is printed. Exit code 1 where a reply differed or, in a run of half an hour
or more, memory grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import decode, rules_for
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, MODEL, SHIFT, STOP, DecodingOptions, plain
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.exactness import EXACT
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.rules.acceptance import Rule
from edgespec_runtime.rules.table import rule_of

from benchmarks.common import command_line, words
from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.manifest import open_manifest
from edgespec.core.metrics import RawCounts, median
from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME

BAR_BYTES_A_TOKEN = 20.0  # of growth; one number kept for every token is 32, one row of logits 16 KiB or more
JUDGED_FROM = 1800.0  # seconds: the tokenizer's word cache and the allocators' pools fill for minutes
CHECKED = 4  # every how many chats the text is compared with plain decoding
PACED = 8  # every how many chats the fixed reply is timed and memory is read
PACE_TOKENS = 48
CONTEXT = 160  # tokens, or the model's: a chat of a few turns fills it
SYSTEMS = ("", "Be brief.", "Answer in one sentence and name an example where there is one.")
EXACT_FIRST = {ONNXRUNTIME: ("fp32", "int4"), LLAMACPP: ("q8_0", "q4_0")}  # whose blocks are single steps
MIB = 1024 * 1024


@dataclass
class Way:
    """One engine with its loaded pair, and what was seen of it. `paces`: (seconds since the start, tokens a second)."""

    name: str
    pair: Pair
    schedules: Schedules
    counts: RawCounts = field(default_factory=RawCounts)
    chats: int = 0
    replies: int = 0
    shifted: int = 0
    compared: int = 0
    differing: int = 0
    paces: list[tuple[float, float]] = field(default_factory=list)

    @property
    def context(self) -> int:
        return self.pair.target.engine.context_length

    def reply(self, prompt: Sequence[int], options: DecodingOptions) -> list[int]:
        """Tokens of one drafted reply, compared with plain decoding where the options are greedy and lossless."""
        counts, checked = RawCounts(), options.temperature == 0 and options.rule_name == "lossless"
        if checked:
            self._forget()
        said = self._decoded(prompt, options, counts)
        self.counts.add(counts)
        self.replies += 1
        self.shifted += len(prompt) + len(said) > self.context
        if checked:
            self._forget()
            self.compared += 1
            self.differing += said != self._decoded(prompt, plain(options), RawCounts())
        return said

    def pace(self, prompt: Sequence[int], seconds: float) -> None:
        """Time the fixed reply."""
        counts = RawCounts()
        self._decoded(prompt, plain(DecodingOptions(max_new_tokens=PACE_TOKENS)), counts, stops=False)
        self.paces.append((seconds, counts.token_rate))

    def _forget(self) -> None:
        """Both caches empty: a compared reply and its plain one read the prompt in the same pieces.

        llama.cpp computes a piece of about a hundred tokens with another attention kernel than a short one, so what a cache kept
        of an earlier turn differs in its last bits from the same text read at once.
        """
        for model in (self.pair.target, self.pair.draft):
            if model is not None:
                model.rewind(0)

    def drift(self) -> float:
        """Median pace of the last quarter / of the first one."""
        quarter = max(1, len(self.paces) // 4)
        rates = [rate for _, rate in self.paces]
        return median(rates[-quarter:]) / median(rates[:quarter])

    def _decoded(
        self, prompt: Sequence[int], options: DecodingOptions, counts: RawCounts, stops: bool = True
    ) -> list[int]:
        draft = self.pair.draft if options.needs_model else None
        stop = self.pair.tokenizer.stop_ids if stops else ()
        schedule = self.schedules.of(options)
        blocks = decode(self.pair.target, draft, prompt, options, stop, counts, schedule)
        return [token for block in blocks for token in block.tokens]


def choices(draft: CachedEngine | None) -> Iterator[DecodingOptions]:
    """Options of one chat after another, without end: every rule with every drafter that it can have, one in `CHECKED` exact."""
    hows: list[dict[str, Any]] = []
    for name in rules_for(draft):
        rule = rule_of(name)
        copies = isinstance(rule, Rule) and not rule.raw
        for drafter in (MODEL, LOOKUP, HYBRID) if copies else (MODEL,):
            hows.append({"rule": name, "drafter": drafter, "when_full": STOP})
            if isinstance(rule, Rule):
                hows.append({"rule": name, "drafter": drafter, "when_full": SHIFT, "p_min": 0.3})
    exact = [how for how in hows if how["rule"] == "lossless"]
    for number in count():
        turn, place = divmod(number, CHECKED)
        checked = place == 0
        how = exact[turn % len(exact)] if checked else hows[(number - turn - 1) % len(hows)]
        yield DecodingOptions(
            **how,
            temperature=0.0 if checked else (0.7, 1.0, 0.0)[place - 1],
            top_p=0.9 if place == 1 else 1.0,
            draft_length=(None, 1, 3, 5, 7)[number % 5] if isinstance(rule_of(how["rule"]), Rule) else None,
            max_new_tokens=8 + number * 29 % 57,
            seed=number,
        )


def chat(way: Way, options: DecodingOptions, number: int, questions: Sequence[str]) -> None:
    """One chat of a few turns; its oldest turns are dropped where the context has no room for the next question."""
    way.chats += 1
    system = SYSTEMS[number % len(SYSTEMS)]
    first = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, str]] = []
    for turn in range(1 + number % 5):
        turns.append({"role": "user", "content": questions[(7 * number + turn) % len(questions)]})
        prompt = way.pair.tokenizer.encode_chat([*first, *turns])
        while len(prompt) >= way.context - 8 and len(turns) > 2:
            del turns[:2]
            prompt = way.pair.tokenizer.encode_chat([*first, *turns])
        if len(prompt) >= way.context:  # one question alone that is too long
            return
        said = way.reply(prompt, replace(options, seed=options.seed + turn))
        turns.append({"role": "assistant", "content": way.pair.tokenizer.decode(said)})


def resident(process: int | str = "self") -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def slope(units: Sequence[float], memory: Sequence[int]) -> float:
    """Bytes for each unit, least squares over the second half; nan where that has fewer than three points."""
    half = len(units) // 2
    if len(units) - half < 3:
        return float("nan")
    return float(np.polyfit(units[half:], memory[half:], 1)[0])


@dataclass
class Memory:
    """Resident bytes with the seconds and the tokens so far."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


def endure(ways: Sequence[Way], minutes: float, memory: Memory) -> None:
    """Chat until the time is over; what was seen is in `ways` and `memory` at any moment."""
    chats = [
        [message["content"] for message in one if message["role"] == "user"] for one in ways[0].pair.prompts()
    ]
    questions = [text for one in chats for text in one]
    paced = [way.pair.tokenizer.encode_chat([{"role": "user", "content": questions[0]}]) for way in ways]
    start = perf_counter()
    with progress("endure", int(60 * minutes), "s") as bar:
        for number, options in enumerate(choices(ways[0].pair.draft)):
            seconds = perf_counter() - start
            bar.update(int(min(seconds, 60 * minutes)) - bar.n)
            if seconds >= 60 * minutes:
                return
            for way, prompt in zip(ways, paced, strict=True):
                chat(way, options, number, questions)
                if number % PACED == 0:
                    way.pace(prompt, seconds)
            if number % PACED == 0:
                memory.seconds.append(seconds)
                memory.tokens.append(sum(way.counts.emitted for way in ways))
                gc.collect()
                memory.resident.append(resident())


def report(ways: Sequence[Way], memory: Memory) -> bool:
    """Print what was seen; whether all of it is as it should be."""
    rows = [
        (
            way.name,
            f"{way.chats:,}",
            f"{way.replies:,}",
            f"{way.counts.emitted:,}",
            f"{way.shifted:,}",
            f"{way.counts.acceptance_rate:.2f}",
            f"{median([rate for _, rate in way.paces]):.0f}",
            f"{way.drift():.3f}",
            f"{way.differing} of {way.compared}",
        )
        for way in ways
    ]
    headers = (
        "",
        "chats",
        "replies",
        "tokens",
        "shifted",
        "α",
        "plain tok/s",
        "last / first",
        "greedy that differ",
    )
    print(table(headers, rows))
    growth = slope(memory.tokens, memory.resident)
    an_hour = 3600 * slope(memory.seconds, memory.resident) / MIB
    first, most, last = (
        value / MIB for value in (memory.resident[0], max(memory.resident), memory.resident[-1])
    )
    print(
        f"\n{memory.seconds[-1] / 60:.1f} minutes; last / first: pace of the last quarter over that of the first\n"
        f"Memory: {first:.1f} MiB at first, {most:.1f} at most, {last:.1f} at last; second half {an_hour:+.2f} MiB an hour, "
        f"{growth:+.2f} bytes a token (bar: {BAR_BYTES_A_TOKEN:g})"
    )
    grew = growth > BAR_BYTES_A_TOKEN and memory.seconds[-1] >= JUDGED_FROM
    return all(way.differing == 0 for way in ways) and not grew


def as_json(way: Way) -> dict[str, Any]:
    values = {name: value for name, value in vars(way).items() if name not in ("pair", "schedules")}
    return values | {"counts": asdict(way.counts), "drift": way.drift()}


def usual_ways(bundle: Path) -> list[str]:
    """Of each engine the bundle's first precision that is exact."""
    offered = open_manifest(bundle).pairs()
    found = []
    for engine, precisions in EXACT_FIRST.items():
        found += [f"{engine}:{one}" for one in precisions if (engine, one) in offered][:1]
    if not found:
        raise InputError(f"{bundle} has none of {EXACT_FIRST}; give --ways engine:precision")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument(
        "--ways",
        type=words,
        default="",
        help="engine:precision,... (default: one of each engine, in exact mode)",
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write what was seen to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    ways, memory = [], Memory()
    for name in given.ways or usual_ways(given.bundle):
        engine, _, precision = name.partition(":")
        mode = "" if given.ways else EXACT
        load = LoadOptions(engine, precision, CONTEXT, given.threads, mode=mode)
        pair = open_pair(given.bundle, load)
        ways.append(Way(name, pair, Schedules(pair, lambda text: print(text, file=sys.stderr))))
    fine = False
    try:
        endure(ways, given.minutes, memory)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
    finally:  # hours were measured, whatever ended them
        if memory.seconds:
            fine = report(ways, memory)
            if given.json:
                seen = {way.name: as_json(way) for way in ways}
                write_json(given.json, {"ways": seen, "memory": asdict(memory)})
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
