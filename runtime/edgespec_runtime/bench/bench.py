"""Plain against speculative decoding on the same prompts, side by side.

Every prompt is decoded plainly and with each draft length, one run after the other in an order of its own, so that a machine
that warms up or slows down does so for all of them, and none always follows the same other one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.core import __version__
from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.files import sha256_file
from edgespec.core.manifest import MANIFEST
from edgespec.core.metrics import RawCounts, summed
from edgespec.core.options import as_flags, from_mapping, knob, shell_line, to_mapping, with_default
from edgespec.core.output import json_knob, note, write_result
from edgespec.core.progress import progress
from edgespec.core.table import count, duration, many
from edgespec.shell.environment import as_typed
from edgespec_runtime.bench.dialogues import Dialogue, Questions, fitting_dialogues
from edgespec_runtime.bench.plot import plot_bench
from edgespec_runtime.bench.report import (
    AUTO,
    LEAST_PROMPTS,
    PLAIN,
    Category,
    Place,
    Run,
    Summary,
    category_table,
    compared,
    cost_table,
    fastest_fixed,
    identical_prompts,
    shortfalls,
    speed_table,
    summarise,
    verdict,
)
from edgespec_runtime.bench.suite import (
    BUILT_IN,
    MAX_QUESTIONS,
    Question,
    question_of,
    read_suite,
    round_robin,
)
from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import SHIFT, DecodingOptions, ReplyOptions, numbered, plain
from edgespec_runtime.decoding.schedule import Schedule
from edgespec_runtime.decoding.speed import dump, shuffled
from edgespec_runtime.engines.device import engine_version, this_device
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.pair.device_defaults import LENGTHS, named_manifest, with_bench_defaults
from edgespec_runtime.rules.table import MAX_DRAFT, LoopRule
from edgespec_runtime.text.prompts import read_chats

TURN_SEEDS = 2**32  # between the seeds of a prompt's turns: more than there are prompts and repeats
MOST_REPEATS = 9  # where they are as many as fit in the time: more tell little of a machine that drifts
SAMPLES = 4  # replies in the report: enough to see a pattern, few enough to read
SAMPLE_TOKENS = 160  # of such a reply: about 15 lines
SAMPLE_CHARACTERS = 600  # of its prompt


@dataclass(frozen=True, kw_only=True)
class Options(ReplyOptions, LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    prompts: str = knob("", "a .jsonl file of prompts ('messages' or 'instruction') (default: the bundle's)")
    suite: str = knob(
        "",
        "a file of questions with categories, reported by category: Spec-Bench, MT-bench, HumanEval or GSM8K rows, prompts, "
        f"messages; {BUILT_IN}: the 140 questions that come with edgespec",
    )
    max_prompts: int = knob(64, "most prompts; of a suite all of them, unless this is given", at_least=1)
    max_new_tokens: int = knob(64, "tokens generated for a prompt", at_least=2)
    draft_lengths: tuple[int, ...] = knob(LENGTHS, "draft lengths γ", at_least=1, at_most=MAX_DRAFT)
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
        18.0,
        f"time to spend: as many prompts as fit in, at least {LEAST_PROMPTS}; of a suite {LEAST_PROMPTS} of every category",
        at_least=0.0,
    )
    min_speedup: float | None = knob(
        None,
        "exit with 1 where the speed-up over plain decoding is less, with chosen γ if there is such",
        at_least=0.0,
    )
    min_tau: float | None = knob(None, "exit with 1 where the highest τ of a fixed γ is less", at_least=0.0)
    json: str = json_knob()
    plot: str = knob("", "draw τ and token rate for each draft length into this PNG file")
    markdown: bool = knob(False, "print Markdown tables")


def measure(
    pair: Pair,
    prompt: Sequence[int],
    how: DecodingOptions,
    length: int,
    place: Place,
    schedule: Schedule | None = None,
) -> Run:
    """Decode one prompt once from empty caches."""
    draft = None if length == PLAIN else pair.draft
    for model in pair.models:
        model.rewind(0)
    counts = RawCounts()
    reply: list[int] = []
    first_token = 0.0
    start = perf_counter()
    for block in decode(pair.target, draft, prompt, how, pair.tokenizer.stop_ids, counts, schedule):
        first_token = first_token or perf_counter() - start
        reply += block.tokens
    return Run(place.prompt, place.repeat, length, len(prompt), first_token, tuple(reply), counts, place.turn)


def runs_of(
    pair: Pair, dialogues: Sequence[Dialogue], options: Options, least: int = LEAST_PROMPTS
) -> Iterator[tuple[list[Run], int]]:
    """Yield (runs of a prompt, one with every draft length; how many such there will be as far as one can tell).

    Round after round through the prompts, so that no moment of the machine falls on the repeats of one prompt alone. The turns
    of a conversation follow each other. `least`: prompts that are run whatever time they take.
    """
    # a rule with a loop of its own chooses its draft lengths itself, so there is one way to draft
    own, shared = isinstance(options.acceptance_rule(), LoopRule), shared_of(options)
    lengths = (PLAIN, *([AUTO] if own else sorted(set(options.draft_lengths))))
    how = {length: DecodingOptions(**shared, draft_length=length) for length in lengths if length > PLAIN}
    how[AUTO] = DecodingOptions(**shared, max_draft_length=options.max_draft_length)
    how[PLAIN] = plain(how[AUTO])
    for length in (PLAIN, lengths[-1]):  # warm-up: first calls of both engines allocate
        measure(pair, dialogues[0].prompts[0], how[length], length, Place(0, 0))
    chosen = None
    if options.choose and not own:
        lengths = (*lengths, AUTO)
        chosen = Schedules(pair, note).of(how[AUTO])
    start = perf_counter()
    planned, rounds, done = len(dialogues), 1, 0
    most = planned * max(options.repeats, MOST_REPEATS)  # also where there is no end of seconds
    while done < planned * rounds:
        repeat, index = divmod(done, planned)
        dialogue, runs = dialogues[index], []
        for turn, prompt in enumerate(dialogue.prompts):  # in the first round each answer adds a prompt
            number = repeat * len(dialogues) + index + turn * TURN_SEEDS
            for length in shuffled(lengths, number):
                seeded = numbered(how[length], number)  # prompts that share a seed are not independent
                schedule = chosen if length == AUTO else None
                run = measure(pair, prompt, seeded, length, Place(index, repeat, turn), schedule)
                runs.append(run)
                if length == PLAIN:
                    reply = run.reply
            if not repeat:
                dialogue.answer(reply)
        done += 1
        if not repeat:
            affordable = int(min(options.seconds * done / (perf_counter() - start), most))
            fitting = affordable // max(1, options.repeats)
            planned = min(len(dialogues), max(least, fitting, done))
            rounds = options.repeats or min(max(1, affordable // planned), MOST_REPEATS)
        yield runs, planned * rounds


def shared_of(options: Options) -> dict[str, Any]:
    """What all rivals have in common, for `DecodingOptions`."""
    shared = {field.name: getattr(options, field.name) for field in fields(ReplyOptions)}
    return shared | {"rule": options.rule_name, "seed": options.seed or 0}


def provenance(verb: str, given: dict[str, Any]) -> dict[str, Any]:
    """Which command ran, when and where."""
    bundle, words = as_typed(Path(given["bundle"])), {name: given[name] for name in given if name != "bundle"}
    return {
        "edgespec": __version__,
        "command": shell_line("edgespec", verb, bundle, *as_flags(words)),
        "date": time.strftime("%Y-%m-%d"),
        "device": str(this_device()),
    }


def report(
    pair: Pair,
    given: dict[str, Any],
    options: Options,
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    asked: Questions,
    rows: Sequence[Category],
) -> dict[str, Any]:
    """Everything, for --json: what was run, raw counts of every run, what is derived from them and a few replies.

    `bundle` is the SHA-256 of its manifest, which names every file's.
    """
    length = fastest_fixed(summaries).draft_length
    drafting = DecodingOptions(**shared_of(options), draft_length=None if length == AUTO else length)
    found = {
        **provenance("bench", given),
        "target": pair.manifest.target.name,
        "drafter": pair.manifest.drafter.name,
        "bundle": sha256_file(pair.manifest.folder / MANIFEST),
        "engine_version": engine_version(pair.backend),
        "engine": pair.backend,
        "precision": pair.precision,
        "threads": pair.threads,
        "cost_ratios": pair.cost_ratios,
        "exactness": asdict(pair.measured_exactness()),
        "options": to_mapping(options),
        "runs": [{**vars(run), "counts": dump(run.counts)} for run in runs],
        "identical_prompts": identical_prompts(runs),
        "summaries": [{**asdict(summary), "predicted": summary.predicted} for summary in summaries],
        "verdict": verdict(summaries),
        "samples": samples_of(pair, asked.dialogues, drafting),
        "too_long": {"prompts": asked.too_long, "turns": asked.turns_left_out},
    }
    if options.suite:
        found["questions"] = [
            {"prompt": index, "question": one.question.name, "category": one.question.category}
            for index, one in enumerate(asked.dialogues)
        ]
        found["categories"] = [row.as_json() for row in rows]
    return found


def samples_of(pair: Pair, dialogues: Sequence[Dialogue], how: DecodingOptions) -> list[dict[str, Any]]:
    """The first turns of the first dialogues, decoded once more with a fixed draft length; nothing here is timed.

    Each has `prompt` (the beginning of the user's text), `draft_length`, `tokens`, `passes`, `accepted`, and `parts`: pairs of a
    text and whether the drafter proposed it. A character whose bytes come from several tokens belongs to the last of them.
    """
    how = replace(how, max_new_tokens=min(how.max_new_tokens, SAMPLE_TOKENS))
    return [_sample(pair, dialogue, how) for dialogue in dialogues[:SAMPLES]]


def _sample(pair: Pair, dialogue: Dialogue, how: DecodingOptions) -> dict[str, Any]:
    for model in pair.models:
        model.rewind(0)
    counts = RawCounts()
    said = list(pieces(pair, dialogue.prompts[0], how, counts))
    return {
        "prompt": dialogue.question.turns[0][:SAMPLE_CHARACTERS],
        "draft_length": how.draft_length,
        "tokens": counts.emitted,
        "passes": counts.blocks,
        "accepted": sum(len(piece.tokens) for piece in said if piece.accepted),
        "parts": [
            ["".join(piece.text for piece in group), drafted]
            for drafted, group in groupby(filter(attrgetter("text"), said), key=attrgetter("accepted"))
        ],
    }


def questions_for(pair: Pair, options: Options, questions: Sequence[Question]) -> Questions:
    """The questions of a suite, one category after the other, else the chats of a file, as far as the context has room.

    A reply to a chat may end where the context does; one to a question of a suite has room for all its tokens.
    """
    reply = options.max_new_tokens if questions and options.when_full != SHIFT else 1
    if not questions:
        chats = read_chats(Path(options.prompts).expanduser()) if options.prompts else pair.prompts()
        questions = [question_of(chat) for chat in chats]
    room = pair.target.engine.context_length - reply
    return fitting_dialogues(pair.tokenizer, round_robin(questions), room, options.max_prompts)


def run(given: dict[str, Any]) -> int:
    manifest = named_manifest(given)
    values = with_bench_defaults(given, manifest)
    if values.get("suite"):
        values.setdefault("max_prompts", MAX_QUESTIONS)
    options = from_mapping(Options, values)
    if options.suite and options.prompts:
        raise InputError(
            f"--suite is {options.suite!r} and --prompts is {options.prompts!r}; give one of them"
        )
    if "draft_lengths" in given and isinstance(options.acceptance_rule(), LoopRule):
        raise InputError(
            f"rule {options.rule_name!r} has a decoding loop of its own, which ends drafts by its own threshold; leave out "
            f"--draft-lengths {','.join(map(str, options.draft_lengths))}"
        )
    questions = read_suite(options.suite) if options.suite else []
    with closing(open_pair(Path(options.bundle), options, options.needs_model, manifest)) as pair:
        asked = questions_for(pair, options, questions)
        runs: list[Run] = []
        total = RawCounts()
        start = perf_counter()
        with progress("bench", len(asked.dialogues), "prompts") as bar:
            for group, planned in runs_of(pair, asked.dialogues, options, asked.least):
                runs += group
                total.add(summed(run.counts for run in group))
                rate = total.emitted / max(total.total_seconds, 1e-9)
                bar.set_postfix_str(f"{count(rate)} tok/s", refresh=False)
                bar.total = planned
                bar.update(1)
        seconds = perf_counter() - start
        summaries = summarise(runs, pair.cost_ratios)
        _print(pair, options, runs, summaries)
        rows: list[Category] = []
        if options.suite:
            rows = asked.by_category(runs, summaries)
            _print_suite(options, summaries, asked, rows, seconds)
        if asked.too_long or asked.turns_left_out:
            ways = ["a longer --context"] * (pair.target.engine.context_length == options.most_tokens)
            ways += ["a smaller --max-new-tokens"] * bool(options.suite and options.when_full != SHIFT)
            more = f"; {' or '.join(ways)} leaves more room" if ways else ""
            print(
                f"Left out, because the context has no room for them: {many(asked.too_long, 'prompt')}, "
                f"{many(asked.turns_left_out, 'later turn')}{more}."
            )
        print(verdict(summaries))
        if options.json:  # the report decodes a few replies once more
            write_result(options.json, report(pair, given, options, runs, summaries, asked, rows))
        if options.plot:
            title = f"{pair.manifest.target.name} on {pair.backend} {pair.precision}"
            plot_bench(Path(options.plot).expanduser(), summaries, title)
            note(f"wrote {options.plot}")
        if missed := shortfalls(summaries, options.min_speedup, options.min_tau):
            raise CheckFailed(" ".join(missed))
    return 0


def _print(pair: Pair, options: Options, runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    prompts, repeats = (len({getattr(run, of) for run in runs}) for of in ("prompt", "repeat"))
    names = f"{pair.manifest.target.name} with {pair.manifest.drafter.name}"
    print(f"{names}, {pair.backend} {pair.precision}, {many(pair.threads, 'thread')}")
    print(
        f"{many(prompts, 'prompt')} x {repeats}, up to {options.max_new_tokens} tokens, "
        f"{options.words()}; medians over prompts, 95 % bootstrap intervals\n"
    )
    print(speed_table(summaries, markdown=options.markdown), end="\n\n")
    print(cost_table(summaries, markdown=options.markdown), end="\n\n")
    if caution := pair.measured_exactness().caution():
        print(caution)
    if options.temperature == 0:
        same = identical_prompts(runs)
        print(f"Replies with the same tokens as plain decoding, at every draft length: {same} of {prompts}.")


def _print_suite(
    options: Options, summaries: Sequence[Summary], asked: Questions, rows: Sequence[Category], seconds: float
) -> None:
    """A table by category for each way of drafting that is compared, and what of the suite was not run."""
    done, total = rows[-1].drafted.prompts, len(asked.dialogues)
    print()
    for s in compared(summaries):
        print(f"{options.suite} by category: {s.name} against plain decoding\n")
        own = [row for row in rows if row.drafted.draft_length == s.draft_length]
        print(category_table(own, markdown=options.markdown), end="\n\n")
    if done < total:
        print(
            f"{done} of {total} prompts were run; all of them take about {duration(seconds * total / done)}: "
            f"--seconds {math.ceil(1.2 * seconds * total / done)}"
        )
