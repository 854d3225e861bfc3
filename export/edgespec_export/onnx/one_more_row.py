"""One more row for the attention of a single step, so that a block's logits are those of single steps to the last bit.

Every other kernel of the fast int8 graph computes each row of a block alone: int8 products add whole numbers. Attention is the
exception. ONNX Runtime multiplies one row with another kernel than several rows, which adds floats in another order. So where a
pass has one token, each GroupQueryAttention reads a row of zeros behind it, and its output there is dropped. Longer passes have
no such row: it would cost them time and change nothing.

The zero row's key and value land in the cache behind the text, where the next pass overwrites them. So a text is one token
shorter than the cache, and the graph says so in its metadata. Another engine may fill its cache to the end, or have one that
grows with each pass: where the cache has no place behind the text, the graph reads no such row.

Left alone are graphs where that does not hold or the row has no place:
  - int4, whose products add floats between the blocks of a row, in an order that depends on how many rows there are;
  - two sets of RoPE factors, of which the short one ends with its longest text;
  - attention that is told positions or a bias for each row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.onnx_runtime import ROPE_BORDER, SPARE_TOKENS

from edgespec_export.onnx.folder import Nodes, rewritten, set_nodes, unlike

ATTENTION = "GroupQueryAttention"
ROWS = slice(0, 3)  # inputs of the attention: queries, keys and values, or all of them in the first
CACHE = 3  # input of the attention: the keys before, [batch, heads, places, size]
LENGTHS = slice(5, 7)  # inputs of the attention: the index of the last key, and how many keys there are
BY_ROW = slice(9, 11)  # inputs of the attention: positions and a bias
TOKENS = "input_ids"  # input of the graph, [batch, rows]
AT = "/one_more_row/"


def attend_one_more_row(graph_file: Path) -> bool:
    """Rewrite a graph file, and return whether that was done: in a single step its attention reads a row of zeros more.

    The data file stays. Raises EdgespecError where the graph has no attention of the expected kind.
    """
    with rewritten(graph_file) as model:
        attentions = [node for node in model.graph.node if node.op_type == ATTENTION]
        if not attentions:
            raise unlike(f"{graph_file} has no {ATTENTION}")
        told = any(name for node in attentions for name in node.input[BY_ROW])
        if told or any(entry.key == ROPE_BORDER for entry in model.metadata_props):
            return False
        made = Nodes()
        for name, value in {"two": [2], "before": [0, 0, 0, 0], "zero": [0], "axis": [1]}.items():
            made.constant(AT + name, np.array(value, np.int64))
        longer: set[str] = set()  # names of lengths that one was added to
        for node in model.graph.node:
            if node.op_type == ATTENTION:
                if not longer:
                    _how_many_rows(made, node)
                _with_a_row(made, node, longer)
            else:
                made.nodes.append(node)
        set_nodes(model.graph, made.nodes)
        model.graph.initializer.extend(made.constants.values())
        model.metadata_props.add(key=SPARE_TOKENS, value="1")
    return True


def _with_a_row(made: Nodes, attention: Any, longer: set[str]) -> None:
    """Add one attention: it reads padded rows and longer lengths, and its last row is dropped."""
    inputs, output, at = list(attention.input), attention.output[0], f"{AT}{attention.name}/"
    for place, name in enumerate(inputs[ROWS]):
        if name:
            inputs[place] = made.add("Pad", [name, AT + "pads"], f"{at}rows_{place}")
    for place, name in enumerate(inputs[LENGTHS], LENGTHS.start):
        inputs[place] = f"{AT}{name}"
        if name not in longer:
            longer.add(name)
            made.add("Add", [name, AT + ("more" if place == LENGTHS.start else "more_rows")], inputs[place])
    attention.input[:] = inputs
    attention.output[0] = at + "output"
    made.nodes.append(attention)
    made.add("Slice", [at + "output", AT + "zero", AT + "rows", AT + "axis"], output, name=at + "Slice")


def _how_many_rows(made: Nodes, attention: Any) -> None:
    """Add what counts a pass's tokens, and says how many rows its attention reads more: one for one token, else none."""
    from onnx import TensorProto

    made.add("Shape", [TOKENS], AT + "rows", start=1, end=2)
    made.add("Less", [AT + "rows", AT + "two"], AT + "single")
    keys = made.add("Cast", [attention.input[LENGTHS][1]], AT + "keys", to=TensorProto.INT64)
    places = made.add("Shape", [attention.input[CACHE]], AT + "places", start=2, end=3)
    made.add("Less", [keys, places], AT + "room")
    reads = made.add("And", [AT + "single", AT + "room"], AT + "reads")
    made.add("Cast", [reads], AT + "more_64", to=TensorProto.INT64)
    more = made.add("Cast", [reads], AT + "more", to=TensorProto.INT32)
    made.add("Squeeze", [more], AT + "more_rows")
    # of [batch, rows, width]: at the rows' end
    made.add("Concat", [AT + "before", AT + "more_64", AT + "zero"], AT + "pads", axis=0)
