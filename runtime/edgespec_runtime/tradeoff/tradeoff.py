"""Quality against latency: what each acceptance rule gives up for its speed, from the target alone to the drafter alone.

Every prompt is answered by the target alone (AR-large), the drafter alone (AR-small) and the pair with every rule at every value
of its parameter a, one after the other in an order of its own. A larger a leaves more to the drafter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import compact_json, read_json, read_jsonl, write_text
from edgespec.core.manifest import HEAD, open_manifest
from edgespec.core.options import from_mapping, knob, to_mapping, with_default
from edgespec.core.output import check_place, json_knob, note, write_result
from edgespec.core.pictures import require_matplotlib
from edgespec.core.progress import progress
from edgespec.core.texts import harmless
from edgespec_runtime.bench.bench import measure, provenance
from edgespec_runtime.bench.report import LEAST_PROMPTS, PLAIN, Place, Run
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, ReplyOptions, plain
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.device import engine_version, free_share
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.rules.cascades import log_total
from edgespec_runtime.rules.sampling import Warp
from edgespec_runtime.rules.table import MAX_DRAFT, RULES, LoopRule, rule_of
from edgespec_runtime.text.prompts import read_chats
from edgespec_runtime.text.tokenizer import Message
from edgespec_runtime.tradeoff.arms import ENDS, LARGE, SMALL, Arm, arms_of
from edgespec_runtime.tradeoff.plot import plot_tradeoff
from edgespec_runtime.tradeoff.quality import common_prefix, exact_match, final_number, rouge_2
from edgespec_runtime.tradeoff.report import (
    AGREEMENT,
    EXACT_MATCH,
    METRICS,
    ROUGE_2,
    Study,
    Summary,
    Trial,
    as_json,
    document,
    from_json,
    summarise,
    text,
)

FURTHEST = 100.0  # of a threshold on probabilities or nats: nothing lies beyond


@dataclass(frozen=True, kw_only=True)
class Options(Warp, LoadOptions):
    bundle: str = knob(
        "", "bundle folder; its drafter must be a model, which no ready pair has", positional=True
    )
    rules: tuple[str, ...] = knob(
        ("lossless", "lossy", "chow", "opt", "token-v3", "token-cascade"),
        "acceptance rules, at every value of --alphas; one with its own value (opt:a=0.3) or without a parameter a is one point: "
        "{names}",
        names=lambda: RULES,
    )
    alphas: tuple[float, ...] = knob(
        (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
        "values of the rules' parameter a",
        at_least=-FURTHEST,
        at_most=FURTHEST,
    )
    metric: tuple[str, ...] = knob(
        (AGREEMENT,),
        "quality: the final number of maths answers or word pairs against the prompts' 'reference', or agreement with the target",
        choices=METRICS,
    )
    prompts: str = knob(
        "", "a .jsonl file of prompts ('messages' or 'instruction', and 'reference') (default: the bundle's)"
    )
    max_prompts: int = knob(64, "most prompts", at_least=1)
    max_new_tokens: int = with_default(ReplyOptions, "max_new_tokens", 64)
    draft_length: int = knob(5, "draft tokens in a block (γ)", at_least=1, at_most=MAX_DRAFT)
    seed: int = knob(0, "seed of the sampling", at_least=0, at_most=2**63 - 1)
    repeats: int = knob(
        1,
        "runs of every prompt by every rule, each with a seed of its own; the median pace counts",
        at_least=1,
    )
    seconds: float = knob(
        300.0, f"time to spend: as many prompts as fit in, at least {LEAST_PROMPTS}", at_least=0.0
    )
    title: str = knob("", "heading of the report (default: the prompts' name)")
    json: str = json_knob()
    plot: str = knob("", "draw quality against latency and rejection rate into this PNG file")
    markdown: str = knob("", "write the report to this Markdown file")
    render: tuple[str, ...] | None = knob(
        None, "measure nothing: report what these files of --json hold, with a picture for each beside --plot"
    )


@dataclass(frozen=True)
class Prompt:
    messages: list[Message]
    reference: str | None = None


def prompts_of(path: Path, metrics: Sequence[str], most: int) -> list[Prompt]:
    """The first prompts of a file. Raises InputError naming the row whose reference is missing or of no use to a metric."""
    found = []
    rows = zip(read_chats(path), read_jsonl(path), strict=True)
    for number, (messages, row) in enumerate(list(rows)[:most], 1):
        reference = row.get("reference")
        if reference is not None and not isinstance(reference, str):
            raise InputError(f"{path}: row {number} has the reference {reference!r}; it must be a string")
        wanting = sorted(set(metrics) - {AGREEMENT})
        if wanting and reference is None:
            raise InputError(
                f"{path}: row {number} has no 'reference', and {wanting[0]} compares with it; "
                f"add it to every row or choose --metric {AGREEMENT}"
            )
        if EXACT_MATCH in metrics and reference is not None and final_number(reference) is None:
            raise InputError(
                f"{path}: row {number} has the reference {reference!r}, which holds no number; "
                f"{EXACT_MATCH} compares final numbers: choose --metric {ROUGE_2} or {AGREEMENT}"
            )
        found.append(Prompt(messages, reference))
    return found


class Answers:
    """Answers prompts by all arms, and scores the replies."""

    def __init__(self, pair: Pair, options: Options) -> None:
        assert pair.draft is not None  # the bundle was opened with it
        self._pair, self._options = pair, options
        self._alone = replace(pair, target=pair.draft, draft=None)
        self._limit = min(model.engine.context_length for model in pair.models)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids. Raises InputError for a prompt that leaves one of both models no room for a reply."""
        encoded = [self._pair.tokenizer.encode_chat(prompt.messages) for prompt in prompts]
        for number, ids in enumerate(encoded, 1):
            if len(ids) >= self._limit:
                longer = " or load the bundle with a longer --context" * (
                    self._options.most_tokens == self._limit
                )
                raise InputError(
                    f"prompt {number} has {len(ids)} tokens and the shorter context of both models holds {self._limit}; "
                    f"leave it out{longer}"
                )
        return encoded

    def run(self, arm: Arm, ids: Sequence[int], place: Place) -> Run:
        """Answer one prompt once, from empty caches.

        Every place has a seed of its own: with one seed for all, every first token is drawn with the same random number, prompts
        are no independent samples, and an interval over them is too narrow. Arms share the seeds.
        """
        options = self._options
        rule = "lossless" if arm in ENDS else arm.name
        how = DecodingOptions(
            **asdict(Warp.of(options)),
            max_new_tokens=min(options.max_new_tokens, self._limit - len(ids)),
            seed=options.seed + place.prompt * options.repeats + place.repeat,
            draft_length=None if isinstance(rule_of(rule), LoopRule) else options.draft_length,
            rule=rule,
            drafter=MODEL,
        )
        if arm in ENDS:
            return measure(self._alone if arm == SMALL else self._pair, ids, plain(how), PLAIN, place)
        return measure(self._pair, ids, how, options.draft_length, place)

    def scores(
        self, prompt: Prompt, ids: Sequence[int], reply: tuple[int, ...], own: tuple[int, ...]
    ) -> dict[str, float]:
        """Of a reply, by metric; `own`: AR-large's reply to the same prompt."""
        scores = {}
        for metric in self._options.metric:
            if metric != AGREEMENT:
                score = exact_match if metric == EXACT_MATCH else rouge_2
                scores[metric] = score(self._pair.tokenizer.decode(reply), prompt.reference or "")
            elif self._options.temperature == 0:
                scores[metric] = common_prefix(reply, own)
            else:
                scores[metric] = mean_log_probability(self._pair.target, ids, reply)
        return scores

    def trials(self, prompts: Sequence[Prompt], arms: Sequence[Arm]) -> list[Trial]:
        """Answer and score as many prompts as the time allows, with a progress bar."""
        encoded, options = self.encode(prompts), self._options
        for arm in (*ENDS, arms[-1]):  # warm-up: first calls of both engines allocate
            self.run(arm, encoded[0], Place(0, 0))
        trials: list[Trial] = []
        size = len(arms) * options.repeats
        with progress("tradeoff", len(prompts) * size, "runs") as bar:
            start = perf_counter()
            for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
                runs: list[tuple[Arm, Run]] = []
                for repeat in range(options.repeats):
                    for arm in shuffled(arms, index * options.repeats + repeat):
                        runs.append((arm, self.run(arm, ids, Place(index, repeat))))
                        bar.update(1)
                own = next(run.reply for arm, run in runs if arm == LARGE)
                replies = dict.fromkeys(
                    run.reply for _, run in runs
                )  # one that came out twice is scored once
                scores = {reply: self.scores(prompt, ids, reply, own) for reply in replies}
                trials += [Trial(**vars(run), arm=arm.name, scores=scores[run.reply]) for arm, run in runs]
                done = index + 1
                affordable = int(min(options.seconds / ((perf_counter() - start) / done), len(prompts)))
                planned = min(len(prompts), max(LEAST_PROMPTS, affordable, done))
                bar.total = planned * size
                if done >= planned:
                    break
            bar.refresh()
        return trials


