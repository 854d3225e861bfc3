"""The graph of a mixed folder: the builder's int4 graph with each matrix in the kind of blocks that was chosen for it.

The builder's nodes stay; their weights are replaced. In the file scales and shifts are float16, and a Cast widens them when the
graph is loaded. offset4 adds to MatMulNBits what its zero points cannot say: the mean of each block's inputs times 32 of the
block's shifts, a small MatMul. (MatMulNBits takes zero points that are floats too; whether that is faster was not measured.) In
the exact graph int8 is a float MatMul of widened bytes, as in an int8 folder. The embedding's rows come from blocks too, a tied
one's from those of the output head, which are stored once (GatherBlockQuantized).

Knows the names that the model builder gives, and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec_export.onnx.blocks import BLOCK, INT4, INT8, OFFSET4, Blocks

DATA = "model.onnx.data"
HEAD, TABLE = "lm_head", "model.embed_tokens"
SUFFIX = ".MatMul.weight"
CONTRIB = "com.microsoft"
IN_GRAPH = 1024  # bytes below which a tensor stays in the graph file
ALIGNED = 64  # bytes at which a tensor in the data file starts
EXACT_LEVEL, FAST_LEVEL = 1, 4  # accuracy levels of MatMulNBits: float activations, int8 activations

Array = np.ndarray[Any, Any]


def stems_of(graph: Any) -> dict[str, tuple[int, int]]:
    """{the builder's name of a matrix, without its ending: (N, K)} of every MatMulNBits of a builder's int4 graph, and of an
    untied embedding."""
    found = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            settings = {attribute.name: attribute.i for attribute in node.attribute}
            found[node.input[1].removesuffix("_Q4").removesuffix(SUFFIX)] = (settings["N"], settings["K"])
    for tensor in graph.initializer:
        if tensor.name == f"{TABLE}.weight":  # an untied embedding, floats
            found[TABLE] = (tensor.dims[0], tensor.dims[1])
    return found


def write_graphs(
    source: Path, folder: Path, blocks_of: Callable[[str], Blocks], graphs: Mapping[str, int]
) -> None:
    """Write `folder`'s graphs and their one data file from the builder's int4 folder `source`.

    blocks_of: a matrix by its stem, asked for once each. graphs: {file name: accuracy level}. Raises EdgespecError where the
    graph is not built as expected.
    """
    import onnx

    model = onnx.load(source / "model.onnx", load_external_data=False)
    stems = stems_of(model.graph)
    if not set(stems) - {TABLE}:
        raise EdgespecError(f"{source} has no MatMulNBits; this onnxruntime-genai quantises otherwise")
    replaced = {f"{stem}{SUFFIX}{end}" for stem in stems for end in ("_Q4", "_scales")} | {f"{TABLE}.weight"}
    made: dict[str, tuple[str, list[Any]]] = {}
    with open(folder / DATA, "wb") as sink:
        kept = [tensor for tensor in model.graph.initializer if tensor.name not in replaced]
        for tensor in kept:
            _move_data(tensor, source, sink)
        for stem in stems:
            blocks = blocks_of(stem)
            made[stem] = blocks.kind, [_stored(*each, sink) for each in _tensors(stem, blocks)]
    for name, level in graphs.items():
        graph = onnx.ModelProto()
        graph.CopyFrom(model)
        _rewrite(graph.graph, kept, made, stems, level)
        onnx.save(graph, folder / name)


def _tensors(stem: str, blocks: Blocks) -> list[tuple[str, Array]]:
    name = f"{stem}{SUFFIX}"
    found = [
        (f"{name}_{'Q8' if blocks.kind == INT8 else 'Q4'}", blocks.packed),
        (f"{name}_scales_F16", blocks.scales),
    ]
    if blocks.zeros is not None:
        found.append((f"{name}_zeros", blocks.zeros))
    if blocks.shifts is not None:
        found.append((f"{name}_shifts_F16", blocks.shifts))
    return found


def _stored(name: str, value: Array, sink: BinaryIO) -> Any:
    """A TensorProto whose bytes lie in the data file (small ones: in the graph)."""
    from onnx import TensorProto, helper, numpy_helper

    value = np.ascontiguousarray(value)
    if value.nbytes < IN_GRAPH:
        return numpy_helper.from_array(value, name)
    sink.write(bytes(-sink.tell() % ALIGNED))
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape)
    _point(tensor, sink.tell(), value.nbytes)
    value.tofile(sink)
    return tensor


def _point(tensor: Any, offset: int, length: int) -> None:
    from onnx import TensorProto

    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", DATA), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _move_data(tensor: Any, source: Path, sink: BinaryIO) -> None:
    """The tensor's bytes from the builder's data file to the new one."""
    if not tensor.external_data:
        return
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(place.get("offset", 0)), int(place["length"])
    sink.write(bytes(-sink.tell() % ALIGNED))
    _point(tensor, sink.tell(), length)
    with open(source / place["location"], "rb") as stream:
        stream.seek(offset)
        data = stream.read(length)
    if len(data) != length:
        raise EdgespecError(f"{source / DATA} ends within {tensor.name}; export again")
    sink.write(data)


class _Nodes:
    """Nodes and constants made for one graph, under names of their own."""

    def __init__(self) -> None:
        self.first: list[Any] = []  # made of constants: computed when the graph is loaded
        self.constants: dict[str, Any] = {}
        self.means: dict[str, str] = {}  # the means of an input's blocks, shared by the matrices that read it

    def constant(self, name: str, value: Any) -> str:
        from onnx import numpy_helper

        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(value), name))
        return name

    def folded(self, kind: str, inputs: list[str], output: str, **settings: Any) -> str:
        from onnx import helper

        self.first.append(helper.make_node(kind, inputs, [output], name=output, **settings))
        return output

    def widened(self, name: str) -> str:
        """A float16 table as float32."""
        from onnx import TensorProto

        return self.folded("Cast", [f"{name}_F16"], name, to=TensorProto.FLOAT)


def _rewrite(
    graph: Any,
    kept: list[Any],
    made: Mapping[str, tuple[str, list[Any]]],
    stems: Mapping[str, tuple[int, int]],
    level: int,
) -> None:
    nodes = _Nodes()
    rest: list[Any] = []
    reshaped: dict[str, Any] = {}
    for stem, (kind, _) in made.items():
        nodes.widened(f"{stem}{SUFFIX}_scales")
        if kind == OFFSET4:
            _shifts(nodes, f"{stem}{SUFFIX}", stem)
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            stem = node.input[1].removesuffix("_Q4").removesuffix(SUFFIX)
            rest += _matrix(nodes, node, stem, made[stem][0], stems[stem], level)
        elif node.op_type == "Reshape" and node.input[0] == f"{HEAD}{SUFFIX}_Q4":
            reshaped[node.output[0]] = node
        elif node.op_type == "GatherBlockQuantized":
            if node.input[0] not in reshaped:
                raise EdgespecError(
                    f"{node.name} does not read the output head; this onnxruntime-genai writes int4 otherwise"
                )
            rest += _rows(nodes, node, HEAD, made[HEAD][0], stems[HEAD])
        elif node.op_type == "Gather" and node.input[0] == f"{TABLE}.weight":
            rest += _rows(nodes, node, TABLE, made[TABLE][0], stems[TABLE])
        else:
            rest.append(node)
    del graph.node[:]
    graph.node.extend([*nodes.first, *rest])
    del graph.initializer[:]
    read = {name for node in graph.node for name in node.input}
    own = [tensor for _, tensors in made.values() for tensor in tensors]
    graph.initializer.extend([*(tensor for tensor in kept if tensor.name in read), *own])
    graph.initializer.extend(nodes.constants.values())


def _shifts(nodes: _Nodes, name: str, stem: str) -> None:
    """The shifts of an offset4 matrix in float32 [N, blocks]: the value at q = 0, and 8 scales."""
    nodes.widened(f"{name}_shifts")
    eight = nodes.constant("/mixed/eight", np.float32(8))
    nodes.folded("Mul", [f"{name}_scales", eight], f"{name}_eight_scales")
    nodes.folded("Add", [f"{name}_shifts", f"{name}_eight_scales"], f"{name}_shift")


def _matrix(nodes: _Nodes, node: Any, stem: str, kind: str, size: tuple[int, int], level: int) -> list[Any]:
    """The nodes in place of one of the builder's MatMulNBits."""
    from onnx import TensorProto, helper

    name, (rows, columns) = f"{stem}{SUFFIX}", size
    x, y = node.input[0], node.output[0]
    if kind == INT8 and level == EXACT_LEVEL:
        shape = nodes.constant(f"/mixed/blocks_{rows}_{columns}", np.array([rows, columns // BLOCK, BLOCK]))
        whole = nodes.constant(f"/mixed/whole_{rows}_{columns}", np.array([rows, columns]))
        last = nodes.constant("/mixed/last", np.array([-1]))
        zero = nodes.constant("/mixed/zero8", np.float32(128))
        nodes.folded("Cast", [f"{name}_Q8"], f"{name}/float", to=TensorProto.FLOAT)
        nodes.folded("Sub", [f"{name}/float", zero], f"{name}/centred")
        nodes.folded("Reshape", [f"{name}/centred", shape], f"{name}/blocks")
        nodes.folded("Unsqueeze", [f"{name}_scales", last], f"{name}/scales")
        nodes.folded("Mul", [f"{name}/blocks", f"{name}/scales"], f"{name}/scaled")
        nodes.folded("Reshape", [f"{name}/scaled", whole], f"{name}/rows")
        nodes.folded("Transpose", [f"{name}/rows"], f"{name}/matrix", perm=[1, 0])
        return [helper.make_node("MatMul", [x, f"{name}/matrix"], [y], name=node.name)]
    inputs = [x, f"{name}_{'Q8' if kind == INT8 else 'Q4'}", f"{name}_scales"]
    if kind == INT4:
        inputs.append(f"{name}_zeros")
    settings = {
        "N": rows,
        "K": columns,
        "bits": 8 if kind == INT8 else 4,
        "block_size": BLOCK,
        "accuracy_level": level,
    }
    output = f"{y}/scaled" if kind == OFFSET4 else y
    made = [helper.make_node("MatMulNBits", inputs, [output], name=node.name, domain=CONTRIB, **settings)]
    if kind != OFFSET4:
        return made
    nodes.folded(
        "Mul", [f"{name}_shift", nodes.constant("/mixed/block", np.float32(BLOCK))], f"{name}/summed"
    )
    nodes.folded("Transpose", [f"{name}/summed"], f"{name}/shift_matrix", perm=[1, 0])
    before: list[Any] = []
    if x not in nodes.means:  # a pool: one node where Reshape and ReduceSum are two
        nodes.means[x] = mean = f"/mixed/{x}/means"
        pool = {"kernel_shape": [BLOCK], "strides": [BLOCK]}
        before = [helper.make_node("AveragePool", [x], [mean], name=mean, **pool)]
    shifted = f"{y}/shifted"
    return [
        *before,
        *made,
        helper.make_node(
            "MatMul", [nodes.means[x], f"{name}/shift_matrix"], [shifted], name=f"{node.name}/Shift"
        ),
        helper.make_node("Add", [output, shifted], [y], name=f"{node.name}/Add"),
    ]


def _rows(nodes: _Nodes, node: Any, stem: str, kind: str, size: tuple[int, int]) -> list[Any]:
    """The embedding: rows of the blocks of `stem`."""
    from onnx import helper

    name, (rows, columns) = f"{stem}{SUFFIX}", size
    ids, y, at = node.input[1], node.output[0], "/mixed/embed_tokens/"
    bits = 8 if kind == INT8 else 4
    shape = nodes.constant(at + "shape", np.array([rows, -(-columns // BLOCK) * BLOCK * bits // 8]))
    table = helper.make_node("Reshape", [f"{name}_Q{bits}", shape], [at + "table"], name=at + "Reshape")
    inputs = [at + "table", ids, f"{name}_scales", *([f"{name}_zeros"] if kind == INT4 else [])]
    settings = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    output = at + "scaled" if kind == OFFSET4 else y
    made = [
        table,
        helper.make_node(
            "GatherBlockQuantized", inputs, [output], name=node.name, domain=CONTRIB, **settings
        ),
    ]
    if kind != OFFSET4:
        return made
    last = nodes.constant("/mixed/last", np.array([-1]))
    blocks = nodes.constant(f"/mixed/split_{columns}", np.array([0, 0, columns // BLOCK, BLOCK]))
    whole = nodes.constant(f"/mixed/join_{columns}", np.array([0, 0, columns]))
    return [
        *made,
        helper.make_node("Gather", [f"{name}_shift", ids], [at + "shift"], name=at + "GatherShift"),
        helper.make_node("Unsqueeze", [at + "shift", last], [at + "shifts"], name=at + "Unsqueeze"),
        helper.make_node("Reshape", [output, blocks], [at + "blocks"], name=at + "ReshapeBlocks"),
        helper.make_node("Add", [at + "blocks", at + "shifts"], [at + "shifted"], name=at + "Add"),
        helper.make_node("Reshape", [at + "shifted", whole], [y], name=at + "ReshapeRows"),
    ]
