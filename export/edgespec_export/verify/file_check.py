"""One exported file by itself and against given logits: the block, the leak, and the bounds of every precision. No torch.

What is measured of a file, the engines that run it, and the judgement; files.py walks over the files of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.llamacpp import is_available
from edgespec_runtime.pair.bundle import kernels, load_engine

from edgespec.core.shapes import ModelShape
from edgespec_export.answers.quality import Answers, Counts, count
from edgespec_export.formats.export import ExportedFile

SMALL = 50_000_000  # parameters below which a second thread costs more in waiting than it brings on a busy machine
FLOAT_GGUF = frozenset({"f32", "f16", "bf16"})  # no faster attention kernel than the one in use
BLOCK = 4
MAX_PROMPT = 128  # tokens of a prompt that are compared

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bounds:
    """Largest values allowed. Relative: root mean square of the difference over that of the weights or centred logits.

    `block` holds for the leak too. `kl` in nats; None of 3 to 5 bits, where it is told and not bounded: it is the price of the
    size.
    """

    weights: float
    engine: float
    block: float
    kl: float | None = None


# Measured: weights 0 / 2e-4 / 6e-3 / 9e-2; engine 1e-6 / 1e-3 / 3e-2 / 1e-6 on
# random weights (a third of it on trained ones); block 1e-6 / 1e-3 / 0 (flash attention) / 1e-6. llama.cpp rounds activations:
# to F16, and to int8 for Q8_0.
# KL on a trained target of 14M: fp32 8e-13, f32 1e-7 (keys and values are F16), f16 2e-7, bf16 8e-6, int8 6e-5, q8_0 2e-4, q6_k
# 9e-4 (int4 2e-2, q4_k_m 5e-3); the bounds leave room for targets that suffer more.
BOUNDS = {
    "fp32": Bounds(weights=1e-7, engine=1e-4, block=1e-4, kl=1e-6),
    "f16": Bounds(weights=1e-3, engine=3e-3, block=3e-3, kl=1e-3),
    "q8_0": Bounds(weights=2e-2, engine=5e-2, block=1e-4, kl=5e-2),
    "int4": Bounds(weights=2e-1, engine=1e-4, block=1e-4),
    # weights 2e-4 / 5e-3: float arithmetic as fp32
    "fp16": Bounds(weights=1e-3, engine=1e-4, block=1e-4, kl=1e-3),
    "int8": Bounds(weights=2e-2, engine=1e-4, block=1e-4, kl=5e-2),
    # weights 0 / 2e-3 / 1e-1 / 7e-2 / 4e-2 / 2e-2; engine 1e-3 (keys and values are F16) / 1e-2 / 4e-2 to 5e-2
    "f32": Bounds(weights=1e-7, engine=3e-3, block=3e-3, kl=1e-4),
    "bf16": Bounds(weights=5e-3, engine=3e-2, block=1e-2, kl=1e-2),
    "q4_0": Bounds(weights=2e-1, engine=1e-1, block=1e-4),
    "q4_k_m": Bounds(weights=1.5e-1, engine=1e-1, block=1e-4),
    "q5_k_m": Bounds(weights=8e-2, engine=1e-1, block=1e-4),
    "q6_k": Bounds(weights=4e-2, engine=1e-1, block=1e-4, kl=2e-1),
    # weights 1.1e-1 of Q4_1, 8e-2 and 4e-2 of the types of 5 bits; mixed files may have Q4_0 and int4 in any matrix
    "q4_1": Bounds(weights=1.5e-1, engine=1e-1, block=1e-4),
    "q5_0": Bounds(weights=1e-1, engine=1e-1, block=1e-4),
    "q5_1": Bounds(weights=8e-2, engine=1e-1, block=1e-4),
    "q4_k_s": Bounds(weights=1.5e-1, engine=1e-1, block=1e-4),
    "q_mixed": Bounds(weights=2e-1, engine=1e-1, block=1e-4),
    "mixed": Bounds(weights=2e-1, engine=1e-4, block=1e-4),
    # weights 5e-3; engine 7e-3: activations are rounded too
    "head-int8": Bounds(weights=2e-2, engine=5e-2, block=1.0),
    # static graphs: weights 1e-2; engine 1e-1 / 2e-2 of rounded activations; block a step of the rounded logits at most
    "qdq8": Bounds(weights=2e-2, engine=3e-1, block=1e-2),
    "qdq16": Bounds(weights=2e-2, engine=1e-1, block=1e-2),
}


# Of a GGUF type that edgespec does not write, as a file of somebody else's may have: those of its coarsest. The weights are then
# those of the folder that was made from the file.
ANY_GGUF = Bounds(weights=2e-1, engine=1e-1, block=1e-4)

# Of the fast mode's engine difference. Measured: 5e-3 to 9e-3 on trained weights, up to 6e-2 on random ones (as Q8_0, whose
# activations are int8 too), and several times this bound where the graph reads the wrong matrices.
FAST_ENGINE = 1e-1


@dataclass
class FastCheck:
    """What was measured on a file in its fast mode, in the words of FileCheck."""

    engine_relative: float | None = None
    block_largest: float | None = None
    block_relative: float | None = None
    block_flips: int | None = None
    block_leak: float | None = None
    answers: Answers | None = None


@dataclass
class FileCheck:
    """What was measured on one file. Logit differences are absolute unless named relative."""

    role: str
    engine: str
    precision: str
    checked_with: str
    stored: str = ""  # the file's own precision
    weights_relative: float | None = None  # None where there was no model to compare with
    worst_weight: str = ""
    largest: float | None = None  # engine against the float model
    mean: float | None = None
    top1: float | None = None  # share of positions with the same most likely token
    kl: float | None = None  # KL(p of the model ‖ p of the file) in nats, mean over positions, at T = 1
    perplexity: float | None = None  # of the prompts' text under the file, and under the float model
    torch_perplexity: float | None = None
    engine_relative: float | None = None  # engine against torch with the file's weights
    block_largest: float | None = None
    block_relative: float | None = None
    block_flips: int | None = None  # positions whose most likely token changes
    block_leak: float | None = None  # what a block's later tokens do to the logits of its first
    positions: int = 0
    rope_border: int | None = None  # the tokens around it are among those compared; None where there is none
    answers: Answers | None = None  # of a target, on its replies; None where none were compared
    fast: FastCheck | None = None  # None where the file has no fast mode, or the engine is not there
    settings: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Passage(NamedTuple):
    """A text whose logits are compared from its token `start` on."""

    tokens: list[int]
    start: int = 0

    @property
    def compared(self) -> list[int]:
        return self.tokens[self.start :]


def passages_of(prompts: Sequence[list[int]], shape: ModelShape) -> list[Passage]:
    """The beginnings of the prompts; behind them, at a border of `shape`, a block on either side of it.

    The text at the border is made of the prompts, again and again. It is there twice, ending at the border and a block behind it:
    in torch all tokens of a text have the factors of its length.
    """
    found = [Passage(prompt[: min(MAX_PROMPT, shape.context_length)]) for prompt in prompts if prompt]
    border = shape.rope_border
    if border is not None and found:
        length = min(border + BLOCK, shape.context_length)
        text = list(islice(cycle(chain.from_iterable(prompts)), length))
        found += [Passage(text[:border], max(0, border - BLOCK)), Passage(text, border)]
    return found


def has_engine(file: ExportedFile) -> bool:
    """Whether the engine that runs a file is installed here."""
    return file.engine != "llama.cpp" or is_available()


def has_fast_mode(file: ExportedFile) -> bool:
    """Whether a file has faster kernels than those of the exact mode."""
    return file.fast_graph is not None or (file.engine == "llama.cpp" and file.held not in FLOAT_GGUF)


def open_file(
    file: ExportedFile,
    parameters: int,
    context: int,
    *,
    fast: bool = False,
    role: str = "target",
    features: bool = False,
) -> Engine:
    """A file in the exact mode, or in its `fast` one, of a model of so many parameters.

    `role`: as which it runs; a drafter is checked as its target is. `features`: it gives hidden states, for a head.
    """
    graph, attention = kernels(file.engine, role, file.fast_graph, None, fast=fast)
    threads = 1 if parameters < SMALL else None
    return load_engine(file.engine, file.path, context, threads, attention, graph, features)


def relative(difference: float, size: float) -> float:
    return float(np.sqrt(difference / size)) if size else float(np.sqrt(difference))


def note_weight(check: FileCheck, name: str, difference: float, size: float) -> None:
    """Note a tensor that lies farther from the model's than all before it, by sums of squares; NaN is the farthest of all."""
    error = relative(difference, size)
    if np.isnan(error) or error > (check.weights_relative or 0.0):
        check.weights_relative, check.worst_weight = error, name


