"""Open a bundle: check it, load the pair on one engine and the tokenizer both share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError, InputError, did_you_mean
from edgespec.core.files import read_json
from edgespec.core.manifest import AGAIN, HEAD, ROLES, BundleFile, Manifest, open_manifest
from edgespec.core.options import knob
from edgespec.core.progress import MIB, reading
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME, OPENVINO, STATIC
from edgespec.recipe.precisions import precision_names
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine, default_threads
from edgespec_runtime.engines.exactness import EXACT, FAST, MODES, Exactness, Way, exactness_of
from edgespec_runtime.engines.vocabulary import SubsetEngine, Vocabulary, read_vocabulary
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.text.prompts import bundled_chats
from edgespec_runtime.text.tokenizer import ChatTokenizer, Message

# ONNX precisions with a faster kernel, one that rounds activations; fp32 and fp16 have one kernel only.
ROUNDED = frozenset({"int4", "int8", "mixed"})
WIDENED = frozenset({"fp16", "int8"})  # small in the file, float32 in memory (int8: in exact mode)
# A model this small gains little from a second thread, and a drafter's waiting threads take the cores from the target's. On ONNX
# Runtime and two cores, γ = 3, a pair is 2.0x as fast with its drafter on one thread at 13.9M with 0.3M (fp32), 1.7x at 134.8M
# with 5M (int4): benchmarks/speed/session_threads.py. Larger drafters were not measured.
ONE_THREAD_BELOW = {"target": 1_000_000, "drafter": 10_000_000}

# llama.cpp takes the memory of the whole context at once: 16 GiB for the 131,072 tokens of an 8B model, 1 GiB for these
USUAL_CONTEXT = 8192


@dataclass(frozen=True)
class LoadOptions:
    engine: str = knob(
        "", "engine (default: the bundle's)", choices=("", ONNXRUNTIME, LLAMACPP, STATIC, OPENVINO)
    )
    precision: str = knob(
        "", "precision of both models: {names} (default: the bundle's)", names=precision_names
    )
    context: int | None = knob(
        None,
        f"length of the context in tokens (default: the bundle's device's, else the model's up to {USUAL_CONTEXT})",
        at_least=2,
    )
    threads: int | None = knob(None, "compute threads (default: all processors)", at_least=1)
    flash_attention: bool | None = knob(
        None,
        "attention kernel of llama.cpp, whatever the mode (default: on for quantised weights in exact mode, where it makes "
        "blocks exact)",
    )
    mode: str = knob(
        "",
        "exact: the logits of a block are those of single steps; fast: cheaper kernels, which can change a reply at a near tie "
        "(default: exact, or fast where exact kernels slow plain decoding)",
        choices=("", *MODES),
    )

    @property
    def most_tokens(self) -> int:
        """The length of the context, where the model's own is not shorter."""
        return self.context or USUAL_CONTEXT


@dataclass
class Pair:
    """A loaded bundle. `cost_ratios`: c by parameters and by bytes streamed per token at this precision in this mode.

    `threads` are those asked for or, unasked, all processors; a small drafter or target runs on one of them. `mode` is the one
    asked for; `exactness` says what came of it. `backend`: what computes a pass, which for static graphs may be OpenVINO.
    """

    target: CachedEngine
    draft: CachedEngine | None
    tokenizer: ChatTokenizer
    manifest: Manifest
    engine: str
    precision: str
    cost_ratios: dict[str, float]
    threads: int
    backend: str
    mode: str = EXACT

    @property
    def fast_graph(self) -> bool:
        """Whether the target runs from its graph of the fast mode; False where it has none."""
        return (
            self.mode == FAST and self.manifest.fast_graph("target", self.engine, self.precision) is not None
        )

    @property
    def flash_attention(self) -> bool | None:
        """Whether the target runs with flash attention; None where the engine has no such choice."""
        return getattr(self.target.engine, "flash_attention", None)

    @property
    def models(self) -> list[CachedEngine]:
        """The target, and the drafter where it is loaded."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    def about_context(self, asked: int | None) -> str:
        """That the context is shorter than the model's own though nobody `asked` for that, in words; '' elsewhere."""
        here, own = self.target.engine.context_length, self.manifest.target.shape.get("context_length")
        shorter = asked is None and type(own) is int and own > USUAL_CONTEXT
        return f"texts of {here} tokens at most; the model knows {own} (--context)" if shorter else ""

    def close(self) -> None:
        """Free both models."""
        for model in self.models:
            model.engine.close()

    def prompts(self) -> list[list[Message]]:
        """The held-out chats that travel in the bundle."""
        return bundled_chats(self.manifest)

    def measured_exactness(self) -> Exactness:
        """The mode, and how far a block's target logits were from those of single steps where the bundle was made."""
        way = Way(
            self.mode,
            self.backend,
            self.precision,
            fast_graph=self.fast_graph,
            flash_attention=self.flash_attention,
            float_weights=getattr(self.target.engine, "float_weights", False),
            rope_border=self.target.rope_border,
        )
        verification: Any = None
        if self.manifest.folder is not None and "verify.json" in self.manifest.files:
            verification = read_json(self.manifest.folder / "verify.json")
        return exactness_of(way, verification if isinstance(verification, dict) else {})


