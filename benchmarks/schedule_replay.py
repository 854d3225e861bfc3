"""Chosen draft lengths against fixed ones on recorded replies, prompt by prompt, without the noise of a clock.

    python benchmarks/schedule_replay.py BUNDLE [--engine llama.cpp] [--precision q8_0] [--prompts 48] [--lengths 64,120]
                                         [--table-error 0.1]

"Never slower than plain decoding by 2 % on any prompt" cannot be seen with a stopwatch: two runs of the same reply of 64 tokens
differ by more. So the pair writes every reply once, and after each of its tokens the drafter proposes 8 and the target says how
many it accepts. Every schedule then decodes the same replies in simulated time: passes take what was measured on this machine,
beginning a draft, the loop and the sampling what they took while recording, and the schedule's own work what it takes here and
now. One schedule goes through all prompts in their order, as a chat does; it starts from the acceptance that the bundle's
evaluation found.
With --table-error the schedule is told other costs than the machine's, as one quick measurement differs from the next: those of
every longer pass are off by a random factor of that standard deviation, another one in each of five runs.
"Least possible": so far behind the best fixed length stays who knows all costs and rates and keeps the 2 % (schedule_floor.py).
Greedy replies are the same whatever is drafted, so for them the replay is exact; at T > 0 it is one draw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from edgespec_runtime.chooser.adaptive import Adaptive
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.expected_acceptance import expected_rate
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import LLAMACPP, ONNXRUNTIME, LoadOptions, Pair, open_pair
from edgespec_runtime.text.prompts import read_chats
from schedule_floor import least_seconds

from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, median
from edgespec.core.progress import progress
from edgespec.core.table import table

MOST = 8  # longest draft
REPEATS = 5  # a pause of the machine falls into the schedule's own work too: medians
BAR = 1.02  # times plain decoding's seconds, on any prompt


@dataclass(frozen=True)
class Trace:
    """One reply. `accepted[i]`: how many tokens of a draft of MOST the target accepts after i tokens of the reply."""

    context: int
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Seconds: of passes; of a plain and a drafted block beyond its passes; of beginning a draft; of drawing one token of it."""

    costs: Costs
    plain_work: float
    drafted_work: float
    beginning: float
    drawing: float

    def __str__(self) -> str:
        names = ("plain_work", "drafted_work", "beginning", "drawing")
        plain, drafted, beginning, drawing = (1e6 * getattr(self, name) for name in names)
        return (
            f"beyond the passes, us: a plain block {plain:.0f}, a drafted one {drafted:.0f}, beginning a draft {beginning:.0f}, "
            f"drawing a token of it {drawing:.0f}"
        )

    def drafting(self, length: int, context: int) -> float:
        return self.beginning + length * (self.drawing + self.costs.draft(context)) if length else 0.0


def record(
    pair: Pair, prompts: Sequence[Sequence[int]], new: int, temperature: float, costs: Costs
) -> tuple[list[Trace], Machine]:
    """The replies, and what their blocks took."""
    traces, counts = [], RawCounts()
    drafted = {1: RawCounts(), MOST: RawCounts()}  # what differs between them is in the length
    step = costs.draft(costs.contexts[0])
    with progress(f"recording at T = {temperature:g}", len(prompts), "reply") as bar:
        for seed, prompt in enumerate(prompts):
            for model in (pair.target, pair.draft):
                if model is not None:
                    model.rewind(0)
            plain = DecodingOptions(max_new_tokens=new + MOST + 1, temperature=temperature, seed=seed)
            text = list(prompt)
            for block in decode(pair.target, None, prompt, plain, (), counts):
                text += block.tokens
            accepted = []
            for done in range(min(new, len(text) - len(prompt) - MOST)):
                how = DecodingOptions(
                    max_new_tokens=MOST + 1,
                    temperature=temperature,
                    seed=seed * new + done,
                    rule="lossless",
                )
                before = text[: len(prompt) + done]
                for length, seen in drafted.items():
                    blocks = decode(pair.target, pair.draft, before, how, (), seen, Fixed(length))
                    kept = next(blocks).accepted
                    blocks.close()
                accepted.append(kept)
            traces.append(Trace(len(prompt), tuple(accepted)))
            bar.update(1)
    short, long = (seen.draft_seconds / seen.blocks for seen in drafted.values())
    token = (long - short) / (MOST - 1)
    beginning, drawing = max(0.0, short - token), max(0.0, token - step)
    work, drafted_work = (each.loop_seconds / each.blocks for each in (counts, drafted[MOST]))
    return traces, Machine(costs, work, drafted_work, beginning, drawing)


def seconds_of(schedule: Schedule, trace: Trace, tokens: int, machine: Machine) -> float:
    """Simulated seconds of the first `tokens` of a reply; those that choosing took are real ones."""
    emitted, spent = 0, 0.0
    tokens = min(tokens, len(trace.accepted))
    while emitted < tokens:
        context = trace.context + emitted
        asked = perf_counter()
        drafted = schedule.draft_length(context, tokens - emitted - 1)
        size = schedule.pass_length(drafted + 1, context)
        choosing = perf_counter() - asked
        accepted = min(trace.accepted[emitted], drafted)
        drafting = machine.drafting(drafted, context)
        verifying = machine.costs.verify(size, context)
        seconds = drafting + verifying + (machine.drafted_work if drafted else machine.plain_work)
        asked = perf_counter()
        schedule.observe(
            Outcome(context, drafted, accepted, accepted + 1, size, drafting, verifying, seconds, choosing)
        )
        spent += choosing + seconds + perf_counter() - asked
        emitted += accepted + 1
    return spent