def noted(
    check: FileCheck,
    weights: Iterable[tuple[str, Array]],
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Callable[[str], Iterable[Array]],
    norm_offset: float = 0.0,
) -> Iterator[tuple[str, Array]]:
    """Those of a file's weights that fit the model's. How far each is off is noted as it passes; at the end, what is absent.

    `shapes` of the model's tensors; `pieces` of rows of one, float32. `norm_offset`: Gemma multiplies by 1 + w and its files hold
    that sum, so w itself has lost its last digits there.
    """
    check.weights_relative = 0.0
    seen = set[str]()
    for name, tensor in weights:
        if shapes.get(name) != tensor.shape:
            check.broken.append(f"tensor {name} has shape {tensor.shape}, the model has {shapes.get(name)}")
            continue
        offset = np.float32(norm_offset if name.endswith("norm.weight") else 0.0)
        difference, size, at = 0.0, 0.0, 0
        for piece in pieces(name):
            lies, should = tensor[at : at + len(piece)] + offset, piece + offset
            difference += float(np.square(lies - should, dtype=np.float64).sum())
            size += float(np.square(should, dtype=np.float64).sum())
            at += len(piece)
        note_weight(check, name, difference, size)
        seen.add(name)
        yield name, tensor
    # an ONNX file goes without biases that are zero
    absent = [
        name
        for name in shapes
        if name not in seen
        and not (name.endswith(".bias") and not any(piece.any() for piece in pieces(name)))
    ]
    if absent:
        check.broken.append(f"{len(absent)} tensors are absent ({min(absent)} ...)")


