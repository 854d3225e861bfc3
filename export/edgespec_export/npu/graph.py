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

from collections.abc import Iterable
from typing import Any

import onnx
from onnx import TensorProto, helper

from edgespec.core.shapes import ModelShape

OPSET = 21  # the first with 16-bit QuantizeLinear
IR_VERSION = 10
MASKED = -1e4  # float16 holds it; exp of it is 0 in every float
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32


class Graph:
    """Nodes in the order of computation. Each method adds an operator and returns the name of what it computes."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, tuple[int, ...]] = {}
        self.floats: dict[str, float] = {}

    def add(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=f"/{output}", **attributes))
        return output

    def split(self, value: str, first: str, second: str) -> tuple[str, str]:
        """Two halves of the last dimension."""
        node = helper.make_node(
            "Split", [value], [first, second], name=f"/{value}/split", axis=-1, num_outputs=2
        )
        self.nodes.append(node)
        return first, second

    def shape(self, *dims: int) -> str:
        """The name of a constant list of dimensions."""
        name = "dims." + "x".join(map(str, dims))
        self.constants[name] = dims
        return name

    def number(self, name: str, value: float) -> str:
        self.floats[name] = value
        return name

    def reshape(self, value: str, output: str, *dims: int) -> str:
        return self.add("Reshape", (value, self.shape(*dims)), output)


def decoder(shape: ModelShape, tokens: int, length: int, weights: dict[str, Any], name: str) -> Any:
    """The ModelProto of one graph. `weights`: initialisers by name (a bias or head norm is used where it is there)."""
    graph = Graph()
    hidden = graph.add("Gather", ("embed_tokens", "input_ids"), "hidden.0")
    rows = (1, 1, tokens, shape.head_dim // 2)
    turn = [
        graph.reshape(graph.add("Gather", (table, "position_ids"), f"{table}.rows"), f"{table}.here", *rows)
        for table in ("rope.cos", "rope.sin")
    ]
    for layer in range(shape.layers):
        hidden = _layer(graph, shape, layer, hidden, (turn[0], turn[1]), (tokens, length), weights)
    graph.add("MatMul", (_norm(graph, shape, hidden, "norm"), "lm_head"), "logits")
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
    constants = [
        *(
            helper.make_tensor(key, TensorProto.INT64, (len(dims),), dims)
            for key, dims in graph.constants.items()
        ),
        *(helper.make_tensor(key, FLOAT, (), (value,)) for key, value in graph.floats.items()),
        *(tensor for key, tensor in weights.items() if key in used),
    ]
    proto = helper.make_graph(graph.nodes, name, inputs, outputs, constants)
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="edgespec", ir_version=IR_VERSION
    )
    return onnx.shape_inference.infer_shapes(model)


def _layer(
    graph: Graph,
    shape: ModelShape,
    layer: int,
    hidden: str,
    turn: tuple[str, str],
    lengths: tuple[int, int],
    weights: dict[str, Any],
) -> str:
    at = f"layers.{layer}"
    normal = _norm(graph, shape, hidden, f"{at}.input_layernorm")
    attended = _attention(graph, shape, layer, normal, turn, lengths, weights)
    hidden = graph.add("Add", (hidden, attended), f"{at}.attended")
    normal = _norm(graph, shape, hidden, f"{at}.post_attention_layernorm")
    gate = _linear(graph, normal, f"{at}.mlp.gate_proj", weights)
    gate = graph.add("Mul", (gate, graph.add("Sigmoid", (gate,), f"{at}.mlp.sigmoid")), f"{at}.mlp.silu")
    inner = graph.add("Mul", (gate, _linear(graph, normal, f"{at}.mlp.up_proj", weights)), f"{at}.mlp.inner")
    out = _linear(graph, inner, f"{at}.mlp.down_proj", weights)
    return graph.add("Add", (hidden, out), f"hidden.{layer + 1}")


def _attention(
    graph: Graph,
    shape: ModelShape,
    layer: int,
    hidden: str,
    turn: tuple[str, str],
    lengths: tuple[int, int],
    weights: dict[str, Any],
) -> str:
    tokens, length = lengths
    total, d, heads, groups = length + tokens, shape.head_dim, shape.heads, shape.kv_heads
    side = heads // groups  # query heads that share a key head
    at = f"layers.{layer}.self_attn"

    def headed(part: str, count: int) -> str:
        """[1, count, n, d] of a projection, normalised per head where the model does that."""
        value = _linear(graph, hidden, f"{at}.{part}_proj", weights)
        value = graph.reshape(value, f"{at}.{part}.heads", 1, tokens, count, d)
        if f"{at}.{part}_norm" in weights:
            value = _norm(graph, shape, value, f"{at}.{part}_norm")
        return graph.add("Transpose", (value,), f"{at}.{part}.apart", perm=[0, 2, 1, 3])

    query = _turned(graph, headed("q", heads), turn, f"{at}.q.turned")
    new_key = _turned(graph, headed("k", groups), turn, f"new.{layer}.key")
    new_value = graph.add("Identity", (headed("v", groups),), f"new.{layer}.value")
    key = graph.add("Concat", (f"past.{layer}.key", new_key), f"{at}.keys", axis=2)
    value = graph.add("Concat", (f"past.{layer}.value", new_value), f"{at}.values", axis=2)
    scaled = graph.add("Mul", (query, graph.number("attention.scale", d**-0.5)), f"{at}.q.scaled")
    rows = graph.reshape(scaled, f"{at}.q.rows", 1, groups, side * tokens, d)
    across = graph.add("Transpose", (key,), f"{at}.keys.across", perm=[0, 1, 3, 2])
    scores = graph.add("MatMul", (rows, across), f"{at}.scores.rows")
    scores = graph.reshape(scores, f"{at}.scores", 1, heads, tokens, total)
    scores = graph.add("Add", (scores, "attention_mask"), f"{at}.scores.masked")
    shares = graph.add("Softmax", (scores,), f"{at}.shares", axis=-1)
    shares = graph.reshape(shares, f"{at}.shares.rows", 1, groups, side * tokens, total)
    seen = graph.add("MatMul", (shares, value), f"{at}.seen.rows")
    seen = graph.reshape(seen, f"{at}.seen", 1, heads, tokens, d)
    seen = graph.add("Transpose", (seen,), f"{at}.seen.together", perm=[0, 2, 1, 3])
    seen = graph.reshape(seen, f"{at}.seen.flat", 1, tokens, heads * d)
    return _linear(graph, seen, f"{at}.o_proj", weights)


def _linear(graph: Graph, value: str, name: str, weights: dict[str, Any]) -> str:
    product = graph.add("MatMul", (value, name), f"{name}.out")
    bias = f"{name}.bias"
    return graph.add("Add", (product, bias), f"{name}.biased") if bias in weights else product


def _turned(graph: Graph, value: str, turn: tuple[str, str], output: str) -> str:
    """Rotary position embedding, halves against halves: [..., d] with the cosines and sines [1, 1, n, d/2]."""
    cos, sin = turn
    first, second = graph.split(value, f"{output}.first", f"{output}.second")

    def times(half: str, table: str) -> str:
        return graph.add("Mul", (half, table), f"{half}.{table}")

    left = graph.add("Sub", (times(first, cos), times(second, sin)), f"{output}.left")
    right = graph.add("Add", (times(second, cos), times(first, sin)), f"{output}.right")
    return graph.add("Concat", (left, right), output, axis=-1)


def _norm(graph: Graph, shape: ModelShape, value: str, name: str) -> str:
    """value / sqrt(mean(value²) + eps) * weight over the last dimension."""
    axes = graph.shape(-1)
    squares = graph.add("Mul", (value, value), f"{name}.squares")
    mean = graph.add("ReduceMean", (squares, axes), f"{name}.mean", keepdims=1)
    above = graph.add("Add", (mean, graph.number("norm.epsilon", shape.rms_norm_eps)), f"{name}.above")
    scaled = graph.add("Div", (value, graph.add("Sqrt", (above,), f"{name}.root")), f"{name}.scaled")
    return graph.add("Mul", (scaled, name), f"{name}.out")