def mean_log_probability(model: CachedEngine, prompt: Sequence[int], reply: Sequence[int]) -> float:
    """Mean over the reply's tokens of log p, p at temperature 1 with nothing cut off (nats): it is finite for any reply."""
    model.prefill(prompt[:-1])
    rows = model.read_rows([prompt[-1], *reply[:-1]])
    each = [float(row[token]) - log_total(row) for row, token in zip(rows, reply, strict=True)]
    return sum(each) / len(each)


def study_of(given: dict[str, Any], options: Options) -> Study:
    """Measure. Everything that can be refused is refused before a model is loaded."""
    arms = arms_of(options.rules, options.alphas)
    wanting = [metric for metric in options.metric if metric != AGREEMENT]
    if wanting and not options.prompts:
        raise InputError(
            f"{wanting[0]} compares replies with references, and the bundle's own prompts have none; "
            f"give --prompts FILE with a 'reference' in every row, or choose --metric {AGREEMENT}"
        )
    prompts: list[Prompt] = []
    if options.prompts:
        prompts = prompts_of(Path(options.prompts).expanduser(), options.metric, options.max_prompts)
    manifest = open_manifest(Path(options.bundle), hashes=False)
    if options.context is None:  # chat takes the device's too
        options = replace(options, context=manifest.device.get("context"))
    with closing(open_pair(Path(options.bundle), options, manifest=manifest)) as pair:
        if pair.manifest.drafter.kind == HEAD:
            raise InputError(
                f"the drafter of {options.bundle} is a head, which cannot write alone, and tradeoff compares both models; give a "
                "bundle whose drafter is a model"
            )
        prompts = prompts or [Prompt(chat) for chat in pair.prompts()[: options.max_prompts]]
        share = free_share(pair.threads)
        trials = Answers(pair, options).trials(prompts, arms)
        share = min(share, free_share(pair.threads))
        about = {
            "title": options.title or Path(options.prompts or "prompts").stem,
            **provenance("tradeoff", given),
            "pair": f"{pair.manifest.target.name} with {pair.manifest.drafter.name}",
            "engine": f"{pair.backend} {engine_version(pair.backend)}".strip(),
            "precision": pair.precision,
            "threads": pair.threads,
            "free_share": round(share, 2),
            "block_against_single_steps": str(pair.measured_exactness()),
            "options": to_mapping(options),
        }
    return Study(about, tuple(arms), tuple(trials))


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    if bool(options.bundle) == bool(options.render):
        raise InputError("give either a BUNDLE to measure, or --render FILE.json,... to report again")
    if options.render and (options.json or options.title):
        raise InputError(
            "--json and --title have no effect with --render, which measures nothing; leave one of them out"
        )
    check_place(options.markdown)
    if options.plot:
        require_matplotlib()
    if options.render:
        found = [_kept(name) for name in options.render]
    else:
        study = study_of(given, options)
        found = [(study, summarise(study))]
    for one in found:
        print(harmless(text(*one)), end="\n\n", flush=True)  # a file to --render may be a stranger's
    if options.json:
        write_result(options.json, as_json(*found[0]), compact_json)
    _write(options, found)
    return 0


