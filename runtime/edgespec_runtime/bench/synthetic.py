"""What this machine would reach with a model of a real size: random weights of its true shape, acceptance replayed from a rate.

Both models make every pass that speculative decoding makes, in the real loop; only whether a draft token stays is drawn from a
given acceptance rate α, since random weights agree on nothing. Knows no file formats: the export room makes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError, InputError, did_you_mean
from edgespec.core.manifest import ROLES
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping, knob, with_default
from edgespec.core.output import write_result
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.drafter import cost_ratios
from edgespec_runtime.bench import bench
from edgespec_runtime.bench.report import LEAST_PROMPTS
from edgespec_runtime.bench.synthetic_report import Arm, Run, Section, Trace, as_json, text
from edgespec_runtime.chooser.adaptive import AdaptiveSchedule
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.kept_costs import BUSY, Subject, outline, store_costs
from edgespec_runtime.chooser.pass_costs import LONGEST_PASS, Costs
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, ReplyOptions, plain
from edgespec_runtime.decoding.schedule import FROM_MODEL, Fixed, Outcome, Schedule
from edgespec_runtime.decoding.speed import TimedEngine, shuffled
from edgespec_runtime.engines.device import free_share
from edgespec_runtime.engines.engine import Engine, default_threads
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.pair.bundle import ONE_THREAD_BELOW, kernels, load_engine
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Position, TokenRule
from edgespec_runtime.rules.table import LOSSLESS

LEAST_ROUNDS = LEAST_PROMPTS  # a round counts as a prompt does, and intervals of fewer are too narrow
TEMPERATURES = (0.0, 1.0)
WARM_UP_TOKENS = 8
PRECISIONS = {LLAMACPP: ("q4_0", "q8_0", "f16"), ONNXRUNTIME: ("int4", "fp32")}
USUAL = ((LLAMACPP, "q4_0"), (LLAMACPP, "q8_0"), (ONNXRUNTIME, "int4"))  # where nothing is asked for
# Knobs of `bench` that say something here too; the others speak of a bundle, its prompts and who drafts.
SHARED = frozenset(
    {"engine", "precision", "context", "threads", "flash_attention", "temperature", "top_k", "top_p", "min_p"}
    | {"draft_lengths", "max_new_tokens", "seed", "seconds", "json", "markdown", "mode"}
    | {"max_draft_length"}
)


@dataclass(frozen=True, kw_only=True)
class Options(bench.Options):
    bundle: str = with_default(bench.Options, "bundle", "")
    synthetic: str = knob(
        "",
        "instead of a bundle: random weights of the shapes of this target (an alias or a folder with a config.json) and its "
        "drafter, with the acceptance rates of --alphas. Runs every usual engine and precision, temperatures 0 and 1, and draft "
        "lengths chosen from measured costs, unless you give these; takes --seconds for each",
    )
    alphas: tuple[float, ...] = knob(
        (0.5, 0.6, 0.7, 0.8, 0.9), "with --synthetic: acceptance rates to replay", at_least=0.0, at_most=1.0
    )
    alphas_by_position: tuple[float, ...] = knob(
        (),
        "with --synthetic: also a run with these acceptance rates of a block's first, second ... draft token; the last rate "
        "holds for all later ones",
        at_least=0.0,
        at_most=1.0,
    )
    prompt_tokens: int = knob(128, "with --synthetic: length of the prompt", at_least=1)


OWN = frozenset(one.name for one in fields(Options)) - frozenset(one.name for one in fields(bench.Options))


@dataclass(frozen=True)
class SyntheticPair:
    """Files of random weights. `shapes`, `paths`, `streamed_bytes` (read for one token): by role, target and drafter.

    `fast_graphs`: by role, the graph in its folder that rounds activations; empty where the precision has none.
    """

    name: str
    engine: str
    precision: str
    shapes: Mapping[str, ModelShape]
    paths: Mapping[str, Path]
    streamed_bytes: Mapping[str, int]
    fast_graphs: Mapping[str, Path] = field(default_factory=dict)

    @property
    def cost_ratios(self) -> dict[str, float]:
        """c by parameters and by bytes streamed for a token."""
        ratios = cost_ratios(self.shapes["target"], self.shapes["drafter"])
        streamed = self.streamed_bytes["drafter"] / self.streamed_bytes["target"]
        return {"parameters": ratios["parameters"], "bytes": streamed}


Build = Callable[[str, str, str], SyntheticPair]


class Replay(Schedule):
    """A schedule and a rule that together accept with given rates, whatever the models say.

    The rule does all that the lossless one does and then ignores its verdict, so that a block costs what it costs in earnest. A
    rejected token is replaced by a draw from the lossless residual; which tokens come out has no meaning.

    Args:
        rates: acceptance rate at each position of a block, independent of each other; the last one holds for all further ones.
        schedule: chooses the draft lengths.
    """

    def __init__(self, rates: Sequence[float], schedule: Schedule) -> None:
        self._rates, self._schedule, self._position = tuple(rates), schedule, 0
        self.rule = TokenRule(accept=self._accept, residual=LOSSLESS_RULE.residual)

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        self._position = 0  # asked once, at the beginning of every block
        length = self._schedule.draft_length(context, room, origins)
        self.origin = self._schedule.origin
        return length

    def pass_length(self, count: int) -> int:
        return self._schedule.pass_length(count)

    def observe(self, outcome: Outcome) -> None:
        self._schedule.observe(outcome)

    def _accept(self, position: Position, token: int) -> float:
        LOSSLESS_RULE.accept(position, token)
        rate = self._rates[min(self._position, len(self._rates) - 1)]
        self._position += 1
        return rate


def run(given: dict[str, Any], build: Build) -> int:
    """The bench of `--synthetic NAME`. `build` (name, engine, precision) makes or finds the files.

    Raises InputError: an option that has no effect here; no engine and precision that can be run, with the reason of the first.
    """
    options = from_mapping(Options, given)
    options = replace(options, mode=options.mode or EXACT)
    strange = sorted(set(given) - SHARED - OWN)
    if strange:
        raise InputError(
            f"{strange[0].replace('_', '-')} has no effect with --synthetic, which has no bundle and no prompts; leave it out"
        )
    temperatures = (options.temperature,) if "temperature" in given else TEMPERATURES
    lengths: tuple[int | None, ...] = options.draft_lengths if "draft_lengths" in given else (None,)
    sections: list[Section] = []
    failures: list[tuple[str, EdgespecError]] = []
    ways = ways_of(options)
    for engine, precision in ways:
        try:
            pair = build(options.synthetic, engine, precision)
            for section in measure(pair, options, temperatures, lengths):
                sections.append(section)
                print(text(section, markdown=options.markdown), end="\n\n", flush=True)
        except EdgespecError as failure:
            failures.append((f"{engine} {precision}", failure))
    if not sections:
        raise failures[0][1]
    for name, error in failures:
        print(f"{name} is left out: {error}")
    write_result(options.json, as_json(sections, {name: str(error) for name, error in failures}))
    return 0


def ways_of(options: Options) -> list[tuple[str, str]]:
    """The engines and precisions to measure. Raises InputError where what was asked for does not exist."""
    engine, precision = options.engine, options.precision
    if engine not in ("", *PRECISIONS):
        raise InputError(
            f"there are no synthetic files for the engine {engine!r}{did_you_mean(engine, PRECISIONS)}"
        )
    if not precision:
        return [way for way in USUAL if engine in ("", way[0])]
    offered = {name: which for which, names in PRECISIONS.items() for name in names if engine in ("", which)}
    if precision not in offered:
        raise InputError(f"there are no synthetic files in {precision!r}{did_you_mean(precision, offered)}")
    return [(offered[precision], precision)]


def measure(
    pair: SyntheticPair, options: Options, temperatures: Sequence[float], lengths: Sequence[int | None]
) -> Iterator[Section]:
    """Load the pair, measure its costs and run it at each temperature; both models are freed at the end.

    lengths: draft lengths to run every trace with; None is the schedule's choice.
    """
    threads = options.threads or default_threads()
    needed = options.prompt_tokens + options.max_new_tokens + LONGEST_PASS
    context = options.context or needed
    longest = min(shape.context_length for shape in pair.shapes.values())
    if not needed <= context <= longest:
        raise InputError(
            f"prompt, reply and draft take {needed} tokens, the context is {context} and the model's {longest}; give fewer "
            "--prompt-tokens and --max-new-tokens, or another --context"
        )
    with ExitStack() as opened:
        target, draft = (
            TimedEngine(opened.enter_context(closing(_load(pair, role, options, context, threads))))
            for role in ROLES
        )
        how = CalibrateOptions(options.seconds, (options.prompt_tokens + options.max_new_tokens // 2,))
        costs = calibrate(target, draft, how, min(options.max_draft_length + 1, LONGEST_PASS))
        if options.mode == EXACT and free_share(threads) >= BUSY:  # beside other programs it would be wrong
            subject = Subject(
                shapes={role: outline(shape) for role, shape in pair.shapes.items()},
                files={},
                engine=pair.engine,
                precision=pair.precision,
                threads=threads,
                flash_attention=options.flash_attention,
                context_length=context,
            )
            store_costs(subject, costs, options.seconds)
        traces: list[Trace] = [*((alpha,) for alpha in options.alphas), options.alphas_by_position]
        arms = [Arm(trace, length) for trace in filter(None, traces) for length in lengths]
        for temperature in temperatures:
            at = replace(options, temperature=temperature)
            runs = _rounds(pair, target, draft, at, costs, arms)
            yield Section(
                name=pair.name,
                engine=pair.engine,
                precision=pair.precision,
                mode=options.mode,
                temperature=temperature,
                threads=threads,
                parameters={role: shape.parameters for role, shape in pair.shapes.items()},
                streamed_bytes=dict(pair.streamed_bytes),
                cost_ratios=pair.cost_ratios,
                costs=costs,
                runs=tuple(runs),
            )


def _load(pair: SyntheticPair, role: str, options: Options, context: int, threads: int) -> Engine:
    """One model in the mode asked for."""
    fast_graph, fast = pair.fast_graphs.get(role), options.mode == FAST
    graph, flash_attention = kernels(pair.engine, role, fast_graph, options.flash_attention, fast=fast)
    own = 1 if pair.shapes[role].parameters < ONE_THREAD_BELOW[role] else threads
    return load_engine(pair.engine, pair.paths[role], context, own, flash_attention, graph)


def _schedule(arm: Arm, costs: Costs, longest: int) -> AdaptiveSchedule | Fixed:
    if arm.draft_length is not None:
        return Fixed(arm.draft_length)
    return AdaptiveSchedule(costs, sum(arm.trace) / len(arm.trace), most=longest)


def _rounds(
    pair: SyntheticPair,
    target: TimedEngine,
    draft: TimedEngine,
    options: Options,
    costs: Costs,
    arms: Sequence[Arm],
) -> list[Run]:
    """Plain decoding and every arm, one after the other in an order of its own in every round.

    All runs have the same prompt, which the caches keep: it is read once, in the warm-up, and all passes of a run are decoding.
    """
    generator = np.random.default_rng(options.seed or 0)
    prompt: list[int] = generator.integers(
        0, pair.shapes["target"].vocab_size, options.prompt_tokens
    ).tolist()
    shared = {one.name: getattr(options, one.name) for one in fields(ReplyOptions)}
    # random tokens: there is nothing to copy; and plain decoding draws as the arms do
    how = replace(DecodingOptions(**shared), drafter=MODEL, rule=LOSSLESS)
    schedules = {arm: _schedule(arm, costs, options.max_draft_length) for arm in arms}

    def once(arm: Arm | None, turn: int, tokens: int) -> Run:
        counts, before = RawCounts(), target.seconds + draft.seconds
        one = replace(how, max_new_tokens=tokens, seed=(options.seed or 0) + turn)
        if arm is None:
            blocks = decode(target, None, prompt, plain(one), (), counts)
        else:
            replay = Replay(arm.trace, schedules[arm])
            blocks = decode(target, draft, prompt, one, (), counts, replay, replay.rule)
        for _ in blocks:
            pass
        return Run(arm, turn, counts, target.seconds + draft.seconds - before)

    every = [None, *arms]
    for arm in (None, arms[-1]):  # the first calls allocate, and read the prompt
        once(arm, 0, min(WARM_UP_TOKENS, options.max_new_tokens))
    runs: list[Run] = []
    start = perf_counter()
    label = f"{pair.engine} {pair.precision} T={options.temperature:g}"
    with progress(label, LEAST_ROUNDS, "rounds") as bar:
        turn = 0
        while turn < LEAST_ROUNDS or perf_counter() - start < options.seconds * (turn / (turn + 1)):
            order = shuffled(range(len(every)), turn)
            made = {place: once(every[place], turn, options.max_new_tokens) for place in order}
            runs += [made[place] for place in range(len(every))]  # reports name the arms in this order
            turn += 1
            fitting = int(options.seconds * turn / (perf_counter() - start))
            bar.total = max(turn, LEAST_ROUNDS, fitting)
            bar.update(1)
    return runs