def load_engine(
    engine: str,
    path: Path,
    context: int | None,
    threads: int | None,
    flash_attention: bool | None = None,
    graph: Path | None = None,
    features: bool = False,
) -> Engine:
    """One model file or folder on one engine; `graph`: run this graph of an ONNX folder instead of its usual one.

    `features`: llama.cpp gives hidden states too, for a drafter that is a head; an ONNX graph gives them if it was exported so.

    Raises InputError for an unknown engine, or where flash attention is asked of one without that choice.
    """
    if engine == LLAMACPP:
        from edgespec_runtime.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine(path, context, threads, flash_attention, features)
    if flash_attention is not None:
        raise InputError(
            f"flash_attention is {'on' if flash_attention else 'off'}, and {engine} has no such choice; "
            f"leave it out or give --engine {LLAMACPP}"
        )
    if engine in (STATIC, OPENVINO):
        from edgespec_runtime.engines.static import StaticEngine

        backend = OPENVINO if engine == OPENVINO else ONNXRUNTIME
        return StaticEngine(path, threads=threads, backend=backend, context_length=context)
    if engine != ONNXRUNTIME:
        known = (ONNXRUNTIME, LLAMACPP, STATIC, OPENVINO)
        raise InputError(f"no engine is called {engine!r}{did_you_mean(engine, known)}")
    from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(path, context_length=context, threads=threads, graph=graph)


def kernels(
    engine: str, role: str, fast_graph: Path | None, flash_attention: bool | None, *, fast: bool
) -> tuple[Path | None, bool | None]:
    """What a mode means for a model: (the graph of an ONNX folder, None for its usual one; llama.cpp's flash attention).

    A drafter runs from its fast graph in either mode: q is whatever its logits say, and the rule holds for every q.
    """
    if fast and engine == LLAMACPP and flash_attention is None:
        flash_attention = False
    return fast_graph if fast or role == "drafter" else None, flash_attention


def load_model(
    manifest: Manifest, role: str, engine: str, precision: str, options: LoadOptions, threads: int
) -> Engine:
    """One model of a bundle in the mode asked for. Raises InputError where its files have no graph for it."""
    path = manifest.model_path(role, engine, precision)
    if engine == STATIC and options.engine == OPENVINO:
        engine = OPENVINO
    fast = options.mode == FAST
    fast_graph = manifest.fast_graph(role, engine, precision) if engine == ONNXRUNTIME else None
    if fast and role == "target" and fast_graph is None and engine == ONNXRUNTIME and precision in ROUNDED:
        raise InputError(
            f"mode is {FAST!r}, and the bundle's {precision} target has no graph for it (it was made before there was one); "
            f"build the bundle again, or leave --mode at {EXACT}"
        )
    graph, flash_attention = kernels(engine, role, fast_graph, options.flash_attention, fast=fast)
    features = role == "target" and manifest.drafter.kind == HEAD
    return load_engine(engine, path, options.most_tokens, threads, flash_attention, graph, features)


def _choose(manifest: Manifest, options: LoadOptions) -> tuple[str, str]:
    """Engine and precision: what was asked for, else the bundle's default, else the first the bundle has for that engine."""
    pairs, usual = manifest.pairs(), manifest.default["precision"]
    engine = STATIC if options.engine == OPENVINO else options.engine or manifest.default["engine"]
    precision = options.precision
    if precision and not options.engine and (engine, precision) not in pairs:
        engine = next((name for name, held in pairs if held == precision), engine)
    offered = [held for name, held in pairs if name == engine]
    if not offered:
        raise InputError(
            f"the bundle has no pair for engine {engine!r}{did_you_mean(engine, {name for name, _ in pairs})}"
        )
    precision = precision or (usual if usual in offered else offered[0])
    if precision not in offered:
        raise InputError(
            f"the bundle has no {precision!r} pair for {engine}{did_you_mean(precision, offered)}"
        )
    return engine, precision