def compare_engine(
    check: FileCheck | FastCheck,
    engine: Engine,
    passages: Sequence[Passage],
    own: Sequence[Array] | None,
    answer: Callable[[CachedEngine], Answers | None] = lambda model: None,
) -> list[Array]:
    """Run a file on its engine, and close that; the logits of every passage, as far as its context goes.

    `own`: what its weights should give, None where nobody knows. `answer`: what is measured on the target's replies.
    """
    usual, own_parts, block_parts, leaks = (list[Array]() for _ in range(4))
    check.block_flips = 0
    with closing(engine):
        model, room, longest = CachedEngine(engine), engine.context_length, engine.block_length
        size = min(BLOCK, longest)  # static graphs may take fewer
        # One passage in all ways before the next: what comes before its start is read once, and the logits of all passages in
        # all ways would take gigabytes where the vocabulary is large.
        for number, (tokens, start) in enumerate(passages):
            passage = Passage(tokens[:room], start)  # a file's context may be shorter than its model's
            whole, singles, blocks = (fed(model, passage, count) for count in (longest, 1, size))
            usual.append(whole)
            if own is not None:
                own_parts.append(differences(whole, own[number][: len(whole)]))
            block_parts.append(differences(blocks, singles))
            leaks.append(differences(_with_other_drafts(model, passage, size), blocks[::size]))
            check.block_flips += int((blocks.argmax(1) != singles.argmax(1)).sum())
            del whole, singles, blocks  # those of the next passage take their place
        check.answers = answer(model)
    if own is not None:
        check.engine_relative = _together(own_parts)
    check.block_largest = float(np.max([part[:, 2].max() for part in block_parts]))
    check.block_relative, check.block_leak = _together(block_parts), _together(leaks)
    return usual


