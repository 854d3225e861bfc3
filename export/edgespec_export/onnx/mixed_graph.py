"""The graph of a mixed folder: the builder's int4 graph with each matrix in the kind of blocks that was chosen for it.

The builder's nodes stay; their weights are replaced. In the file scales and shifts are float16, and a Cast widens them when the
graph is loaded. offset4 adds to MatMulNBits what its zero points cannot say: the mean of each block's inputs times 32 of the
block's shifts, a small MatMul. (MatMulNBits takes zero points that are floats too, at a twentieth of the speed.) In the exact
graph int8 is a float MatMul of widened bytes, as in an int8 folder. A split matrix is two, whose outputs are joined. The
embedding's rows come from blocks too, a tied one's from those of the output head, which are stored once (GatherBlockQuantized).

Knows the names that the model builder gives, and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec_export.onnx.blocks import BLOCK, INT4, INT8, OFFSET4, Blocks, SplitBlocks, split_rows

DATA = "model.onnx.data"
HEAD, TABLE = "lm_head", "model.embed_tokens"
FIRST, REST = ".first", ".rest"  # the parts of a split matrix, behind its name
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
    source: Path, folder: Path, blocks_of: Callable[[str], Blocks | SplitBlocks], graphs: Mapping[str, int]
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
            parts = {stem: blocks} if isinstance(blocks, Blocks) else blocks.parts(stem + FIRST, stem + REST)
            tensors = [tensor for name, part in parts.items() for tensor in _tensors(name, part)]
            made[stem] = blocks.kind, [_stored(*each, sink) for each in tensors]
    for name, level in graphs.items():
        graph = onnx.ModelProto()
        graph.CopyFrom(model)
        _rewrite(graph.graph, kept, made, stems, level)
        onnx.save(graph, folder / name)


def parts_of(stem: str, kind: str, rows: int) -> list[tuple[str, str, int]]:
    """(name, kind, rows) of the matrices that a stem is made of: one, or the two of a split kind."""
    if first := split_rows(kind):
        return [(stem + FIRST, INT8, first), (stem + REST, OFFSET4, rows - first)]
    return [(stem, kind, rows)]


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
    for stem, (whole, _) in made.items():
        for name, kind, _ in parts_of(stem, whole, stems[stem][0]):
            nodes.widened(f"{name}{SUFFIX}_scales")
            if kind == OFFSET4:
                _shifts(nodes, f"{name}{SUFFIX}")
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            stem = node.input[1].removesuffix("_Q4").removesuffix(SUFFIX)
            rest += _product(nodes, node, stem, made[stem][0], stems[stem], level)
        elif node.op_type == "Reshape" and node.input[0] == f"{HEAD}{SUFFIX}_Q4":
            reshaped[node.output[0]] = node
        elif node.op_type == "GatherBlockQuantized":
            if node.input[0] not in reshaped:
                raise EdgespecError(
                    f"{node.name} does not read the output head; this onnxruntime-genai writes int4 otherwise"
                )
            rest += _embedding(nodes, node, HEAD, made[HEAD][0], stems[HEAD])
        elif node.op_type == "Gather" and node.input[0] == f"{TABLE}.weight":
            rest += _embedding(nodes, node, TABLE, made[TABLE][0], stems[TABLE])
        else:
            rest.append(node)
    del graph.node[:]
    graph.node.extend([*nodes.first, *rest])
    del graph.initializer[:]
    read = {name for node in graph.node for name in node.input}
    own = [tensor for _, tensors in made.values() for tensor in tensors]
    graph.initializer.extend([*(tensor for tensor in kept if tensor.name in read), *own])
    graph.initializer.extend(nodes.constants.values())


def _shifts(nodes: _Nodes, name: str) -> None:
    """The shifts of an offset4 matrix in float32 [N, blocks]: the value at q = 0, and 8 scales."""
    nodes.widened(f"{name}_shifts")
    eight = nodes.constant("/mixed/eight", np.float32(8))
    nodes.folded("Mul", [f"{name}_scales", eight], f"{name}_eight_scales")
    nodes.folded("Add", [f"{name}_shifts", f"{name}_eight_scales"], f"{name}_shift")


def _product(nodes: _Nodes, node: Any, stem: str, kind: str, size: tuple[int, int], level: int) -> list[Any]:
    """The nodes in place of one of the builder's MatMulNBits; of a split matrix, both products side by side."""
    from onnx import helper

    x, y = node.input[0], node.output[0]
    parts = parts_of(stem, kind, size[0])
    if len(parts) == 1:
        return _matrix(nodes, node.name, stem, kind, size, level, x, y)
    found, outputs = list[Any](), [f"{y}/{name}" for name, _, _ in parts]
    for (name, own, rows), output in zip(parts, outputs, strict=True):
        found += _matrix(nodes, f"{node.name}/{name}", name, own, (rows, size[1]), level, x, output)
    return [*found, helper.make_node("Concat", outputs, [y], name=f"{node.name}/Concat", axis=-1)]


