"""One decoder graph of plain operators and fixed lengths. Knows operators and names of tensors; weights are only named here.

An NPU compiler lays a graph out once: it wants every dimension as a number and operators it lists. So a graph takes `n` tokens,
not fewer, and a KV cache of `length` tokens, however many are in it:

    input_ids        int32   [1, n]
    position_ids     int32   [1, n]                    rows of the cosine and sine tables
    attention_mask   float32 [1, 1, n, length + n]     0 where a token may look, MASKED elsewhere; the last n columns are new
    past.I.key       float32 [1, kv_heads, length, d]  of layer I; the host keeps it
    past.I.value     float32 [1, kv_heads, length, d]
    logits           float32 [1, n, vocabulary]
    new.I.key        float32 [1, kv_heads, n, d]       of the n tokens: the host writes those it keeps into its cache
    new.I.value      float32 [1, kv_heads, n, d]

The cache is joined with the new keys before attention, so that a sum runs over the same numbers in the same quantisation whether
a token came in this pass or in an earlier one. Heads that share keys are put side by side as rows of one product: no copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec.core.shapes import ModelShape
from edgespec_export.onnx.folder import Nodes

DATA = "weights.data"  # what all graphs of a model read
ALIGNED = 4096  # bytes; offsets in it are multiples, so that a tensor can be mapped
OPSET = 21  # the first with 16-bit QuantizeLinear
IR_VERSION = 10
MASKED = -1e4  # float16 holds it; exp of it is 0 in every float
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32


class Decoder(Nodes):
    """A decoder for `tokens` new tokens behind a cache of `length`: nodes in the order of computation.

    Each method adds operators and returns the name of what they compute. `turn`: names of the cosines and sines.
    """

    named = "/{output}"

    def __init__(self, model: ModelShape, tokens: int, length: int, weights: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.tokens, self.length, self.weights = model, tokens, length, weights

    def shape(self, *dims: int) -> str:
        """The name of a constant list of dimensions."""
        return self.constant("dims." + "x".join(map(str, dims)), np.array(dims, np.int64))

    def reshape(self, value: str, output: str, *dims: int) -> str:
        return self.add("Reshape", (value, self.shape(*dims)), output)

    def layer(self, layer: int, hidden: str, turn: tuple[str, str]) -> str:
        at = f"layers.{layer}"
        normal = self.norm(hidden, f"{at}.input_layernorm")
        attended = self.attention(layer, normal, turn)
        hidden = self.add("Add", (hidden, attended), f"{at}.attended")
        normal = self.norm(hidden, f"{at}.post_attention_layernorm")
        gate = self.linear(normal, f"{at}.mlp.gate_proj")
        gate = self.add("Mul", (gate, self.add("Sigmoid", (gate,), f"{at}.mlp.sigmoid")), f"{at}.mlp.silu")
        inner = self.add("Mul", (gate, self.linear(normal, f"{at}.mlp.up_proj")), f"{at}.mlp.inner")
        out = self.linear(inner, f"{at}.mlp.down_proj")
        return self.add("Add", (hidden, out), f"hidden.{layer + 1}")

    def attention(self, layer: int, hidden: str, turn: tuple[str, str]) -> str:
        tokens, total, shape = self.tokens, self.length + self.tokens, self.model
        d, heads, groups = shape.head_dim, shape.heads, shape.kv_heads
        side = heads // groups  # query heads that share a key head
        at = f"layers.{layer}.self_attn"

        def headed(part: str, count: int) -> str:
            """[1, count, n, d] of a projection, normalised per head where the model does that."""
            value = self.linear(hidden, f"{at}.{part}_proj")
            value = self.reshape(value, f"{at}.{part}.heads", 1, tokens, count, d)
            if f"{at}.{part}_norm" in self.weights:
                value = self.norm(value, f"{at}.{part}_norm")
            return self.add("Transpose", (value,), f"{at}.{part}.apart", perm=[0, 2, 1, 3])

        query = self.turned(headed("q", heads), turn, f"{at}.q.turned")
        new_key = self.turned(headed("k", groups), turn, f"new.{layer}.key")
        new_value = self.add("Identity", (headed("v", groups),), f"new.{layer}.value")
        key = self.add("Concat", (f"past.{layer}.key", new_key), f"{at}.keys", axis=2)
        value = self.add("Concat", (f"past.{layer}.value", new_value), f"{at}.values", axis=2)
        scaled = self.add(
            "Mul", (query, self.constant("attention.scale", np.float32(d**-0.5))), f"{at}.q.scaled"
        )
        rows = self.reshape(scaled, f"{at}.q.rows", 1, groups, side * tokens, d)
        across = self.add("Transpose", (key,), f"{at}.keys.across", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", (rows, across), f"{at}.scores.rows")
        scores = self.reshape(scores, f"{at}.scores", 1, heads, tokens, total)
        scores = self.add("Add", (scores, "attention_mask"), f"{at}.scores.masked")
        shares = self.add("Softmax", (scores,), f"{at}.shares", axis=-1)
        shares = self.reshape(shares, f"{at}.shares.rows", 1, groups, side * tokens, total)
        seen = self.add("MatMul", (shares, value), f"{at}.seen.rows")
        seen = self.reshape(seen, f"{at}.seen", 1, heads, tokens, d)
        seen = self.add("Transpose", (seen,), f"{at}.seen.together", perm=[0, 2, 1, 3])
        seen = self.reshape(seen, f"{at}.seen.flat", 1, tokens, heads * d)
        return self.linear(seen, f"{at}.o_proj")

    def linear(self, value: str, name: str) -> str:
        product = self.add("MatMul", (value, name), f"{name}.out")
        bias = f"{name}.bias"
        return self.add("Add", (product, bias), f"{name}.biased") if bias in self.weights else product

    def turned(self, value: str, turn: tuple[str, str], output: str) -> str:
        """Rotary position embedding, halves against halves: [..., d] with the cosines and sines [1, 1, n, d/2]."""
        cos, sin = turn
        first, second = halves = [f"{output}.first", f"{output}.second"]
        self.add("Split", (value,), *halves, name=f"/{value}/split", axis=-1, num_outputs=2)

        def times(half: str, table: str) -> str:
            return self.add("Mul", (half, table), f"{half}.{table}")

        left = self.add("Sub", (times(first, cos), times(second, sin)), f"{output}.left")
        right = self.add("Add", (times(second, cos), times(first, sin)), f"{output}.right")
        return self.add("Concat", (left, right), output, axis=-1)

    def norm(self, value: str, name: str) -> str:
        """value / sqrt(mean(value²) + eps) * weight over the last dimension."""
        axes = self.shape(-1)
        squares = self.add("Mul", (value, value), f"{name}.squares")
        mean = self.add("ReduceMean", (squares, axes), f"{name}.mean", keepdims=1)
        above = self.add(
            "Add", (mean, self.constant("norm.epsilon", np.float32(self.model.rms_norm_eps))), f"{name}.above"
        )
        scaled = self.add("Div", (value, self.add("Sqrt", (above,), f"{name}.root")), f"{name}.scaled")
        return self.add("Mul", (scaled, name), f"{name}.out")


def decoder(shape: ModelShape, tokens: int, length: int, weights: dict[str, Any], name: str) -> Any:
    """The ModelProto of one graph. `weights`: initialisers by name (a bias or head norm is used where it is there)."""
    graph = Decoder(shape, tokens, length, weights)
    hidden = graph.add("Gather", ("embed_tokens", "input_ids"), "hidden.0")
    rows = (1, 1, tokens, shape.head_dim // 2)
    cos, sin = (
        graph.reshape(graph.add("Gather", (table, "position_ids"), f"{table}.rows"), f"{table}.here", *rows)
        for table in ("rope.cos", "rope.sin")
    )
    for layer in range(shape.layers):
        hidden = graph.layer(layer, hidden, (cos, sin))
    graph.add("MatMul", (graph.norm(hidden, "norm"), "lm_head"), "logits")
    past, new = (1, shape.kv_heads, length, shape.head_dim), (1, shape.kv_heads, tokens, shape.head_dim)
    kinds = [(layer, kind) for layer in range(shape.layers) for kind in ("key", "value")]
    inputs = [
        helper.make_tensor_value_info("input_ids", INT32, (1, tokens)),
        helper.make_tensor_value_info("position_ids", INT32, (1, tokens)),
        helper.make_tensor_value_info("attention_mask", FLOAT, (1, 1, tokens, length + tokens)),
        *(helper.make_tensor_value_info(f"past.{layer}.{kind}", FLOAT, past) for layer, kind in kinds),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", FLOAT, (1, tokens, shape.vocab_size)),
        *(helper.make_tensor_value_info(f"new.{layer}.{kind}", FLOAT, new) for layer, kind in kinds),
    ]
    used = {value for node in graph.nodes for value in node.input}
    constants = [*graph.constants.values(), *(weights[name] for name in weights if name in used)]
    proto = helper.make_graph(graph.nodes, name, inputs, outputs, constants)
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="edgespec", ir_version=IR_VERSION
    )
    return onnx.shape_inference.infer_shapes(model)
