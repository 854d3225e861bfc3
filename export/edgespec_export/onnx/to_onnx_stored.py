"""Weights that are small in the file and float32 in memory: fp16 and int8 on ONNX Runtime's CPU kernels.

ONNX Runtime on a CPU multiplies neither both fast and exactly. A float16 GroupQueryAttention graph runs there, with a Cast to
float32 around every MatMul and the rest rounded to float16, so that it is no faster and a block is 4e-3 from single steps.
MatMulNBits with 8 bits and float activations takes 7 to 15 times as long as fp32 (docs/devices.md has the measurements). So the
graphs here widen each matrix in front of its MatMul. The widening is made of constants, and ONNX Runtime does it once, when it
loads: arithmetic, speed and memory are those of fp32, the file is a half or a quarter of it.

ONNX Runtime keeps what every constant node gives until all are computed. So one node (DequantizeLinear) widens a matrix as its
bytes lie in the file, and the product reads rows as columns: loading takes the floats and one matrix more. An engine must be told
to widen when it loads (WIDEN_ONCE; genai_config.json tells onnxruntime-genai). Untold, it widens in every pass: that is float
arithmetic too, and a step takes 7 to 9 times as long.

Knows the names that the model builder gives; the rest of an export is to_onnx's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.onnx_runtime import WIDEN_ONCE
from edgespec_runtime.untrusted.genai_settings import SETTINGS

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json, write_json
from edgespec_export.onnx.folder import CONTRIB, Nodes, rewritten, save_whole, set_nodes, unlike

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.MatMul.weight"
UINT8_ZERO = 128
PRODUCT = "FusedMatMul"  # with transB
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
    save_whole(model, folder)


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
        raise unlike(f"{folder} does not read {TABLE} with one Gather")
    width = tensors[TABLE].dims[1]
    reader, at = readers[0], "/widen/embed_tokens/"
    ids, output = reader.input[1], reader.output[0]
    made = Nodes()
    rows = made.add("Gather", [f"{HEAD}_Q8", ids], at + "bytes")
    in_blocks = np.array([0, 0, -1, tensors[f"{HEAD}_Q8"].dims[2]])  # the exact graph's rows have none
    rows = made.add("Reshape", [rows, made.constant(at + "shape", in_blocks)], at + "in_blocks")
    rows = made.add("Cast", [rows], at + "float", to=TensorProto.FLOAT)
    rows = made.add("Sub", [rows, made.constant(at + "zero", np.float32(UINT8_ZERO))], at + "centred")
    scales = made.add("Gather", [f"{HEAD}_scales", ids], at + "scale")
    scales = made.add("Unsqueeze", [scales, made.constant(at + "last", np.array([-1]))], at + "scales")
    blocks = made.add("Mul", [rows, scales], at + "blocks")
    made.add("Reshape", [blocks, made.constant(at + "rows", np.array([0, 0, width]))], output)
    set_nodes(graph, [new for old in graph.node for new in (made.nodes if old == reader else [old])])
    graph.initializer.remove(tensors[TABLE])
    graph.initializer.extend(made.constants.values())
    save_whole(model, folder)


def widen_int8(folder: Path) -> None:
    """Rewrite model.onnx of an int8 folder: the bytes and scales of each MatMulNBits, widened in front of a MatMul.

    Reads and writes the graph alone; the data file stays. Raises EdgespecError where the graph has no such node.
    """
    from onnx import helper

    made = Nodes()
    with rewritten(folder / "model.onnx") as model:
        graph = model.graph
        nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
        if not nodes:
            raise unlike(f"{folder} has no MatMulNBits")
        for node in nodes:
            settings = {attribute.name: attribute.i for attribute in node.attribute}
            packed, scales = node.input[1:3]
            rows, columns, size = settings["N"], settings["K"], settings["block_size"]
            if settings["bits"] != 8 or columns % size or len([name for name in node.input if name]) != 3:
                raise EdgespecError(
                    f"{node.name} of {folder} has {settings} and inputs {list(node.input)}; symmetric 8-bit blocks that fill "
                    "their rows are wanted"
                )
            inputs = [node.input[0], widen_matrix(made, packed, scales, rows, columns, size)]
            product = helper.make_node(PRODUCT, inputs, node.output, name=node.name, domain=CONTRIB, transB=1)
            node.CopyFrom(product)
        graph.initializer.extend(made.constants.values())
        set_nodes(graph, [*made.nodes, *graph.node])
        bytes_in_rows(graph)
    widen_once(folder)


def widen_matrix(made: Nodes, packed: str, scales: str, rows: int, columns: int, block: int) -> str:
    """Add what makes floats [N, K] of a matrix's bytes and scales; the name of these. `bytes_in_rows` goes with it."""
    from onnx import TensorProto, helper

    blocks = columns // block
    shape, zeros = f"/widen/shape_{rows}_{blocks}", f"/widen/zeros_{rows}_{blocks}"
    if shape not in made.constants:
        zero = helper.make_tensor("value", TensorProto.UINT8, [1], [UINT8_ZERO])
        made.add("ConstantOfShape", [made.constant(shape, np.array([rows, blocks]))], zeros, value=zero)
    return made.add("DequantizeLinear", [packed, scales, zeros], f"/widen/{packed}", axis=1, block_size=block)


def bytes_in_rows(graph: Any) -> None:
    """Give the bytes that a finished graph widens the shape [N, K]; MatMulNBits reads the same ones as [N, blocks, block]."""
    widened = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    for tensor in graph.initializer:
        if tensor.name in widened:
            rows, blocks, block = tensor.dims
            tensor.dims[:] = [rows, blocks * block]


def widen_once(folder: Path) -> None:
    """Have onnxruntime-genai widen the bytes when it loads the folder's graph."""
    settings = read_json(folder / SETTINGS)
    settings["model"]["decoder"]["session_options"] |= dict([WIDEN_ONCE])
    write_json(folder / SETTINGS, settings)