def _matrix(
    nodes: _Nodes, at: str, stem: str, kind: str, size: tuple[int, int], level: int, x: str, y: str
) -> list[Any]:
    """The product of x with one matrix; `at`: the name of its node."""
    from onnx import TensorProto, helper

    name, (rows, columns) = f"{stem}{SUFFIX}", size
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
        return [helper.make_node("MatMul", [x, f"{name}/matrix"], [y], name=at)]
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
    made = [helper.make_node("MatMulNBits", inputs, [output], name=at, domain=CONTRIB, **settings)]
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
        helper.make_node("MatMul", [nodes.means[x], f"{name}/shift_matrix"], [shifted], name=f"{at}/Shift"),
        helper.make_node("Add", [output, shifted], [y], name=f"{at}/Add"),
    ]


def _embedding(nodes: _Nodes, node: Any, stem: str, kind: str, size: tuple[int, int]) -> list[Any]:
    """The embedding: rows of the blocks of `stem`; of a split table, each token's row from the part that has it."""
    from onnx import TensorProto, helper

    ids, y, at = node.input[1], node.output[0], "/mixed/embed_tokens/"
    parts = parts_of(stem, kind, size[0])
    if len(parts) == 1:
        return _rows(nodes, node.name, stem, kind, size, ids, y, at)
    count = parts[0][2]
    border, none = nodes.constant(at + "border", np.array(count)), nodes.constant(at + "none", np.array(0))
    last = nodes.constant(at + "last_of_first", np.array(count - 1))
    axis = nodes.constant("/mixed/last", np.array([-1]))

    def made(op: str, inputs: list[str], output: str, **settings: Any) -> Any:
        return helper.make_node(op, inputs, [output], name=f"{output}/{op}", **settings)

    found = [
        made("Cast", [ids], at + "ids", to=TensorProto.INT64),
        made("Min", [at + "ids", last], at + "ids_first"),
        made("Sub", [at + "ids", border], at + "behind"),
        made("Max", [at + "behind", none], at + "ids_rest"),
        made("Less", [at + "ids", border], at + "is_first"),
        made("Unsqueeze", [at + "is_first", axis], at + "is_first_row"),
    ]
    for (name, own, rows), part in zip(parts, ("first", "rest"), strict=True):
        inside = (rows, size[1]), f"{at}ids_{part}", at + part, f"{at}{part}/"
        found += _rows(nodes, f"{node.name}/{part}", name, own, *inside)
    return [*found, made("Where", [at + "is_first_row", at + "first", at + "rest"], y)]


def _rows(
    nodes: _Nodes, node: str, stem: str, kind: str, size: tuple[int, int], ids: str, y: str, at: str
) -> list[Any]:
    """Rows of one table."""
    from onnx import helper

    name, (rows, columns) = f"{stem}{SUFFIX}", size
    bits = 8 if kind == INT8 else 4
    shape = nodes.constant(at + "shape", np.array([rows, -(-columns // BLOCK) * BLOCK * bits // 8]))
    table = helper.make_node("Reshape", [f"{name}_Q{bits}", shape], [at + "table"], name=at + "Reshape")
    inputs = [at + "table", ids, f"{name}_scales", *([f"{name}_zeros"] if kind == INT4 else [])]
    settings = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    output = at + "scaled" if kind == OFFSET4 else y
    made = [
        table,
        helper.make_node("GatherBlockQuantized", inputs, [output], name=node, domain=CONTRIB, **settings),
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
