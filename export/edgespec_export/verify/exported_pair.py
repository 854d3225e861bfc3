"""α and τ of an exported pair, split by cause: what rounding the drafter costs, what rounding the target costs, and both.

Each engine runs four pairs of files: float target and float drafter, one of them quantised, both quantised. Every pair decodes
the same prompts for real (empirical α and τ). Then its two files read one text, the float target's for all four pairs
(teacher-forced α, the mean of Σ min(p, q): 1 − TVD): on the same positions a difference of 0.01 shows that would drown in texts
of their own. Without float files each pair reads what it wrote. All pairs are lossless; what differs is how often the drafter is
right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine, context_for
from edgespec_runtime.engines.vocabulary import SubsetEngine, Vocabulary, vocabulary_of
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.rules.sampling import Warp, warp
from edgespec_runtime.rules.table import LOSSLESS

from edgespec.core.files import read_json
from edgespec.core.metrics import RawCounts, expected_acceptance
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import own_file
from edgespec_export.formats.export import ExportedFile, exported_files
from edgespec_export.verify.file_check import has_engine, open_file

# the first of these that is there is an engine's float pair
FLOAT = {"onnxruntime": ("fp32", "fp16"), "llama.cpp": ("f32", "f16", "bf16"), "static": ("fp32",)}
LEAST = 3  # prompts that are decoded however long they take
FLOAT_PAIR, DRAFTER, TARGET, BOTH = "float pair", "drafter quantised", "target quantised", "both quantised"
# by whether the target and the drafter are quantised
CAUSES = {(False, False): FLOAT_PAIR, (False, True): DRAFTER, (True, False): TARGET, (True, True): BOTH}

Texts = dict[float, list[list[int]]]  # replies by temperature and prompt


@dataclass(frozen=True)
class Trials:
    """What is decoded: prompts as ids of the target, ids that end a reply, and how.

    `seconds`: time for one pair; where the first does not finish all prompts in it, that pair and all others take fewer.
    """

    prompts: Sequence[Sequence[int]]
    stop_ids: frozenset[int]
    max_new_tokens: int = 48
    draft_length: int = 3
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    seconds: float = 60.0


class Trial(NamedTuple):
    """Raw counts of one prompt. `overlap` is Σ_v min(p, q) summed over the `positions` of the text that was read."""

    blocks: int
    emitted: int
    tested: int
    accepted: int
    positions: int
    overlap: float


class Pair(NamedTuple):
    """Two files that run together. `precision` is the one in question, `cause` says which side is quantised.

    `target` and `drafter` are the precisions by which the pairs of these files are named.
    """

    engine: str
    precision: str
    cause: str
    target: str
    drafter: str


def pairs_of(files: Sequence[ExportedFile]) -> list[Pair]:
    """Every pair of files that can be run, each once.

    What the files hold decides: a drafter may be of another precision than its pair. A head has one file, which is beside every
    file of the target and counts as that one: there is no pair with another.
    """
    found, head = [], any(file.is_head for file in files)
    for engine, floats in FLOAT.items():
        held = {(file.role, file.precision): file.held for file in files if file.engine == engine}
        both = [name for role, name in held if role == "target" and ("drafter", name) in held]
        targets = {name: held["target", name] for name in both}
        drafters = targets if head else {name: held["drafter", name] for name in both}
        target, drafter = (_most_exact(side, floats) for side in (targets, drafters))
        pairs = [(target, target, drafter)] if target and drafter else []
        mixed = bool(pairs) and not head
        for name in both:
            pairs += [(name, target, name), (name, name, drafter)] if mixed else []
            pairs.append((name, name, name))
        listed = set()
        for name, first, second in pairs:
            weights = targets[first], drafters[second]
            if weights not in listed:
                listed.add(weights)
                quantised = weights[0] != targets.get(target), weights[1] != drafters.get(drafter)
                found.append(Pair(engine, name, CAUSES[quantised], first, second))
    return found


def _most_exact(held: Mapping[str, str], floats: Sequence[str]) -> str:
    """The name of the pair whose file holds the first of `floats` that is there; '' for none."""
    return next((name for kind in floats for name, own in held.items() if own == kind), "")


def open_models(
    target: ExportedFile,
    drafter: ExportedFile,
    parameters: Mapping[str, int],
    subset: Vocabulary | None,
    opened: ExitStack,
    *,
    longest: int,
    fast: bool = False,
) -> tuple[CachedEngine, CachedEngine]:
    """Both files of a pair; `opened` closes each engine that is open. See `acceptance_by_cause`.

    `longest`: tokens of the longest text. `fast`: the target in its fast mode.
    """
    context = context_for(longest)
    whole = open_file(target, parameters["target"], context, features=drafter.is_head, fast=fast)
    first = CachedEngine(opened.enter_context(closing(whole)))
    second: Engine
    if drafter.is_head:
        assert subset is not None
        second = FeatureEngine(drafter.path, subset, first)
    else:
        second = open_file(drafter, parameters["drafter"], context, role="drafter")
        second = second if subset is None else SubsetEngine(second, subset)
    return first, CachedEngine(opened.enter_context(closing(second)))


def open_first_pair(
    folder: Path, target_folder: Path, drafter_folder: Path, options: ExportOptions, longest: int
) -> tuple[CachedEngine, CachedEngine]:
    """The first pair of an export whose drafter is a head, on its engine, in fast mode; for the caller to close.

    `longest`: tokens of the longest text.
    """
    files = exported_files(folder, options, own_file(target_folder), head=True)
    target, drafter = files[0], next(file for file in files if file.is_head)
    size = ModelShape.from_config(read_json(target_folder / "config.json")).parameters
    with ExitStack() as opened:
        subset = vocabulary_of(drafter_folder)
        pair = open_models(target, drafter, {"target": size}, subset, opened, longest=longest, fast=True)
        opened.pop_all()
    return pair


def acceptance_by_cause(
    files: Sequence[ExportedFile], parameters: dict[str, int], subset: Vocabulary | None, trials: Trials
) -> list[dict[str, Any]]:
    """Run every pair there is. `parameters` by role; `subset`: the tokens the drafter knows, None for all.

    Returns what verify.json has of a pair at a temperature: its names, `temperature`, `draft_length`, and a Trial for every
    prompt in `trials`. Files whose engine is not installed are left out. Raises what an engine raises that cannot open its file.
    """
    at = {(file.engine, file.role, file.precision): file for file in files}
    pairs = pairs_of(list(filter(has_engine, files)))
    runs: list[dict[str, Any]] = []
    prompts = [list(prompt) for prompt in trials.prompts if prompt]
    if not prompts:
        return runs
    longest = max(map(len, prompts)) + trials.max_new_tokens + trials.draft_length + 1
    with progress("acceptance", len(pairs), "pairs") as bar:
        # what each engine's first pair wrote, for as many prompts as it did in time
        texts: dict[str, Texts] = {}
        for pair in pairs:
            engine = pair.engine
            bar.set_postfix_str(f"{engine} {pair.precision}: {pair.cause}")
            with ExitStack() as opened:
                files_of = at[engine, "target", pair.target], at[engine, "drafter", pair.drafter]
                models = open_models(*files_of, parameters, subset, opened, longest=longest)
                limit = min(model.engine.context_length for model in models)
                fitting = [prompt for prompt in prompts if len(prompt) < limit]
                done, wrote = _run_pair(models, fitting, trials, texts.get(engine))
                if pair.cause == FLOAT_PAIR:
                    texts[engine] = wrote
                for temperature, each in done.items():
                    how = {"temperature": temperature, "draft_length": trials.draft_length}
                    runs.append({**pair._asdict(), **how, "trials": each})
            bar.update(1)
    return runs


def _run_pair(
    models: tuple[CachedEngine, CachedEngine],
    prompts: Sequence[list[int]],
    trials: Trials,
    texts: Texts | None,
) -> tuple[dict[float, list[Trial]], Texts]:
    """(counts, replies) of every prompt at every temperature; only as many prompts as there are `texts` to read."""
    found: dict[float, list[Trial]] = {temperature: [] for temperature in trials.temperatures}
    wrote: Texts = {temperature: [] for temperature in trials.temperatures}
    start = time.monotonic()
    for index, prompt in enumerate(prompts):
        late = index >= LEAST and time.monotonic() - start > trials.seconds
        if late if texts is None else index >= len(texts[trials.temperatures[0]]):
            break
        for temperature, each in found.items():
            how = DecodingOptions(
                temperature=temperature,
                max_new_tokens=trials.max_new_tokens,
                seed=trials.seed + index,
                draft_length=trials.draft_length,
                rule=LOSSLESS,
                drafter=MODEL,
            )
            counts = RawCounts()
            blocks = decode(*models, prompt, how, trials.stop_ids, counts)
            reply = [token for block in blocks for token in block.tokens]
            text = reply if texts is None else texts[temperature][index]
            overlap = sum(overlaps(*models, prompt, text, how))
            tested, accepted = sum(counts.tested), sum(counts.accepted)
            each.append(Trial(counts.blocks, counts.emitted, tested, accepted, len(text), overlap))
            wrote[temperature].append(reply)
    return found, wrote


def overlaps(
    target: CachedEngine, draft: CachedEngine, prompt: Sequence[int], reply: Sequence[int], how: Warp
) -> Iterator[float]:
    """Σ_v min(p, q) before each token of the reply, p and q warped alike (DistillSpec Eq. 3)."""
    for model in (target, draft):
        model.prefill(prompt[:-1])
    read = [prompt[-1], *reply[:-1]]
    size = min(target.engine.block_length, draft.engine.block_length)
    for start in range(0, len(read), size):
        piece = read[start : start + size]
        for p_row, q_row in zip(target.forward(piece), draft.forward(piece), strict=True):
            p, q = warp(p_row, how), warp(q_row, how)
            yield float(expected_acceptance(p.probs, q.on(p)))


def trials_of(run: Mapping[str, Any]) -> list[Trial]:
    """The counts of a row of verify.json."""
    return [Trial(*trial) for trial in run["trials"]]