def replies(schedule: Schedule, traces: Sequence[Trace], tokens: int, machine: Machine) -> list[float]:
    taken = []
    for trace in traces:
        schedule.begin()
        taken.append(seconds_of(schedule, trace, tokens, machine))
    return taken


def acceptance(traces: Sequence[Trace]) -> list[float]:
    """Of every position of a draft, where those before it are accepted."""
    kept = np.array([accepted for trace in traces for accepted in trace.accepted])
    return [float((kept > place).sum() / max(1, (kept >= place).sum())) for place in range(MOST)]


def least_behind(traces: Sequence[Trace], tokens: int, machine: Machine) -> float:
    """Share by which the best schedule is slower than the best fixed length, where no reply may be beyond BAR."""
    context = sum(trace.context for trace in traces) // len(traces) + tokens // 2
    plain = machine.costs.verify(1, context) + machine.plain_work
    blocks = [1.0]
    for length in range(1, MOST + 1):
        size = machine.costs.cheapest_length(length + 1, context)
        seconds = (
            machine.drafting(length, context) + machine.costs.verify(size, context) + machine.drafted_work
        )
        blocks.append(seconds / plain)
    fixed, best = least_seconds(acceptance(traces), blocks, tokens, BAR - 1.0)
    return best / min(fixed) - 1.0


def told(costs: Costs, error: float, seed: int) -> Costs:
    """The costs with passes of two tokens and more off by random factors, the same ones at every context."""
    off = np.exp(error * np.random.default_rng(seed).standard_normal(costs.longest))
    off[0] = 1.0
    rows = (np.array(costs.verify_seconds) * off).tolist()
    return replace(costs, verify_seconds=tuple(map(tuple, rows)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default=LLAMACPP, choices=(LLAMACPP, ONNXRUNTIME))
    parser.add_argument("--precision", default="q8_0")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompts-file", type=Path, help="other prompts than the bundle's held-out ones")
    parser.add_argument("--lengths", default="64,120", help="tokens of a reply")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument(
        "--table-error", type=float, default=0.0, help="relative, of what the schedule is told"
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path, help="write every reply's seconds to this file")
    return parser.parse_args()


def main() -> int:
    given = parse()
    pair = open_pair(given.bundle, LoadOptions(given.engine, given.precision, threads=given.threads))
    chats = read_chats(given.prompts_file) if given.prompts_file else pair.prompts()
    prompts = [pair.tokenizer.encode_chat(chat) for chat in chats[: given.prompts]]
    lengths = [int(value) for value in given.lengths.split(",")]
    middle = sum(map(len, prompts)) // len(prompts) + max(lengths) // 2
    costs = calibrate(pair.target, pair.draft, CalibrateOptions(seconds=20.0, contexts=(middle,)))
    sizes = ", ".join(f"{costs.v(n, middle):.2f}" for n in range(2, MOST + 2))
    print(f"{pair.engine} {given.precision}, {given.threads} threads, {len(prompts)} prompts")
    print(
        f"a plain step {1e3 * costs.verify(1, middle):.3f} ms, c_t {costs.c_t(middle):.3f}, v(2) .. v({MOST + 1}) {sizes}"
    )
    error = given.table_error
    if error:
        print(f"the schedule is told costs of longer passes that are off by {error:.0%} (standard deviation)")
    rows, report = [], {}
    for temperature in (float(value) for value in given.temperatures.split(",")):
        traces, machine = record(pair, prompts, max(lengths), temperature, costs)
        print(f"T = {temperature:g}, {machine}")
        for tokens in lengths:
            fixed = [replies(Fixed(length), traces, tokens, machine) for length in range(MOST + 1)]
            guess = expected_rate(pair.manifest.metrics, temperature)
            runs = [
                replies(Adaptive(told(costs, error, run), guess, MOST), traces, tokens, machine)
                for run in range(REPEATS)
            ]
            if error:  # the runs differ: all their replies count
                chosen = [seconds for run in runs for seconds in run]
                fixed = [REPEATS * each for each in fixed]
            else:
                chosen = [median(seconds) for seconds in zip(*runs, strict=True)]
            best = min(range(MOST + 1), key=lambda length: sum(fixed[length]))
            slower = [mine / plain for mine, plain in zip(chosen, fixed[0], strict=True)]
            rows.append(
                (
                    f"{temperature:g}",
                    str(tokens),
                    f"{sum(fixed[0]) / sum(chosen):.3f}",
                    f"{sum(fixed[0]) / sum(fixed[best]):.3f} (γ = {best})",
                    f"{sum(chosen) / sum(fixed[best]) - 1:+.1%}",
                    f"{least_behind(traces, tokens, machine):+.1%}",
                    f"{max(slower) - 1:+.1%}",
                    f"{sum(ratio > BAR for ratio in slower)} of {len(slower)}",
                )
            )
            report[f"{temperature:g}/{tokens}"] = {
                "chosen": chosen,
                "fixed": fixed,
                "seconds": vars(machine) | {"costs": vars(costs)},
            }
    heads = ("T", "tokens", "chosen x plain", "best fixed x plain", "seconds against it", "least possible")
    print()
    print(table((*heads, "slowest prompt", f"beyond {BAR - 1:.0%}"), rows))
    if given.json:
        write_json(given.json, {"engine": pair.engine, "precision": given.precision, "replies": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
