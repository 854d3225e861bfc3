"""Run a bundle's pair in engines written elsewhere: is the greedy text edgespec's own, and is as much accepted as it should be?

Each engine gets the bundle's own files and settings, and answers held-out prompts greedily with drafts of 3 tokens. Beside it
stands edgespec on the same files: at temperature 0 every engine's rule accepts where two argmaxes agree, so the tokens per pass
should be the same but for the last block of a reply. Above 0 edgespec runs the rule that the engine is known by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, numbered, plain
from edgespec_runtime.engines.exactness import FAST
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair

from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.manifest import Manifest, open_manifest
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, note, write_result
from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec.model_folder.check import check_model
from edgespec_export.other_engines.engines import (
    Answer,
    GenAi,
    LlamaCppPython,
    OtherEngine,
    Transformers,
    until_stop,
)
from edgespec_export.other_engines.llamacpp import SERVER, LlamaServer, LlamaSpeculativeSimple, program_of
from edgespec_export.other_engines.other_engines import CHECKPOINT, DRAFT_LENGTH, GENAI_SETTINGS

GENAI, PYTHON, TRANSFORMERS, BINARY = GenAi.name, LlamaCppPython.name, Transformers.name, "llama.cpp"
ENGINES = (GENAI, PYTHON, BINARY, TRANSFORMERS)


@dataclass(frozen=True, kw_only=True)
class Options:
    bundle: str = knob(
        help="bundle folder; its drafter must have all of the target's tokens, which no ready pair's has",
        positional=True,
    )
    engines: tuple[str, ...] = knob(
        (), "which engines (default: those the bundle and the flags below allow)", choices=ENGINES
    )
    target: str = knob(
        "", "the target's model folder, for transformers; the bundle has only the drafter's weights"
    )
    llama_binary: str = knob(
        "", "path of llama-server or llama-speculative-simple, for llama.cpp's own drafting"
    )
    prompts: int = knob(16, "held-out prompts of the bundle", at_least=1)
    max_new_tokens: int = knob(64, "longest reply in tokens", at_least=2)
    temperature: float = knob(
        0.0, "of both; above 0 texts are drawn and differ, and only the acceptance is compared", at_least=0.0
    )
    json: str = json_knob()


@dataclass(frozen=True)
class Ours:
    """edgespec's own reply to one prompt: its tokens without the stop token, its text, and the counts of speculation."""

    tokens: tuple[int, ...]
    text: str
    counts: RawCounts


@dataclass(frozen=True)
class Compared:
    """One engine on all prompts beside edgespec on the same files; `drawn`: at a temperature above 0."""

    name: str
    files: str
    rule: str
    drawn: bool
    max_new_tokens: int
    answers: list[Answer]
    ours: list[Ours]

    @property
    def same(self) -> int:
        """Prompts with the same greedy text."""
        return sum(same_text(ours, answer) for ours, answer in zip(self.ours, self.answers, strict=True))

    def row(self) -> tuple[str, ...]:
        """Tokens per pass and acceptance of both; for equal texts the engine's passes are taken over edgespec's tokens."""
        mine = RawCounts()
        for one in self.ours:
            mine.add(one.counts)
        # with the stop token, which a reply that was cut does not have
        lengths = [len(answer.tokens) + 1 for answer in self.answers if answer.tokens is not None]
        emitted = sum(min(length, self.max_new_tokens) for length in lengths) if self.drawn else 0
        passes, accepted, drafted, tested = (
            sum(getattr(answer, name) or 0 for answer in self.answers)
            for name in ("passes", "accepted", "drafted", "tested")
        )
        return (
            self.name,
            self.files,
            self.rule,
            "" if self.drawn else f"{self.same}/{len(self.ours)}",
            f"{(emitted or mine.emitted) / passes:.2f}",
            f"{mine.block_efficiency:.2f}",
            f"{accepted / tested:.3f}" if tested else "",
            f"{mine.acceptance_rate:.3f}",
            f"{accepted / drafted:.3f}" if accepted and drafted else "",
            f"{sum(mine.accepted) / mine.drafted:.3f}",
        )


HEADERS = (
    *("engine", "files", "rule here", "same text", "τ", "τ here"),
    *("accepted/tested", "here", "accepted/drafted", "here"),
)


def same_text(ours: Ours, answer: Answer) -> bool:
    """Equal tokens; of an engine that gives text, whether it holds ours (it may go on after, or begin with the prompt)."""
    if answer.tokens is not None:
        return answer.tokens == ours.tokens
    return ours.text.strip() in (answer.text or "")


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    bundle = Path(options.bundle)
    manifest = open_manifest(bundle)
    if manifest.drafter.vocabulary is not None:
        raise InputError(
            f"the drafter of {bundle} has a vocabulary of its own, which only edgespec translates; no other engine runs the pair"
        )
    found = [compare(name, bundle, manifest, options) for name in chosen(options, manifest)]
    print(table(HEADERS, [one.row() for one in found], left=3), flush=True)
    write_result(options.json, [asdict(one) for one in found])
    parted = [one for one in found if not one.drawn and one.same < len(one.ours)]
    if parted:
        names = ", ".join(f"{one.name} ({len(one.ours) - one.same} of {len(one.ours)})" for one in parted)
        raise CheckFailed(f"the greedy text is not edgespec's own in {names}")
    return 0


