"""A model folder as a mixed ONNX folder: each matrix in the kind of blocks that was chosen for it (blocks.py).

The builder writes its int4 graph. Then the weights are read from the model folder once more, one matrix at a time, and rounded
anew: its nodes stay, their weights are replaced. In the file scales are float16, and a Cast widens them when the graph is
loaded. An offset4 matrix reads its inputs and behind them the means of their blocks (blocks.py says why), which matrices with
the same inputs share. (MatMulNBits takes zero points that are floats too, at a twentieth of the speed.) In the exact graph int8
is a float MatMul of widened bytes, as in an int8 folder. A split matrix is two, whose outputs are joined. The embedding's rows
come from blocks too, a tied one's from those of the output head, which are stored once (GatherBlockQuantized).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgespec.core.files import scratch_beside, whole_folder, write_json
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.blocks import BLOCK, INT8, OFFSET4, Blocks, in_blocks
from edgespec_export.onnx.by_layers import export_int4
from edgespec_export.onnx.folder import DATA, IN_GRAPH, DataFile, Nodes, set_nodes, unlike, written
from edgespec_export.onnx.to_onnx import ACCURACY_LEVEL, FAST_ACCURACY_LEVEL, FAST_GRAPH, log_of
from edgespec_export.onnx.to_onnx_stored import PRODUCT, bytes_in_rows, widen_matrix, widen_once

HEAD, TABLE = "lm_head", "model.embed_tokens"
SUFFIX = ".MatMul.weight"
ALIGNED = 64  # bytes at which a tensor in the data file starts

Array = np.ndarray[Any, Any]


def export_mixed(
    model_folder: Path,
    out_folder: Path,
    kinds: Mapping[str, str],
    importance: Mapping[str, Array],
    *,
    hidden_states: bool = False,
    log: Path | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write `out_folder` (whole or not at all), with the files of an int4 folder. Returns {"bytes", "notes"}.

    kinds: {the checkpoint's name of a matrix: its kind}; q, k and v, which the graph joins, have one kind. importance: {name: the
    weight [K] of an error in each of its columns}. about: {name of a further JSON file: its content}. Takes the rest
    that `export_int4` takes, and raises what it raises.
    """
    checkpoint = Checkpoint(model_folder)
    with scratch_beside(out_folder, "int4") as scratch, whole_folder(out_folder) as folder:
        source = scratch / "int4"
        export_int4(model_folder, source, hidden_states=hidden_states, log=log or log_of(out_folder))
        for file in source.iterdir():
            if file.name not in ("model.onnx", DATA, FAST_GRAPH):
                file.rename(folder / file.name)
        for name, content in (about or {}).items():
            write_json(folder / name, content)
        write_graphs(source, folder, checkpoint, kinds, importance)
        widen_once(folder)
    return written(out_folder)


def weight_of(stem: str, checkpoint: Checkpoint) -> tuple[str, Array]:
    """A matrix of the graph from the checkpoint's tensors, and the name of the first of them.

    Raises EdgespecError for a matrix that the checkpoint does not have.
    """
    names = checkpoint.shapes
    plain = stem.replace(".attn.", ".self_attn.") + ".weight"
    if stem == HEAD and plain not in names:
        plain = f"{TABLE}.weight"
    if plain in names:
        return plain, checkpoint.whole(plain)
    if stem.endswith(".qkv_proj"):
        three = [plain.replace("qkv_proj", f"{one}_proj") for one in "qkv"]
        return three[0], np.concatenate([checkpoint.whole(name) for name in three])
    for place, part in enumerate(("gate_proj", "up_proj")):
        joined = plain.replace(part, "gate_up_proj")
        if stem.endswith(f".{part}") and joined in names:
            return joined, np.split(checkpoint.whole(joined), 2)[place]
    raise unlike(f"the graph has a matrix {stem}, and the checkpoint no tensor {plain}")


