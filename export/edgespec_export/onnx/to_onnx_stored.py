"""Weights that are small in the file and float32 in memory: fp16 and int8 on ONNX Runtime's CPU kernels.

ONNX Runtime on a CPU multiplies neither both fast and exactly. A float16 GroupQueryAttention graph runs there, with a Cast to
float32 around every MatMul and the rest rounded to float16, so that it is no faster and a block is 4e-3 from single steps.
MatMulNBits with 8 bits and float activations takes 7 to 15 times as long as fp32 (docs/devices.md has the measurements). So the
graphs here widen each matrix in front of its MatMul. The widening is made of constants, and ONNX Runtime does it once, when it
loads: arithmetic, speed and memory are those of fp32, the file is a half or a quarter of it.

Knows the names that the model builder gives; the rest of an export is to_onnx's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec_export.onnx.folder import DATA, IN_GRAPH, Nodes, set_nodes

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.MatMul.weight"
UINT8_ZERO = 128.0
_TABLES = ("cos_cache", "sin_cache")  # of RoPE; with other endings where a family has several


def store_halves(folder: Path) -> None:
    """Rewrite the fp32 folder `folder`: matrices and embeddings as float16, widened by a Cast.

    Raises EdgespecError where a weight is beyond float16's range.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    casts = []  # like all nodes of constants, before the others: a graph is listed in the order of its computation
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2 or tensor.name.startswith(_TABLES):
            continue
        values = numpy_helper.to_array(tensor)
        largest = float(np.abs(values).max())
        if largest > float(np.finfo(np.float16).max):
            raise EdgespecError(
                f"{tensor.name} has a weight of {largest:g}, which float16 cannot hold; export fp32 instead"
            )
        stored, name = f"{tensor.name}_F16", f"/widen/{tensor.name}"
        casts.append(helper.make_node("Cast", [stored], [tensor.name], name=name, to=TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), stored))
    set_nodes(graph, [*casts, *graph.node])
    _save_whole(model, folder)


def share_int8_table(folder: Path) -> None:
    """Have a tied embedding of an int8 folder read its rows from the output head's bytes; the builder keeps a float table for it.

    Rewrites model.onnx and its data file. Raises EdgespecError where the graph is not built as expected.
    """
    import onnx
    from onnx import TensorProto

    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    readers = [node for node in graph.node if TABLE in node.input]
    if [node.op_type for node in readers] != ["Gather"] or f"{HEAD}_Q8" not in tensors:
        raise EdgespecError(
            f"{folder} does not read {TABLE} with one Gather; this onnxruntime-genai writes int8 differently"
        )
    width = tensors[TABLE].dims[1]
    reader, at = readers[0], "/widen/embed_tokens/"
    ids, output = reader.input[1], reader.output[0]
    made = Nodes()
    rows = made.add("Gather", [f"{HEAD}_Q8", ids], at + "bytes")
    rows = made.add("Cast", [rows], at + "float", to=TensorProto.FLOAT)
    rows = made.add("Sub", [rows, made.constant(at + "zero", np.float32(UINT8_ZERO))], at + "centred")
    scales = made.add("Gather", [f"{HEAD}_scales", ids], at + "scale")
    scales = made.add("Unsqueeze", [scales, made.constant(at + "last", np.array([-1]))], at + "scales")
    blocks = made.add("Mul", [rows, scales], at + "blocks")
    made.add("Reshape", [blocks, made.constant(at + "rows", np.array([0, 0, width]))], output)
    set_nodes(graph, [new for old in graph.node for new in (made.nodes if old == reader else [old])])
    graph.initializer.remove(tensors[TABLE])
    graph.initializer.extend(made.constants.values())
    _save_whole(model, folder)


def widen_int8(folder: Path) -> None:
    """Rewrite model.onnx of an int8 folder: the bytes and scales of each MatMulNBits, widened in front of a MatMul.

    Reads and writes the graph alone; the data file stays. Raises EdgespecError where the graph has no such node.
    """
    import onnx
    from onnx import helper

    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph = model.graph
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
    if not nodes:
        raise EdgespecError(f"{folder} has no MatMulNBits; this onnxruntime-genai writes int8 differently")
    made = Nodes()
    for node in nodes:
        settings = {attribute.name: attribute.i for attribute in node.attribute}
        packed, scales = node.input[1:3]
        rows, columns, size = settings["N"], settings["K"], settings["block_size"]
        if settings["bits"] != 8 or columns % size or len([name for name in node.input if name]) != 3:
            raise EdgespecError(
                f"{node.name} of {folder} has {settings} and inputs {list(node.input)}; symmetric 8-bit blocks that fill "
                "their rows are wanted"
            )
        matrix = widen_matrix(made, packed, scales, rows, columns, size)
        node.CopyFrom(helper.make_node("MatMul", [node.input[0], matrix], node.output, name=node.name))
    graph.initializer.extend(made.constants.values())
    set_nodes(graph, [*made.nodes, *graph.node])
    onnx.save(model, folder / "model.onnx")


def widen_matrix(made: Nodes, packed: str, scales: str, rows: int, columns: int, block: int) -> str:
    """Add what makes floats [K, N] of a matrix's bytes and scales; the name of these. Done once, when the graph is loaded."""
    from onnx import TensorProto

    at, shape = f"/widen/{packed}/", f"/widen/shape_{rows}_{columns}"
    zero = made.constant("/widen/zero", np.float32(UINT8_ZERO))
    of_block = made.constant(f"{shape}_blocks", np.array([rows, columns // block, 1]))
    whole = made.constant(shape, np.array([rows, columns]))
    wide = made.add("Cast", [packed], at + "float", to=TensorProto.FLOAT)
    wide = made.add("Sub", [wide, zero], at + "centred")
    scales = made.add("Reshape", [scales, of_block], at + "scales")
    wide = made.add("Mul", [wide, scales], at + "blocks")
    wide = made.add("Reshape", [wide, whole], at + "rows")
    return made.add("Transpose", [wide], at + "matrix", perm=[1, 0])


def _save_whole(model: Any, folder: Path) -> None:
    """Graph and data file anew."""
    import onnx

    (folder / DATA).unlink()
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location=DATA, size_threshold=IN_GRAPH
    )
