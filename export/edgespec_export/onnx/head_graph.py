"""A feature drafter's head as an ONNX graph: token ids and features in, logits and its own features out, a KV cache of its own.

    input_ids [1, n]  features [1, n, F]  ->  logits [1, n, V']  own_features [1, n, H]

The token embeddings are the target's, one byte a value with a scale for each row. Matrices are MatMulNBits with 8 bits in blocks
of 32, whose activations are rounded too (accuracy level 4): a drafter may round as it likes, since the rule holds for every q.
Attention is GroupQueryAttention over one shared buffer, as in the target's graph. `fp32` writes plain matrices, for tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import InputError
from edgespec.core.files import whole_folder, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import BLOCK, HEAD_FILE, head_shape, head_weights, in_bytes, target_embedding
from edgespec_export.onnx.folder import CONTRIB, Nodes, save_whole, written
from edgespec_export.onnx.to_onnx import FAST_ACCURACY_LEVEL, HEAD_STEP

OPSET = 21

Array = NDArray[np.float32]


def write_head_graph(
    out_folder: Path, shape: dict[str, Any], weights: dict[str, Array], embedding: Array, precision: str
) -> None:
    """Write `out_folder`, whole or not at all: model.onnx, model.onnx.data, head.json.

    Args:
        shape: the numbers of a head, as its head.json has them.
        weights: the head's tensors by their names in model.safetensors.
        embedding: the target's token embeddings [V, H].
        precision: int8 or fp32.
    """
    model = _Graph(precision, shape, weights).head(embedding)
    with whole_folder(out_folder) as folder:
        save_whole(model, folder)
        write_json(folder / HEAD_FILE, {"shape": shape, "vocab_size": len(embedding)})


def export_head(head_folder: Path, target_folder: Path, out_folder: Path, precision: str) -> dict[str, Any]:
    """Write a head's folder as a graph. Returns {"bytes", "notes"}. Raises InputError where the two do not belong together."""
    shape, embedding = head_shape(head_folder), target_embedding(target_folder).numpy()
    if embedding.shape[1] != shape["hidden_size"]:
        raise InputError(
            f"the head in {head_folder} reads embeddings of {shape['hidden_size']} numbers and those in {target_folder} have "
            f"{embedding.shape[1]}; train the head for this target"
        )
    try:
        write_head_graph(out_folder, shape, head_weights(head_folder), embedding, precision)
    except KeyError as error:  # a weight, or a number of its shape
        raise InputError(
            f"{head_folder} is not a head: it has no {error}; build the drafter again"
        ) from error
    return written(out_folder, "the table of token embeddings is the target's, one byte a value")


def check_widths(target: ModelShape) -> None:
    """Refuse a target whose widths the graph does not take: those of its head are the same. Raises InputError."""
    rows = [("rows", length, BLOCK) for length in target.row_lengths]
    for what, size, step in (("heads", target.head_dim, HEAD_STEP), *rows):
        if size % step:
            raise InputError(
                f"the target has {what} of {size}, and a drafter that is a head has the same. The graph of a head needs "
                f"a multiple of {step}; give drafter.kind model to a build"
            )


def add_bytes(made: Nodes, x: str, matrix: Array, tables: tuple[str, str], output: str) -> str:
    """Add the product of x with a matrix [N, K] in bytes, transposed; `tables`: what its bytes and scales are called."""
    data, scales = in_bytes(matrix)
    inputs = [x, made.constant(tables[0], data), made.constant(tables[1], scales.reshape(-1))]
    settings: dict[str, Any] = {"bits": 8, "block_size": BLOCK, "accuracy_level": FAST_ACCURACY_LEVEL}
    return made.add("MatMulNBits", inputs, output, N=matrix.shape[0], K=matrix.shape[1], **settings)