class _Part(NamedTuple):
    """A matrix of the file: one of the builder's, or one of the two that a split one is made of."""

    stem: str
    kind: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.stem}{SUFFIX}"

    @property
    def bits(self) -> int:
        return 8 if self.kind == INT8 else 4

    @property
    def packed(self) -> str:
        return f"{self.name}_Q{self.bits}"

    @property
    def tables(self) -> list[str]:
        """What the operators on blocks read behind the packed values."""
        return [f"{self.name}_scales", *([f"{self.name}_zeros"] if self.kind != INT8 else [])]

    @property
    def inputs(self) -> int:
        """Columns of the MatMulNBits: those of the matrix, and one for each block's rest."""
        return self.columns + (self.columns // BLOCK if self.kind == OFFSET4 else 0)


def _stem_of(node: Any) -> str:
    """The builder's name of the matrix that a MatMulNBits reads, without its ending."""
    return str(node.input[1].removesuffix("_Q4").removesuffix(SUFFIX))


def write_graphs(
    source: Path,
    folder: Path,
    checkpoint: Checkpoint,
    kinds: Mapping[str, str],
    importance: Mapping[str, Array],
) -> None:
    """Write `folder`'s graphs and their one data file from the builder's int4 folder `source`, one matrix after another.

    Raises EdgespecError where the graph is not built as expected.
    """
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    model = onnx.load(source / "model.onnx", load_external_data=False)
    stems = dict.fromkeys(_stem_of(node) for node in model.graph.node if node.op_type == "MatMulNBits")
    if not stems:
        raise unlike(f"{source} has no MatMulNBits")
    if any(
        tensor.name == f"{TABLE}.weight" for tensor in model.graph.initializer
    ):  # an untied embedding, floats
        stems[TABLE] = None
    replaced = {f"{stem}{SUFFIX}{end}" for stem in stems for end in ("_Q4", "_scales")} | {f"{TABLE}.weight"}
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in replaced]
    parts: dict[str, list[_Part]] = {}
    own: list[Any] = []
    with open(folder / DATA, "wb") as stream:
        sink = DataFile(stream, ALIGNED)
        for tensor in filter(uses_external_data, kept):
            load_external_data_for_tensor(tensor, str(source))
            sink.begin(tensor, len(tensor.raw_data))
            stream.write(tensor.raw_data)
            tensor.ClearField("raw_data")
        for stem in stems:
            name, weight = weight_of(stem, checkpoint)
            pieces = in_blocks(weight, kinds[name], importance.get(name))
            ends = ("",) if len(pieces) == 1 else (".first", ".rest")
            parts[stem] = []
            for end, piece in zip(ends, pieces, strict=True):
                part = _Part(f"{stem}{end}", piece.kind, len(piece.packed), piece.columns)
                parts[stem].append(part)
                own += _stored(part, piece, sink)
    for name, level in {"model.onnx": ACCURACY_LEVEL, FAST_GRAPH: FAST_ACCURACY_LEVEL}.items():
        graph = onnx.ModelProto()
        graph.CopyFrom(model)
        _rewrite(graph.graph, kept, own, parts, level)
        bytes_in_rows(graph.graph)
        onnx.save(graph, folder / name)


def _stored(part: _Part, blocks: Blocks, sink: DataFile) -> list[Any]:
    """The TensorProtos of a matrix, whose bytes lie in the data file (small ones: in the graph)."""
    from onnx import numpy_helper

    values = {
        part.packed: blocks.packed,
        f"{part.name}_scales_F16": blocks.scales,
        f"{part.name}_zeros": blocks.zeros,
    }
    return [
        numpy_helper.from_array(value, name) if value.nbytes < IN_GRAPH else sink.add(name, value)
        for name, value in values.items()
        if value is not None
    ]


def _rewrite(
    graph: Any, kept: list[Any], own: list[Any], parts: Mapping[str, list[_Part]], level: int
) -> None:
    made = _Nodes(level)
    heads: set[str] = set()  # reshaped tables of the output head
    for part in (part for one in parts.values() for part in one):
        made.widened(f"{part.name}_scales")
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            made.product(node, parts[_stem_of(node)])
        elif node.op_type == "Reshape" and node.input[0] == f"{HEAD}{SUFFIX}_Q4":
            heads.add(node.output[0])
        elif node.op_type == "GatherBlockQuantized":
            if node.input[0] not in heads:
                raise unlike(f"{node.name} does not read the output head")
            made.embedding(node, parts[HEAD])
        elif node.op_type == "Gather" and node.input[0] == f"{TABLE}.weight":
            made.embedding(node, parts[TABLE])
        else:
            made.nodes.append(node)
    set_nodes(graph, [*made.first.nodes, *made.nodes])
    del graph.value_info[:]  # shapes, of tables that are others now; ONNX Runtime finds them itself
    del graph.initializer[:]
    read = {name for node in graph.node for name in node.input}
    graph.initializer.extend([*(tensor for tensor in kept if tensor.name in read), *own])
    graph.initializer.extend([*made.first.constants.values(), *made.constants.values()])


