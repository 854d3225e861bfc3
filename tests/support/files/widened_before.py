"""Exact graphs with int8 matrices as they were widened before: by five nodes, into columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from edgespec_export.onnx.folder import Nodes, set_nodes
from onnx import TensorProto, helper


def widen_as_before(folder: Path) -> int:
    """Rewrite model.onnx of an int8 or mixed folder; how many matrices were changed."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    made, kept, changed = Nodes(), [], 0
    made.constant("/before/zero", np.float32(128))
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            packed, scales, _ = node.input
            size = next(one.i for one in node.attribute if one.name == "block_size")
            rows, columns = tensors[packed].dims
            tensors[packed].dims[:] = [rows, columns // size, size]
            _widen(made, packed, scales, (rows, columns, size))
            changed += 1
        elif node.op_type == "FusedMatMul":
            inputs = [node.input[0], f"{node.input[1]}/columns"]
            kept.append(helper.make_node("MatMul", inputs, node.output, name=node.name))
        else:
            kept.append(node)
    # Casts of mixed scales come first in `kept`; ONNX Runtime sorts the nodes itself
    first = [node for node in kept if node.op_type == "Cast" and node.input[0].endswith("_F16")]
    set_nodes(graph, [*first, *made.nodes, *(node for node in kept if node not in first)])
    graph.initializer.extend(made.constants.values())
    onnx.save(model, folder / "model.onnx")
    return changed


def _widen(made: Nodes, packed: str, scales: str, shape: tuple[int, int, int]) -> None:
    rows, columns, size = shape
    at = f"/widen/{packed}/"
    blocks = made.constant(f"{at}in_blocks", np.array([rows, columns // size, 1]))
    whole = made.constant(f"{at}whole", np.array([rows, columns]))
    wide = made.add("Cast", [packed], at + "float", to=TensorProto.FLOAT)
    wide = made.add("Sub", [wide, "/before/zero"], at + "centred")
    wide = made.add("Mul", [wide, made.add("Reshape", [scales, blocks], at + "scales")], at + "blocks")
    wide = made.add("Reshape", [wide, whole], at + "rows")
    made.add("Transpose", [wide], at + "columns", perm=[1, 0])
