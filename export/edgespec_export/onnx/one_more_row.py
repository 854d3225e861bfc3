"""One more row for a graph's attention, so that a block's logits are those of single steps to the last bit.

Every other kernel of the fast int8 graph computes each row of a block alone: int8 products add whole numbers. Attention is the
exception. ONNX Runtime multiplies one row with another kernel than several rows, which adds floats in another order. So each
GroupQueryAttention reads a row of zeros behind the block, and its output there is dropped: it never has one row only.

The zero row's key and value land in the cache behind the text, where the next pass overwrites them. So a text is one token
shorter than the cache, and the graph says so in its metadata.

Left alone are graphs where that does not hold or the row has no place:
  - int4, whose products add floats between the blocks of a row, in an order that depends on how many rows there are;
  - two sets of RoPE factors, of which the short one ends with its longest text;
  - attention that is told positions or a bias for each row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec_runtime.engines.onnx_runtime import ROPE_BORDER, SPARE_TOKENS

from edgespec.core.errors import EdgespecError
from edgespec.core.files import whole_file

ATTENTION = "GroupQueryAttention"
ROWS = slice(0, 3)  # inputs of the attention: queries, keys and values, or all of them in the first
LENGTHS = slice(5, 7)  # inputs of the attention: the index of the last key, and how many keys there are
BY_ROW = slice(9, 11)  # inputs of the attention: positions and a bias
AT = "/one_more_row/"


def attend_one_more_row(graph_file: Path) -> bool:
    """Rewrite a graph file: its attention reads one row of zeros more. The data file stays. Returns whether it was rewritten.

    Raises EdgespecError where the graph has no attention of the expected kind.
    """
    import onnx

    model = onnx.load(graph_file, load_external_data=False)
    attentions = [node for node in model.graph.node if node.op_type == ATTENTION]
    if not attentions:
        raise EdgespecError(
            f"{graph_file} has no {ATTENTION}; this onnxruntime-genai writes attention otherwise"
        )
    told = any(name for node in attentions for name in node.input[BY_ROW])
    if told or any(entry.key == ROPE_BORDER for entry in model.metadata_props):
        return False
    nodes: list[Any] = []
    longer: dict[str, Any] = {}  # by a length's name: the node that adds one to it, made once
    for node in model.graph.node:
        nodes += _with_a_row(node, longer) if node.op_type == ATTENTION else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(_constants())
    model.metadata_props.add(key=SPARE_TOKENS, value="1")
    with whole_file(graph_file) as temporary:
        onnx.save(model, temporary)
    return True


def _with_a_row(attention: Any, longer: dict[str, Any]) -> list[Any]:
    """The nodes in the place of one attention: it reads padded rows and longer lengths, and its last row is dropped."""
    from onnx import helper

    nodes = []
    inputs, output, at = list(attention.input), attention.output[0], f"{AT}{attention.name}/"
    for place, name in enumerate(inputs[ROWS]):
        if name:
            inputs[place] = f"{at}rows_{place}"
            nodes.append(
                helper.make_node("Pad", [name, AT + "pads"], [inputs[place]], name=f"{at}Pad_{place}")
            )
    for place, name in enumerate(inputs[LENGTHS], LENGTHS.start):
        inputs[place] = f"{AT}{name}"
        if name not in longer:
            one = AT + ("one_row" if place == LENGTHS.start else "one")
            longer[name] = helper.make_node("Add", [name, one], [inputs[place]], name=f"{AT}{name}/Add")
            nodes.append(longer[name])
    attention.input[:] = inputs
    attention.output[0] = at + "output"
    ends = [AT + "first", AT + "last", AT + "axis"]
    return [*nodes, attention, helper.make_node("Slice", [at + "output", *ends], [output], name=at + "Slice")]


def _constants() -> list[Any]:
    import numpy as np
    from onnx import numpy_helper

    values = {
        "pads": np.array([0, 0, 0, 0, 1, 0], np.int64),  # of [batch, rows, width]: one row at the end
        "one": np.array(1, np.int32),
        "one_row": np.array([[1]], np.int32),
        "first": np.array([0], np.int64),
        "last": np.array([-1], np.int64),
        "axis": np.array([1], np.int64),
    }
    return [numpy_helper.from_array(value, AT + name) for name, value in values.items()]