def usual_mode(default: Mapping[str, Any], engine: str, precision: str) -> str:
    """Fast for the files whose exact kernels would slow plain decoding, as timed where the bundle was made; else exact.

    `default`: the manifest's.
    """
    return FAST if f"{engine}/{precision}" in str(default.get("fast", "")).split() else EXACT


def _drafters_vocabulary(manifest: Manifest, target: Engine) -> Vocabulary | None:
    """The subset of the target's tokens that the drafter knows; None where it knows them all.

    Raises BundleError where it is of another target: its numbers size memory.
    """
    name = manifest.drafter.vocabulary
    if name is None or manifest.folder is None:
        return None
    vocabulary = read_vocabulary(manifest.folder / name)
    if vocabulary.target_vocab_size != target.vocab_size:
        raise BundleError(
            f"{manifest.folder / name} is of a target with {vocabulary.target_vocab_size} tokens, this pair's has "
            f"{target.vocab_size}; {AGAIN}"
        )
    return vocabulary


def _needed(manifest: Manifest, engine: str, precision: str) -> dict[str, BundleFile]:
    """The listed files of a pair: all but the models of other engines and precisions, which may be many times as large."""
    own, others = set[str](), set[str]()
    for role in ROLES:
        for other, table in manifest.model(role).files.items():
            for one in table:
                found = own if (other, one) == (engine, precision) else others
                found.update(manifest.files_of(role, other, one, fast=True))
    return {name: entry for name, entry in manifest.files.items() if name in own or name not in others}


def open_pair(
    folder: Path, options: LoadOptions, with_draft: bool = True, manifest: Manifest | None = None
) -> Pair:
    """Load target, drafter (unless told not to) and tokenizer of a bundle. `manifest`: the folder's, where it was read already.

    Every file that the pair needs is checked against its sha256; models of other engines and precisions are not read. What was
    opened is closed where the rest cannot be. Raises BundleError for a bundle that is incomplete or altered, InputError for an
    engine or precision it does not have, MissingExtra where the engine's package is absent.
    """
    manifest = manifest or open_manifest(folder, hashes=False)
    engine, precision = _choose(manifest, options)
    options = replace(options, mode=options.mode or usual_mode(manifest.default, engine, precision))
    ratios = manifest.cost_ratios(engine, precision, fast=options.mode == FAST)
    for name in ("tokenizer", *(getattr(manifest, role).files[engine][precision] for role in ROLES)):
        manifest.check_folder(name)
    manifest.check_files(_needed(manifest, engine, precision))
    threads, opened = options.threads or default_threads(), ExitStack()

    def load(role: str) -> Engine:
        own_threads = 1 if manifest.model(role).parameters < ONE_THREAD_BELOW[role] else threads
        model = load_model(manifest, role, engine, precision, options, own_threads)
        return opened.enter_context(closing(model))

    size = sum(file.bytes for file in manifest.files_of("target", engine, precision).values())
    with opened, reading("load the models", size) as bar:  # the drafter is small beside it
        target = CachedEngine(load("target"))
        bar.update(size / MIB)
        draft = None
        if with_draft:
            vocabulary = _drafters_vocabulary(manifest, target.engine)
            if manifest.drafter.kind == HEAD:  # on ONNX Runtime and one thread, whatever the target runs on
                assert vocabulary is not None  # the manifest was checked
                head = manifest.model_path("drafter", engine, precision)
                model: Engine = opened.enter_context(closing(FeatureEngine(head, vocabulary, target)))
            else:
                model = load("drafter")
                model = model if vocabulary is None else SubsetEngine(model, vocabulary)
            draft = CachedEngine(model)
        tokenizer = ChatTokenizer(manifest.folder / "tokenizer")
        opened.pop_all()  # the pair's from now on
    return Pair(
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        manifest=manifest,
        engine=engine,
        precision=precision,
        cost_ratios=ratios,
        threads=threads,
        mode=options.mode,
        backend=OPENVINO if options.engine == OPENVINO else engine,
    )
