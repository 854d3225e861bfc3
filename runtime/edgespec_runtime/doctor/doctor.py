"""Measure what a bundle's models cost on this device, and say whether speculation pays, which limit binds, and how to run it.

The costs of the chosen engine and precision are kept for `chat`; other ways to run the bundle are measured more briefly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError, MissingExtra
from edgespec.core.manifest import HEAD, Manifest, open_manifest
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, write_result
from edgespec.core.progress import progress
from edgespec.core.shapes import told_shape
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME, STATIC
from edgespec.shell.environment import as_typed
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.expected_acceptance import Acceptance, acceptances_of
from edgespec_runtime.chooser.kept_costs import costs_of
from edgespec_runtime.chooser.pass_costs import Costs, CostsAt
from edgespec_runtime.doctor.block_difference import block_difference
from edgespec_runtime.doctor.report import Findings, Threads, Variant, as_json, text
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.device import read_bandwidth, this_device
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.pair.bundle import WIDENED, LoadOptions, Pair, load_model, open_pair

# Shares of the time given; loading and the bandwidth come on top.
CHOSEN, OTHERS, THREADS, EXACTNESS = 0.45, 0.25, 0.15, 0.15
POSITIONS = (8, 256)  # least and most tokens that are fed in blocks and in single steps
PASSES = 2.5  # plain steps it takes to feed one position in single steps and in the four block sizes, roughly
PROMPT_PART = 64  # tokens of a prompt that are compared
MOST_THREADS = 8  # beyond as many cores, only powers of two are tried
CACHE_BYTES = {LLAMACPP: 2}  # of a value in the KV cache; else 4


@dataclass(frozen=True, kw_only=True)
class Options(CalibrateOptions, LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    acceptance: float | None = knob(
        None,
        "acceptance rate α to predict with (default: those of the bundle's evaluation)",
        at_least=0.0,
        at_most=1.0,
    )
    fresh: bool = knob(False, "measure again, also what was kept from an earlier run")
    json: str = json_knob()
    markdown: bool = knob(False, "print Markdown tables")


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    findings = examine(options)
    print(text(findings, markdown=options.markdown))
    write_result(options.json, as_json(findings))
    return 0


def examine(options: Options) -> Findings:
    """Measure everything. Raises what `open_pair` raises."""
    notes: list[str] = []
    values = {field.name: getattr(options, field.name) for field in fields(LoadOptions)}
    asked = {name: value for name, value in values.items() if value != getattr(LoadOptions(), name)}
    manifest = open_manifest(Path(options.bundle))  # it opens every pair
    if options.context is None:  # chat takes the device's too, and looks for costs at that length
        options = replace(options, context=manifest.device.get("context"))
    # before the progress bar: a refusal is one line
    pair = open_pair(Path(options.bundle), options, manifest=manifest)
    with progress("doctor", 4, "parts") as bar:
        with closing(pair):
            bar.set_postfix_str("passes of each length")
            bandwidth = read_bandwidth(pair.threads)
            how = CalibrateOptions(CHOSEN * options.seconds, options.contexts)
            costs, kept = costs_of(pair, how, notes.append, fresh=options.fresh)
            if kept and not {*options.contexts} <= {*costs.contexts, *CalibrateOptions.contexts}:
                costs, kept = calibrate(pair.target, pair.draft, how), False  # at those that were asked for
            bar.update(1)
            bar.set_postfix_str("block against single steps")
            room = min(PROMPT_PART, pair.target.engine.context_length)
            prompts = [pair.tokenizer.encode_chat(chat)[:room] for chat in pair.prompts()]
            notes += border_note(pair)
            chosen = _variant(pair, costs, prompts, EXACTNESS * options.seconds / 2)
            bar.update(1)
        bar.set_postfix_str("other engines and precisions")
        others = _others(pair, chosen, options, prompts, notes)
        bar.update(1)
        bar.set_postfix_str("other numbers of threads")
        counts = () if options.threads else tuple(_thread_counts(pair, options))
        bar.update(1)
    known = acceptances_of(manifest.metrics)
    if options.acceptance is not None:
        known = (Acceptance("as given", options.acceptance),)
    return Findings(
        bundle=as_typed(Path(options.bundle)),
        target=manifest.target.name,
        drafter=manifest.drafter.name,
        device=this_device(),
        bandwidth=bandwidth,
        threads=pair.threads,
        streamed=streamed_bytes(
            manifest, pair.engine, pair.precision, fast=pair.fast_graph, context=chosen.at.context
        ),
        byte_ratio=pair.cost_ratios["bytes"],
        chosen=chosen,
        others=others,
        thread_counts=counts,
        acceptances=known,
        verified=str(pair.measured_exactness()),
        asked=asked,
        kept=kept,
        notes=tuple(notes),
    )


def border_note(pair: Pair) -> list[str]:
    """What a text costs once that grows beyond the target's short RoPE factors; nothing for most models."""
    border = pair.target.rope_border
    if border is None:
        return []
    return [
        f"texts of more than {border:,} tokens take other RoPE factors in the target, so a text is read again, once, where it "
        f"grows beyond that (--context {border} ends it there); costs are measured below it"
    ]


