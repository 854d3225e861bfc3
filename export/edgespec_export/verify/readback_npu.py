"""The weights of a static export, read back under their Hugging Face names and in float32. Numpy and onnx; no engine.

Written apart from to_npu and qdq on purpose: a mistake there is not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgespec_export.onnx.tensors import tensor_values

Array = np.ndarray[Any, Any]
_WHOLE = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def static_weights(folder: Path) -> Iterator[tuple[str, Array]]:
    """(name, tensor) of the verification graph, whose weights all graphs share; int8 matrices expanded."""
    import onnx

    graph = onnx.load(folder / "verify.onnx", load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}

    def read(name: str) -> Array:
        return tensor_values(tensors[name], folder)

    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
            values, scale, zero = (read(name) for name in node.input)
            if values.ndim == 2:  # a constant of one number is no weight; columns have a scale each
                whole = (values.astype(np.float32) - zero.astype(np.float32)) * scale
                yield _named(node.input[0].removesuffix("_quantized"), whole)
            elif values.ndim == 1 and node.input[0].endswith(".bias_quantized"):
                name = node.input[0].removesuffix("_quantized")
                yield _named(name, (values.astype(np.float32) - zero.astype(np.float32)) * scale)
    for name, tensor in tensors.items():
        if name in _WHOLE or (name.startswith("layers.") and tensor.data_type == onnx.TensorProto.FLOAT):
            if name.endswith(("_scale", "_zero_point")):
                continue
            yield _named(name, read(name))


def _named(name: str, value: Array) -> tuple[str, Array]:
    """A matrix is [in, out] in the graph and [out, in] in the checkpoint; the embedding is not turned."""
    if value.ndim == 2 and name != "embed_tokens":
        value = value.T
    if name in _WHOLE:
        return _WHOLE[name], np.ascontiguousarray(value)
    kind = "" if name.endswith(".bias") else ".weight"
    return f"model.{name}{kind}", np.ascontiguousarray(value)