def _with_other_drafts(model: CachedEngine, passage: Passage, size: int) -> Array:
    """Logits of the first token of every block of `size`, the others being tokens that will be rejected."""
    tokens = passage.tokens
    model.prefill(tokens[: passage.start])
    rows = []
    for start in range(passage.start, len(tokens), size):
        block = tokens[start : start + size]
        wrong = [tokens[(start + 7 * place) % len(tokens)] for place in range(1, len(block))]
        rows.append(np.array(model.forward([block[0], *wrong])[:1]))
        model.rewind(start)
        model.forward(block)
    return np.concatenate(rows)


def measure(
    check: FileCheck, seen: Sequence[Array], wanted: Sequence[Array], passages: Sequence[Passage]
) -> None:
    """Note how far the logits `seen` [n, V] of every passage are from those of the model, where both have some."""
    largest, total, entries, following = 0.0, 0.0, 0, 0
    counts = list[Counts]()
    for a, b, passage in zip(seen, wanted, passages, strict=True):
        a, b = a[: len(b)], b[: len(a)]
        difference = np.abs(a - b)
        largest = max(largest, float(difference.max())) if np.isfinite(difference).all() else float("nan")
        total, entries = total + float(difference.sum(dtype=np.float64)), entries + a.size
        tokens = passage.compared[1 : len(a)]
        following += len(tokens)
        counts.append(count(a, b, tokens))
    positions, same, kl, _, loss, model_loss = map(sum, zip(*counts, strict=True))
    check.largest, check.mean = largest, total / entries
    check.top1, check.kl, check.positions = same / positions, kl / positions, positions
    if following:
        perplexity, of_model = (float(np.exp(each / following)) for each in (loss, model_loss))
        if np.isfinite(of_model):
            check.perplexity, check.torch_perplexity = perplexity, of_model


def logit_distance(a: Sequence[Array], b: Sequence[Array]) -> float:
    """Root mean square difference over that of the logits, both without their row means (softmax does not see those).

    `a` and `b`: logits [n, V] of every passage.
    """
    return _together(map(differences, a, b))


def differences(a: Array, b: Array) -> Array:
    """[n, 3] of every row: the mean squares of a − b and of b, both without their row means, and the largest |a − b|."""
    found = np.zeros((len(a), 3))
    for row, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        difference, centred = ours - theirs, theirs - theirs.mean()
        found[row, 2] = np.abs(difference).max()
        found[row, 0] = np.square(difference - difference.mean()).mean()
        found[row, 1] = np.square(centred).mean()
    return found


def _together(parts: Iterable[Array]) -> float:
    """The distance from what `differences` gave of every passage."""
    difference, size, _ = np.concatenate([*parts]).mean(axis=0)
    return relative(float(difference), float(size))


def fed(model: CachedEngine, passage: Passage, count: int) -> Array:
    """Logits of a passage fed `count` tokens at a time, behind what comes before its start."""
    model.prefill(passage.tokens[: passage.start])
    return np.array(model.read_rows(passage.compared, count))


def judge(check: FileCheck) -> None:
    """Hold what was measured against the bounds of the file's precision; what breaks one goes to `broken`."""
    bounds = BOUNDS.get(check.stored or check.precision, ANY_GGUF)
    measured = {
        "weights": check.weights_relative,
        "engine": check.engine_relative,
        "block": check.block_relative,
        "leak": check.block_leak,
    }
    for name, value in measured.items():
        bound = getattr(bounds, "block" if name == "leak" else name)
        if value is not None and not value <= bound:  # also catches NaN
            where = f" ({check.worst_weight})" if name == "weights" else ""
            check.broken.append(f"{name} difference {value:.2g} above {bound:g}{where}")
    if bounds.kl is not None and check.kl is not None and not check.kl <= bounds.kl:
        check.broken.append(f"KL divergence {check.kl:.2g} above {bounds.kl:g}")
    if check.fast is not None and not (check.fast.engine_relative or 0.0) <= FAST_ENGINE:
        check.broken.append(
            f"engine difference {check.fast.engine_relative:.2g} in fast mode above {FAST_ENGINE:g}"
        )
    check.broken.extend(check.settings)