def _variant(pair: Pair, costs: Costs, prompts: Sequence[Sequence[int]], seconds: float) -> Variant:
    """Costs of a loaded pair with the block difference measured on as many tokens as the time allows."""
    affordable = int(seconds / (PASSES * costs.at(costs.contexts[0]).verify(1)))
    positions = min(max(affordable, POSITIONS[0]), POSITIONS[1])
    difference = block_difference(pair.target, prompts, positions)
    return Variant(pair.backend, pair.precision, pair.flash_attention, costs, difference, pair.fast_graph)


def _others(
    pair: Pair, chosen: Variant, options: Options, prompts: Sequence[Sequence[int]], notes: list[str]
) -> tuple[Variant, ...]:
    """The bundle's other engines and precisions, ONNX files in the other mode, and llama.cpp with the other attention kernel."""
    ways: list[LoadOptions] = []
    for engine, precision in pair.manifest.pairs():
        way = LoadOptions(engine, precision, options.context, options.threads)
        if engine == LLAMACPP:
            ways += [replace(way, flash_attention=on) for on in (True, False)]
        elif pair.manifest.fast_graph("target", engine, precision) is not None:
            ways += [replace(way, mode=mode) for mode in (EXACT, FAST)]
        else:
            ways.append(way)
    own = (chosen.engine, chosen.precision, chosen.flash_attention, chosen.fast_graph)
    ways = [way for way in ways if (way.engine, way.precision, way.flash_attention, way.mode == FAST) != own]
    found: list[Variant] = []
    how = CalibrateOptions(OTHERS * options.seconds / max(1, len(ways)), (chosen.at.context,))
    for way in ways:
        try:
            other = open_pair(Path(options.bundle), way, manifest=pair.manifest)
        except EdgespecError as error:
            skipped = way.engine if isinstance(error, MissingExtra) else f"{way.engine} {way.precision}"
            note = f"{skipped} is left out: {str(error).rstrip('.')}"
            if note not in notes:
                notes.append(note)
            continue
        with closing(other):
            costs = calibrate(other.target, other.draft, how)
            found.append(_variant(other, costs, prompts, EXACTNESS * options.seconds / 2 / len(ways)))
    return tuple(found)


def _thread_counts(pair: Pair, options: Options) -> Iterator[Threads]:
    """Target and drafter at every number of threads, each alone; for a user who has not chosen one."""
    cores = default_threads()
    counts = range(1, cores + 1)
    tried = [count for count in counts if cores <= MOST_THREADS or count & (count - 1) == 0 or count == cores]
    if len(tried) == 1:
        return
    context = 32
    how = CalibrateOptions(THREADS * options.seconds / (2 * len(tried)), (context,))
    how_loaded = replace(options, mode=pair.mode)  # the bundle's own where none was asked for

    def measured(role: str, threads: int, longest: int) -> CostsAt:
        model = load_model(pair.manifest, role, pair.engine, pair.precision, how_loaded, threads)
        with closing(model) as engine:
            return calibrate(CachedEngine(engine), None, how, longest).at(context)

    for threads in tried:
        target, is_head = measured("target", threads, 4), pair.manifest.drafter.kind == HEAD
        step = None if is_head else measured("drafter", threads, 1).verify(1)
        yield Threads(threads, target.verify(1), target.verify(4), step)


def streamed_bytes(manifest: Manifest, engine: str, precision: str, *, fast: bool, context: int) -> int:
    """About how many bytes a plain step reads: the target's files, of an embedding of its own one row, and the KV cache."""
    shape = told_shape(manifest.target.shape, "target")
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * context * CACHE_BYTES.get(engine, 4)
    if engine == ONNXRUNTIME and precision in WIDENED and not fast:
        return cache + 4 * shape.streamed_parameters
    files = manifest.files_of("target", engine, precision, fast=fast)
    suffixes = (".gguf", ".onnx", ".data")
    size = sum(file.bytes for name, file in files.items() if name.endswith(suffixes))
    if not shape.tied or engine == STATIC:
        # ONNX keeps it in floats; in GGUF and mixed files its values take about as much as the others
        each = size / shape.parameters if engine == LLAMACPP or precision == "mixed" else 4
        size -= round(each * shape.embedding_parameters)
    return cache + size