def _kept(name: str) -> tuple[Study, list[Summary]]:
    """The study in a file of --json, and its summaries. Raises InputError, also where something within is of another form."""
    study = from_json(read_json(Path(name).expanduser()), name)
    try:
        summaries = summarise(study)
        document([(study, summaries, "")])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{name} holds a trade-off study of another form ({type(error).__name__}: {error!s:.80}); measure it again with "
            "--json"
        ) from error
    return study, summaries


def _write(options: Options, found: Sequence[tuple[Study, list[Summary]]]) -> None:
    """Pictures, and the page that links them."""
    pages = []
    page = Path(options.markdown).expanduser()
    names = [Path(name).stem for name in options.render or ()]
    if len(set(names)) < len(names):  # files of several folders
        names = [f"{number}-{name}" for number, name in enumerate(names, 1)]
    for place, (study, summaries) in enumerate(found):
        link = ""
        if options.plot:
            picture = Path(options.plot).expanduser()
            if len(names) > 1:
                picture = picture.with_name(f"{picture.stem}-{names[place]}{picture.suffix}")
            plot_tradeoff(picture, study, summaries)
            link = link_to(str(picture), str(page))
            note(f"wrote {picture}")
        pages.append((study, summaries, link))
    if options.markdown:
        write_text(page, document(pages))
        note(f"wrote {options.markdown}")


def link_to(picture: str, page: str, system: Any = os.path) -> str:
    """How a page names a picture: from the page's folder, or by its whole path where Windows has them on two drives."""
    try:
        found: str = system.relpath(picture, system.dirname(page) or ".")
    except ValueError:
        found = system.abspath(picture)
    return found.replace(system.sep, "/")