class _Nodes(Nodes):
    """Nodes and constants made for one graph, under names of their own."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.first = Nodes()  # made of constants: computed when the graph is loaded
        self.longer: dict[str, str] = {}  # an input with the means of its blocks behind it

    def widened(self, name: str) -> None:
        """A float16 table as float32."""
        from onnx import TensorProto

        self.first.add("Cast", [f"{name}_F16"], name, to=TensorProto.FLOAT)

    def product(self, node: Any, parts: list[_Part]) -> None:
        """In place of one of the builder's MatMulNBits; of a split matrix, both products side by side."""
        x, y = node.input[0], node.output[0]
        if len(parts) == 1:
            self.matrix(parts[0], node.name, x, y)
            return
        outputs = [f"{y}/{part.stem}" for part in parts]
        for part, output in zip(parts, outputs, strict=True):
            self.matrix(part, f"{node.name}/{part.stem}", x, output)
        self.add("Concat", outputs, y, name=f"{node.name}/Concat", axis=-1)

    def matrix(self, part: _Part, at: str, x: str, y: str) -> None:
        """The product of x with one matrix; `at`: the name of its node."""
        if part.kind == INT8 and self.level == ACCURACY_LEVEL:
            scales = f"{part.name}_scales"
            matrix = widen_matrix(self.first, part.packed, scales, part.rows, part.columns, BLOCK)
            self.add(PRODUCT, [x, matrix], y, name=at, transB=1)
            return
        settings = {"N": part.rows, "K": part.inputs, "bits": part.bits, "block_size": BLOCK}
        settings["accuracy_level"] = self.level
        x = self.with_means(x) if part.kind == OFFSET4 else x
        self.add("MatMulNBits", [x, part.packed, *part.tables], y, name=at, **settings)

    def with_means(self, x: str) -> str:
        """x [.., K] and behind it the means of its blocks of 32: [.., K + K/32]. (An AveragePool is slower for several rows.)"""
        if x not in self.longer:
            at = f"/mixed/{x}/"
            shape = self.constant("/mixed/in_blocks", np.array([0, 0, -1, BLOCK]))
            last = self.constant("/mixed/last", np.array([-1]))
            blocks = self.add("Reshape", [x, shape], at + "blocks")
            means = self.add("ReduceMean", [blocks, last], at + "means", keepdims=0)
            self.longer[x] = self.add("Concat", [x, means], at + "longer", axis=-1)
        return self.longer[x]

    def embedding(self, node: Any, parts: list[_Part]) -> None:
        """The embedding: rows of the blocks; of a split table, each token's row from the part that has it."""
        from onnx import TensorProto

        ids, y, at = node.input[1], node.output[0], "/mixed/embed_tokens/"
        if len(parts) == 1:
            self.rows(parts[0], node.name, ids, y, at)
            return
        count = parts[0].rows
        border, none = self.constant(at + "border", np.array(count)), self.constant(at + "none", np.array(0))
        last = self.constant(at + "last_of_first", np.array(count - 1))
        axis = self.constant("/mixed/last", np.array([-1]))
        self.add("Cast", [ids], at + "ids", to=TensorProto.INT64)
        self.add("Min", [at + "ids", last], at + "ids_first")
        self.add("Sub", [at + "ids", border], at + "behind")
        self.add("Max", [at + "behind", none], at + "ids_rest")
        self.add("Less", [at + "ids", border], at + "is_first")
        self.add("Unsqueeze", [at + "is_first", axis], at + "is_first_row")
        for part, name in zip(parts, ("first", "rest"), strict=True):
            self.rows(part, f"{node.name}/{name}", f"{at}ids_{name}", at + name, f"{at}{name}/")
        self.add("Where", [at + "is_first_row", at + "first", at + "rest"], y)

    def rows(self, part: _Part, node: str, ids: str, y: str, at: str) -> None:
        """Rows of one table; `node`: the name of what gathers them, `at`: the beginning of all other names."""
        width = -(-part.inputs // BLOCK) * BLOCK * part.bits // 8
        shape = self.constant(at + "shape", np.array([part.rows, width]))
        self.add("Reshape", [part.packed, shape], at + "table")
        settings = {"bits": part.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        whole = part.inputs % BLOCK == 0
        output = y if whole and part.kind != OFFSET4 else at + "gathered"
        inputs = [at + "table", ids, *part.tables]
        self.add("GatherBlockQuantized", inputs, output, name=node, **settings)
        if part.kind == OFFSET4:
            self.with_rests(part.columns, output, y, at)
        elif not whole:  # the last block of a row is filled up
            begin = self.constant(at + "begin", np.array([0]))
            end = self.constant(at + "end", np.array([part.columns]))
            self.add("Slice", [output, begin, end, self.constant("/mixed/last", np.array([-1]))], y)

    def with_rests(self, columns: int, rows: str, y: str, at: str) -> None:
        """Rows as they were gathered, [.., K and 32 rests of each block] -> the rows of the table [.., K]."""
        blocks = columns // BLOCK
        numbers = {
            "begin": [0],
            "middle": [columns],
            "end": [columns + blocks],
            "blocks": [0, 0, blocks, BLOCK],
            "rests": [0, 0, blocks, 1],
            "whole": [0, 0, columns],
        }
        names = {name: self.constant(f"{at}{name}_", np.array(of)) for name, of in numbers.items()}
        last = self.constant("/mixed/last", np.array([-1]))
        block = self.constant("/mixed/block", np.float32(BLOCK))
        values = self.add("Slice", [rows, names["begin"], names["middle"], last], at + "values")
        values = self.add("Reshape", [values, names["blocks"]], at + "blocks")
        rests = self.add("Slice", [rows, names["middle"], names["end"], last], at + "rests")
        rests = self.add("Div", [rests, block], at + "of_one")
        rests = self.add("Reshape", [rests, names["rests"]], at + "of_block")
        self.add("Reshape", [self.add("Add", [values, rests], at + "sum"), names["whole"]], y)
