"""The drafter's shape from the target's shape and a size budget. Arithmetic only.

Rule: one layer for every eight of the target's; the head size, the ratio of query to key heads, the FFN ratio and the tying of
the embeddings are the target's; the hidden size is the multiple of the step nearest to the budget in parameters. The step is
256 (a K-quant row) where the target is at least 1,024 wide and 64 below. For Llama-2-7B this is the paper's drafter: 4 layers,
hidden 1024, FFN 2816, 8 heads (direct alignment, Table 1).

With a vocabulary subset the tables have one row for each token kept and one that is read in the place of any other token, and the
size budget counts them so. A head (EAGLE) has the target's widths and one layer; its output rows are what is counted as a table.

A narrow target with a large vocabulary has a rule of its own. Its drafter keeps a quarter of the tokens at most: with all of
SmolLM2's 49,152 its tables would be 94 % of it, and its width 64. It has two layers, and its width goes by what a step costs
rather than by parameters: a step reads the weights, and starts every layer's products, which take as long as many weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.core.table import count, table
from edgespec.recipe.schema import DrafterOptions

WIDE_TARGET = 1024
WIDE_STEP = 256
NARROW_STEP = 64
LAYERS_RATIO = 8
LARGE_VOCABULARY = 2**15  # tokens: up to here (Llama 2) a drafter keeps them all
KEPT_SHARE = 4  # a quarter of SmolLM2's tokens are 95 % or more of what it writes
SHALLOW = 2  # layers: four accept about as much as two of the same width, and one less (benchmarks/training/drafter_shapes.py)
LAYER_COST = 500_000  # weights that are read in the time that starting a layer takes: 0.51M in two runs of it


def cost_ratios(target: ModelShape, drafter: ModelShape) -> dict[str, float]:
    """c = draft / target: by parameters (the paper's) and by weights streamed for a token (equal precision on both sides)."""
    return {
        "parameters": drafter.parameters / target.parameters,
        "streamed": drafter.streamed_parameters / target.streamed_parameters,
    }


def step_cost(shape: ModelShape) -> float:
    """What a step costs, in weights: those it reads, and LAYER_COST for every layer."""
    return shape.streamed_parameters + LAYER_COST * shape.layers


def _is_narrow(target: ModelShape) -> bool:
    """Whether a drafter keeps a part of the tokens unless told otherwise, since its tables would be nearly all of it.

    A wider target's keeps all of them, however much that is: no other engine runs a part.
    """
    return target.hidden < WIDE_TARGET and target.vocab_size > LARGE_VOCABULARY


def _vocab_size(target: ModelShape, options: DrafterOptions) -> int:
    """Rows of the drafter's tables, at most. Raises InputError where the target has fewer tokens than are to be kept."""
    kept, tokens = options.vocabulary, target.vocab_size
    if kept is None:
        return tokens // KEPT_SHARE + 1 if options.kind == "model" and _is_narrow(target) else tokens
    if kept > tokens:
        raise InputError(
            f"drafter.vocabulary is {kept} and the target has {tokens} tokens; give at most {tokens}, which keeps all"
        )
    return kept if options.kind == "head" else min(kept + 1, tokens)


def _check_head(target: ModelShape, options: DrafterOptions) -> None:
    """A head has layers of the target, and drafts over some of its tokens. Raises InputError."""
    if options.vocabulary is not None and options.vocabulary >= target.vocab_size:
        raise InputError(
            f"drafter.vocabulary is {options.vocabulary} and a head drafts over fewer tokens than the target's "
            f"{target.vocab_size}; give at most {target.vocab_size - 1}, or leave it out"
        )
    if options.layers is not None and options.layers > target.layers:
        raise InputError(
            f"drafter.layers is {options.layers} and the target has {target.layers}; a head of 1 or 2 is usual"
        )


def _plain(target: ModelShape) -> ModelShape:
    """The target with layers of Llama's form, which every engine runs, and one set of RoPE factors."""
    return replace(target, attention_bias=False, head_norms=False, rope_border=None)


def _shape(target: ModelShape, hidden: int, layers: int, step: int, vocab_size: int) -> ModelShape:
    head_dim = target.head_dim if hidden % target.head_dim == 0 else NARROW_STEP
    heads = hidden // head_dim
    group = max(1, target.heads // target.kv_heads)
    kv_heads = heads // group if heads % group == 0 else heads
    intermediate = step * math.ceil(hidden * target.intermediate / target.hidden / step)
    return replace(
        _plain(target),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab_size=vocab_size,
    )


def derive(target: ModelShape, options: DrafterOptions) -> ModelShape:
    """The drafter for a target: a Llama (every engine runs it), or a head. Its vocabulary may be cut further where the text
    is known.

    Its `vocab_size` is the target's, or tokens kept + 1; of a head it is tokens kept.
    Raises InputError where it would not be smaller than the target, or is to keep more tokens.
    """
    vocab_size = _vocab_size(target, options)
    if options.kind == "head":
        _check_head(target, options)
        layers = options.layers or 1
        return replace(_plain(target), layers=layers, vocab_size=vocab_size, tied=True, joins=True)
    step = WIDE_STEP if target.hidden >= WIDE_TARGET else NARROW_STEP
    narrow = _is_narrow(target)
    layers = options.layers or (SHALLOW if narrow else max(1, round(target.layers / LAYERS_RATIO)))

    def size(shape: ModelShape) -> float:
        return step_cost(shape) if narrow else shape.parameters

    if options.hidden is None:
        budget = options.size_fraction * size(target)
        widths = range(step, max(step, target.hidden) + 1, step)
        shapes = (_shape(target, hidden, layers, step, vocab_size) for hidden in widths)
        chosen = min(shapes, key=lambda shape: abs(size(shape) - budget))
    elif options.hidden % NARROW_STEP:
        raise InputError(
            f"drafter.hidden is {options.hidden}; it must be a multiple of {NARROW_STEP} (of {step} for fast quantised rows)"
        )
    else:
        chosen = _shape(target, options.hidden, layers, step, vocab_size)
    if chosen.parameters >= target.parameters:
        raise InputError(
            f"the drafter would have {count(chosen.parameters)} parameters and the target has {count(target.parameters)}; "
            "give fewer with --drafter.layers, --drafter.hidden or --drafter.size-fraction"
        )
    return chosen


def continued_head(target: ModelShape, head: ModelShape, options: DrafterOptions) -> ModelShape:
    """The drafter that training makes of a trained head: it has that one's layers, and its tokens unless others are asked for.

    Raises InputError as `derive` does.
    """
    vocabulary = options.vocabulary or head.vocab_size
    return derive(target, replace(options, layers=head.layers, vocabulary=vocabulary))


def describe(target: ModelShape, drafter: ModelShape) -> str:
    """The table a person sees before training starts."""
    rows = [
        (name, *(f"{getattr(shape, field):,}" for shape in (target, drafter)))
        for name, field in (
            ("layers", "layers"),
            ("hidden", "hidden"),
            ("FFN", "intermediate"),
            ("heads", "heads"),
            ("key/value heads", "kv_heads"),
            ("vocabulary", "vocab_size"),
            ("parameters", "parameters"),
            ("streamed per token", "streamed_parameters"),
        )
    ]
    if drafter.vocab_size < target.vocab_size:
        kept = drafter.vocab_size - (not drafter.joins)
        rest = "" if drafter.joins else ", 1 row for the rest"
        rows.insert(6, ("tokens kept", "", f"{kept:,} ({kept / target.vocab_size:.0%}){rest}"))
    elif drafter.joins:
        rows.insert(6, ("tokens kept", "", "the text decides; sizes here are the largest"))
    ratios = cost_ratios(target, drafter)
    rows.append(("c by parameters", "", f"{ratios['parameters']:.2%}"))
    rows.append(("c by bytes streamed", "", f"{ratios['streamed']:.2%}"))
    return table(("", "target", "drafter"), rows)
