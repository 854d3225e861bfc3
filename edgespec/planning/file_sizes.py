"""Bytes of a model's exported weights, by format and precision. Arithmetic on shapes; reads no file."""

from __future__ import annotations

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.recipe.devices import ONNXRUNTIME, STATIC

EXPORTED_BYTES = {
    **{"fp32": 4.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "int4": 0.625, "q8_0": 34 / 32, "q4_0": 18 / 32},
    **{"fp16": 2.0, "int8": 36 / 32, "qdq8": 1.0, "qdq16": 1.0},
    **{"q4_k_s": 4.58 / 8, "q4_k_m": 4.85 / 8, "q5_k_m": 5.69 / 8, "q6_k": 210 / 256},
    **{"q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32, "mixed": 8.5 / 8, "q_mixed": 8.5 / 8},
}
"""Of a weight: int4 has a float32 scale for 32 weights, q8_0 and q4_0 a float16 one; the K mixtures as llama.cpp counts them; of
mixed files the most that they can have."""
HEAD_BYTES = dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1"), 34 / 32)
"""Of a weight of the output head, where it is kept at another precision."""
FLOAT_TABLES = frozenset({"int4"})
"""ONNX precisions in which an input embedding that is not also the output head stays in floats."""


def exported_bytes(shape: ModelShape, precision: str, *, streamed: bool = False) -> float:
    """Bytes of a model's exported weights, or only of those that one token reads (`streamed`)."""
    each = EXPORTED_BYTES[precision]
    weights = shape.streamed_parameters if streamed else shape.parameters
    return each * weights + (HEAD_BYTES.get(precision, each) - each) * shape.embedding_parameters


def weight_bytes(shape: ModelShape, engine: str, precision: str, *, streamed: bool = False) -> int:
    """Bytes of a model's weights in a file (ONNX: and its RoPE tables), or of those one token reads (`streamed`)."""
    if engine == STATIC:
        return _static_bytes(shape, precision, streamed=streamed)
    stored = exported_bytes(shape, precision, streamed=streamed)
    if engine == ONNXRUNTIME and precision in FLOAT_TABLES and not shape.tied and not streamed:
        per_weight = exported_bytes(shape, precision) / shape.parameters
        stored += (costs.FLOAT - per_weight) * shape.embedding_parameters
    if engine == ONNXRUNTIME and not streamed:
        stored += costs.FLOAT * shape.context_length * shape.head_dim
    return round(stored)


def _static_bytes(shape: ModelShape, precision: str, *, streamed: bool) -> int:
    """Static graphs hold an embedding's rows in floats and the output head apart, tied or not; QDQ matrices are int8."""
    matrices = shape.layers * shape.layer_parameters + shape.embedding_parameters
    rows = 0 if streamed else shape.embedding_parameters
    return round(matrices * (costs.FLOAT if precision == "fp32" else 1) + costs.FLOAT * rows)