class _Graph(Nodes):
    """Nodes and tensors of one head, in the order of its computation. A matrix or norm has the name of its weight."""

    def __init__(self, precision: str, shape: dict[str, Any], weights: dict[str, Array]) -> None:
        super().__init__()
        self.precision, self.shape, self.weights = precision, shape, weights

    def linear(self, x: str, name: str, output: str = "") -> str:
        """x [1, n, K] times a matrix [N, K] transposed."""
        matrix = self.weights[f"{name}.weight"]
        if self.precision == "fp32":
            return self.add("MatMul", [x, self.constant(f"{name}.weight", matrix.T)], output or name)
        return add_bytes(self, x, matrix, (f"{name}.bytes", f"{name}.scales"), output or name)

    def norm(self, x: str, name: str, output: str = "") -> str:
        scale = self.constant(f"{name}.weight", self.weights[f"{name}.weight"])
        settings = {"axis": -1, "epsilon": self.shape["rms_norm_eps"]}
        return self.add("SimplifiedLayerNormalization", [x, scale], output or name, **settings)

    def embedded(self, embedding: Array) -> str:
        """Rows of the target's table: bytes and a scale for each row."""
        from onnx import TensorProto

        scales = np.abs(embedding).max(-1, keepdims=True) / 127.0
        rows = np.rint(np.divide(embedding, scales, out=np.zeros_like(embedding), where=scales > 0))
        table = self.constant("embedding.bytes", rows.astype(np.int8))
        scale = self.constant("embedding.scales", scales.astype(np.float32))
        found = self.add("Gather", [table, "input_ids"], "embedding/bytes")
        wide = self.add("Cast", [found], "embedding/float", to=TensorProto.FLOAT)
        step = self.add("Gather", [scale, "input_ids"], "embedding/scale")
        return self.add("Mul", [wide, step], "embedding")

    def layer(self, x: str, number: int) -> str:
        at, shape = f"layers.{number}", self.shape
        y = self.norm(x, f"{at}.input_layernorm")
        joined = [self.linear(y, f"{at}.{part}_proj") for part in "qkv"]
        cache = [f"past_key_values.{number}.{part}" for part in ("key", "value")]
        attended = self.add(
            "GroupQueryAttention",
            [*joined, *cache, "seqlens_k", "total_length", "cos_cache", "sin_cache"],
            *(f"{at}.attention", f"present.{number}.key", f"present.{number}.value"),
            num_heads=shape["heads"],
            kv_num_heads=shape["kv_heads"],
            do_rotary=1,
        )
        x = self.add("Add", [x, self.linear(attended, f"{at}.o_proj")], f"{at}.attended")
        y = self.norm(x, f"{at}.post_attention_layernorm")
        gate = self.linear(y, f"{at}.gate_proj")
        silu = self.add("Mul", [gate, self.add("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.silu")
        inner = self.add("Mul", [silu, self.linear(y, f"{at}.up_proj")], f"{at}.inner")
        return self.add("Add", [x, self.linear(inner, f"{at}.down_proj")], f"{at}.left")

    def head(self, embedding: Array) -> Any:
        from onnx import TensorProto, helper

        shape, size = self.shape, self.shape["head_dim"]
        rates = shape["rope_theta"] ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        angles = np.arange(shape["context_length"])[:, None] * rates
        self.constant("cos_cache", np.cos(angles).astype(np.float32))
        self.constant("sin_cache", np.sin(angles).astype(np.float32))
        known = self.norm(self.embedded(embedding), "embedding_norm")
        seen = self.norm("features", "feature_norm")
        x = self.linear(self.add("Concat", [known, seen], "joined", axis=-1), "fc")
        for number in range(shape["layers"]):
            x = self.layer(x, number)
        self.linear(self.norm(x, "norm", "own_features"), "lm_head", "logits")

        value, whole, real = helper.make_tensor_value_info, TensorProto.INT64, TensorProto.FLOAT
        inputs = [
            value("input_ids", whole, [1, "n"]),
            value("features", real, [1, "n", shape["feature_size"]]),
            value("seqlens_k", TensorProto.INT32, [1]),
            value("total_length", TensorProto.INT32, []),
        ]
        outputs = [
            value("logits", real, [1, "n", shape["draft_vocab_size"]]),
            value("own_features", real, [1, "n", shape["hidden_size"]]),
        ]
        for number in range(shape["layers"]):
            for part in ("key", "value"):
                dims = [1, shape["kv_heads"], "context", size]
                inputs.append(value(f"past_key_values.{number}.{part}", real, dims))
                outputs.append(value(f"present.{number}.{part}", real, dims))
        graph = helper.make_graph(self.nodes, "feature_head", inputs, outputs, [*self.constants.values()])
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)
