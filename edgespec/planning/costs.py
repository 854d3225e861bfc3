"""What one decoder costs, from its shape: FLOPs, bytes of memory, bytes of its files. Arithmetic only; knows no recipe.

A multiply-add is two FLOPs. Norms, activations, softmax and the optimizer are left out, as is usual. Attention is counted over
the whole rectangle: kernels that take a mask compute it all. Memory is float32 (what autocast to bf16 saves is not taken off).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgespec.core.shapes import ModelShape
from edgespec.recipe.devices import ONNXRUNTIME, STATIC

FLOAT = 4
ADAMW = 8
"""Bytes of AdamW's two moments of a parameter."""
SAMPLING = 20
"""Bytes of a logit while a token is drawn from it: logit, probability and nucleus in float32, heights in float64."""
EXPORTED_BYTES = {
    **{"fp32": 4.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "int4": 0.625, "q8_0": 34 / 32, "q4_0": 18 / 32},
    **{"fp16": 2.0, "int8": 68 / 64, "qdq8": 1.0, "qdq16": 1.0},
    **{"q4_k_s": 4.58 / 8, "q4_k_m": 4.85 / 8, "q5_k_m": 5.69 / 8, "q6_k": 210 / 256},
    **{"q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32, "mixed": 8.5 / 8, "q_mixed": 8.5 / 8},
}
"""Of a weight: int4 has a float32 scale for 32 weights, int8 one for 64, q8_0 and q4_0 a float16 one for 32; the K mixtures as
llama.cpp counts them; of mixed files the most that they can have."""
OUTPUT_BYTES = dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1"), 34 / 32)
"""Of a weight of the output head, where it is kept at another precision."""
READING_HEAD_BYTES = 36 / 32
"""Of a weight of a drafter that is a head: always int8, with a float32 scale for 32 weights."""
PROMPT_TOKENS = 128
"""Assumed length of a prompt with its chat template."""
MEASURED_AT_ONCE = 1024
"""Tokens of one pass of the target that a drafter is to be cut out of."""
BUILDER = 9
"""Bytes of memory that ONNX Runtime's model builder was seen to take for a parameter."""
WHOLE = 4 * 2**30
"""Bytes of memory up to which the builder gets an int4 model whole; a larger one goes two layers at a time. Every slice starts it
again (SmolLM2: 12 s in slices, 4 s whole)."""

HELD_LAYERS = 2
"""Layers that such a builder holds at most, since each slice is freed before the next. Memory allocated at the peak, which is the
first slice with the tables, on 2 cores: 1.1B 1.64 GiB, large tables (2 times 100,000 by 1,536) 2.76 GiB, 7B 4.19 GiB (these
count as 2.23, 3.75 and 5.98 with the interpreter)."""


def body_weights(shape: ModelShape) -> int:
    """The weights a token is multiplied with before the output layer."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * shape.hidden * query + 2 * shape.hidden * key_value
    return shape.joining_parameters + shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def output_flops(shape: ModelShape, positions: float) -> float:
    """The output layer at `positions` positions: 2 V H each."""
    return 2.0 * shape.vocab_size * shape.hidden * positions


def forward_flops(shape: ModelShape, tokens: float, keys: float, logits: float | None = None) -> float:
    """2 N + 4 L · heads · head size · keys for each of `tokens` tokens that looks at `keys` keys (N: weights of the body), and
    the output layer at `logits` positions (all without it).
    """
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * keys
    body = (2.0 * body_weights(shape) + attention) * tokens
    return body + output_flops(shape, tokens if logits is None else logits)


def training_flops(shape: ModelShape, tokens: float, keys: float) -> float:
    """Forward and backward: every product comes back as two, one for each of its factors (6 N in all)."""
    return 3.0 * forward_flops(shape, tokens, keys)


def decoding_flops(shape: ModelShape, rows: float, prompt: float, new: float) -> float:
    """`rows` prompts of `prompt` tokens read in one pass, then `new` tokens one by one with a cache."""
    reading = forward_flops(shape, rows * prompt, prompt, logits=rows)
    return reading + forward_flops(shape, rows * new, prompt + (new + 1) / 2)


def decoding_bytes(shape: ModelShape, each: float, rows: int, new: int) -> float:
    """What `new` steps of `rows` rows read: the streamed weights, `each` bytes a weight, and the cache as far as it is filled."""
    cache = FLOAT * cache_values(shape) * rows
    return new * (each * shape.streamed_parameters + cache * (PROMPT_TOKENS + new / 2))


def weight_bytes(shape: ModelShape) -> int:
    return FLOAT * shape.parameters


def training_bytes(shape: ModelShape) -> int:
    """Weights, their gradients and AdamW's moments: 16 bytes a parameter. Exact."""
    return (2 * FLOAT + ADAMW) * shape.parameters


def checkpoint_bytes(shape: ModelShape) -> int:
    """Weights and AdamW's moments."""
    return (FLOAT + ADAMW) * shape.parameters


def saved_activation_bytes(shape: ModelShape, tokens: int, context: int, *, masked: bool) -> int:
    """What the forward pass keeps for the backward pass, without the output layer (whose logits exist a chunk at a time).

    Each token and layer: the residual stream, its normalised form and the norm's output, twice each (6 H); query, keys, values
    and the attention's output; the FFN's gate, its activation, the other branch and their product (4 I). With a mask (packed
    rows) keys and values are repeated for every query head and the mask is kept as float32, T values a token. At the end a norm
    (3 H).
    """
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 4 * query + context if masked else 2 * query + 2 * key_value
    layer = 6 * shape.hidden + attention + 4 * shape.intermediate
    return FLOAT * tokens * (shape.layers * layer + 3 * shape.hidden)


def passing_activation_bytes(shape: ModelShape, tokens: int, context: int) -> int:
    """The largest moment of a forward pass without gradient: the residual stream and three like it (4 H) beside either the inside
    of an FFN (3 I) or that of an attention (query, its rotated form, repeated keys and values, output, the mask in float32).
    """
    attention = 5 * shape.heads * shape.head_dim + context
    return FLOAT * tokens * (4 * shape.hidden + max(3 * shape.intermediate, attention))


def cutting_bytes(target: ModelShape, drafter: ModelShape) -> int:
    """Where a drafter is cut out of its target: that one in float32 as it runs, a drafter, and what is cut for it."""
    passing = passing_activation_bytes(target, MEASURED_AT_ONCE, MEASURED_AT_ONCE)
    return weight_bytes(target) + 2 * weight_bytes(drafter) + passing


CACHE_BYTES = 2**30
"""Of all texts that a file writes at once: with weights, logits and kept states a small target stays below 4 GiB."""


def cache_values(shape: ModelShape) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def cache_bytes(shape: ModelShape, rows: int, tokens: int) -> int:
    """The KV cache of `rows` rows of `tokens` tokens, times two: its buffers double when they are full."""
    return 2 * FLOAT * cache_values(shape) * rows * tokens


def file_cache_bytes(shape: ModelShape, rows: int, tokens: int) -> int:
    """The KV cache where a file writes: of as many texts at once as have room, of one at least."""
    return min(cache_bytes(shape, rows, tokens), max(CACHE_BYTES, cache_bytes(shape, 1, tokens)))


def file_rows(shape: ModelShape, rows: int, tokens: int) -> int:
    """How many of `rows` texts a GGUF file writes at once, one at least. llama.cpp's cache is float16."""
    return max(1, min(rows, CACHE_BYTES // (2 * cache_values(shape) * tokens)))


def sampling_bytes(shape: ModelShape, rows: int) -> int:
    """The distributions one token of each of `rows` rows is drawn from."""
    return SAMPLING * shape.vocab_size * rows


def exported_bytes(shape: ModelShape, precision: str, *, streamed: bool = False) -> float:
    """Bytes of a model's exported weights, or only of those that one token reads (`streamed`)."""
    each = EXPORTED_BYTES[precision]
    weights = shape.streamed_parameters if streamed else shape.parameters
    return each * weights + (OUTPUT_BYTES.get(precision, each) - each) * shape.embedding_parameters


def building_bytes(shape: ModelShape, precisions: Iterable[str], *, alike: bool = True) -> int:
    """Memory in which a model's files are written, those for ONNX Runtime in `precisions`; the others a tensor at a time.

    `alike`: its layers are, so that a large int4 model goes to the builder two layers at a time, the first two with the tables.
    A tensor is there as bytes, as floats and in another order.
    """
    wanted = {*precisions}
    by_layers = {"int4", "mixed"} if alike and BUILDER * shape.parameters > WHOLE else set()
    if wanted - by_layers:
        return BUILDER * shape.parameters
    sliced = replace(shape, layers=min(HELD_LAYERS, shape.layers))
    return BUILDER * sliced.parameters if wanted else 3 * FLOAT * shape.embedding_parameters


def file_bytes(
    shape: ModelShape,
    engine: str,
    precision: str,
    *,
    streamed: bool = False,
    target: ModelShape | None = None,
) -> int:
    """Bytes of a model's weights in a file (ONNX: and its RoPE tables), or of those one token reads (`streamed`).

    Static graphs hold an embedding's rows in floats and the output head apart, tied or not; QDQ matrices are int8. Half floats
    are read as the float32 that ONNX Runtime makes of them. A head has one file for every engine and precision, and in it the
    embedding of its `target`, in bytes with a float32 scale a row.
    """
    if shape.joining_parameters:
        if streamed or target is None:
            return round(READING_HEAD_BYTES * shape.streamed_parameters)
        tables = target.vocab_size * (target.hidden + FLOAT) + FLOAT * shape.context_length * shape.head_dim
        return round(READING_HEAD_BYTES * shape.parameters) + tables
    if engine == STATIC:
        matrices = shape.layers * shape.layer_parameters + shape.embedding_parameters
        rows = 0 if streamed else shape.embedding_parameters
        return round(matrices * (FLOAT if precision == "fp32" else 1) + FLOAT * rows)
    widened = streamed and (engine, precision) == (ONNXRUNTIME, "fp16")
    stored = exported_bytes(shape, "fp32" if widened else precision, streamed=streamed)
    if engine == ONNXRUNTIME and not streamed:
        stored += FLOAT * shape.context_length * shape.head_dim
        if precision in ("int4", "int8") and not shape.tied:  # an input embedding of its own stays in floats
            stored += (FLOAT - EXPORTED_BYTES[precision]) * shape.embedding_parameters
    return round(stored)