def chosen(options: Options, manifest: Manifest) -> list[str]:
    """The engines to run, in the order of the table. Raises InputError where one asked for lacks a file or a flag."""
    lacks = {}
    if GENAI_SETTINGS not in manifest.files:
        lacks[GENAI] = f"the bundle has no ONNX pair with a {GENAI_SETTINGS}"
    if not gguf_precision(manifest):
        lacks[PYTHON] = lacks[BINARY] = "the bundle has no pair of GGUF files"
    if not options.llama_binary:
        lacks[BINARY] = "give --llama-binary PATH"
    if not options.target:
        lacks[TRANSFORMERS] = "give --target FOLDER, the target's own weights"
    if not manifest.lists(CHECKPOINT):
        lacks[TRANSFORMERS] = (
            f"the bundle has no {CHECKPOINT}; a device's bundle goes without it: export without --device"
        )
    for name in options.engines or [TRANSFORMERS] * bool(options.target):
        if name in lacks:
            raise InputError(f"{name} cannot run here: {lacks[name]}")
    if options.llama_binary:
        program_of(Path(options.llama_binary).expanduser())
    if options.target:
        check_model(Path(options.target).expanduser(), "the target")
    names = [name for name in ENGINES if name not in lacks and name in (options.engines or ENGINES)]
    if TRANSFORMERS in names:  # it makes as many layers as a stranger's config.json asks for
        check_model(manifest.folder / CHECKPOINT, "the bundle's drafter")
    if not names:
        told = "; ".join(f"{name}: {lack}" for name, lack in lacks.items())
        raise InputError(f"no engine can run this bundle: {told}")
    return names


def compare(name: str, bundle: Path, manifest: Manifest, options: Options) -> Compared:
    """Both on the same files: edgespec first, then the other engine."""
    engine, precision, mode = "llama.cpp", gguf_precision(manifest), ""
    if name == GENAI:  # in bundles made before, its settings name the exact graph whatever the default
        engine, (precision, mode) = "onnxruntime", GenAi.runs(bundle)
    if name == TRANSFORMERS:
        floats, pairs = ("onnxruntime", "fp32"), manifest.pairs()
        engine, precision = floats if floats in pairs else pairs[0]
    how = DecodingOptions(
        temperature=options.temperature,
        seed=0,
        rule="match-greedy" if name in (PYTHON, BINARY) else "lossless",
        drafter=MODEL,
        draft_length=DRAFT_LENGTH,
        max_new_tokens=options.max_new_tokens,
    )
    load = LoadOptions(engine=engine, precision=precision, threads=1, mode=mode)
    with closing(open_pair(bundle, load)) as pair:
        tokenizer, chats = pair.tokenizer, pair.prompts()[: options.prompts]
        prompts = [(tokenizer.encode_chat(chat), tokenizer.render(chat)) for chat in chats]
        shorter = min(model.engine.context_length for model in pair.models)
        prompts = with_room(prompts, how.max_new_tokens, shorter)
        ours = [reply_of(pair, ids, numbered(how, at)) for at, (ids, _) in enumerate(prompts)]
        stops, context = frozenset(tokenizer.stop_ids), pair.target.engine.context_length
    answers = []
    with (
        open_other(name, bundle, manifest, options, stops, context) as other,
        progress(other.name, len(prompts), "prompts") as bar,
    ):
        for at, (ids, rendered) in enumerate(prompts):
            answers.append(other.answer(ids, rendered, numbered(how, at)))
            bar.update(1)
        files = f"{engine} {precision}" + (f" {FAST}" if mode == FAST else "")
        drawn = how.temperature > 0
        return Compared(other.name, files, how.rule_name, drawn, how.max_new_tokens, answers, ours)


def with_room(
    prompts: Sequence[tuple[list[int], str]], new: int, context: int
) -> list[tuple[list[int], str]]:
    """The prompts that leave room for so many new tokens: at the end of a context other engines raise errors of their own.

    Raises InputError where none does.
    """
    found = [one for one in prompts if len(one[0]) + new <= context]
    if not found:
        raise InputError(
            f"none of the {len(prompts)} prompts leaves room for {new} new tokens in a context of {context}; give fewer with "
            "--max-new-tokens"
        )
    if left := len(prompts) - len(found):
        note(f"Note: {left} of {len(prompts)} prompts left out: no room for {new} new tokens behind them")
    return found


def open_other(
    name: str, bundle: Path, manifest: Manifest, options: Options, stops: frozenset[int], context: int
) -> OtherEngine:
    if name == GENAI:
        return GenAi(bundle, stops)
    if name == TRANSFORMERS:
        return Transformers(bundle, Path(options.target).expanduser(), stops)
    precision = gguf_precision(manifest)
    target, drafter = (
        bundle / model.files["llama.cpp"][precision] for model in (manifest.target, manifest.drafter)
    )
    if name == PYTHON:
        return LlamaCppPython(target, drafter, stops, context)
    path = Path(options.llama_binary).expanduser()
    if program_of(path) == SERVER:
        return LlamaServer(path, target, drafter, context, stops)
    return LlamaSpeculativeSimple(path, target, drafter, context)


def gguf_precision(manifest: Manifest) -> str:
    """Q8_0 where the pair has it, which llama.cpp runs exactly; else the first."""
    names = [precision for engine, precision in manifest.pairs() if engine == "llama.cpp"]
    return "q8_0" if "q8_0" in names else (names or [""])[0]


def reply_of(pair: Pair, prompt: Sequence[int], how: DecodingOptions) -> Ours:
    """edgespec's reply without a drafter, and the counts of its speculation."""

    def tokens(how: DecodingOptions, counts: RawCounts) -> list[int]:
        blocks = decode(pair.target, pair.draft, prompt, how, pair.tokenizer.stop_ids, counts)
        return [token for block in blocks for token in block.tokens]

    counts = RawCounts()
    kept = until_stop(tokens(plain(how), RawCounts()), frozenset(pair.tokenizer.stop_ids))
    tokens(how, counts)
    return Ours(kept, pair.tokenizer.decode(kept), counts)
