"""What every writer of ONNX folders needs: a data file under construction, a graph's new nodes, the report. Knows no models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec.core.files import whole_file, write_array

DATA = "model.onnx.data"
IN_GRAPH = 1024  # bytes below which a tensor stays in the graph file
CONTRIB = "com.microsoft"
OF_CONTRIB = ("GroupQueryAttention", "MatMulNBits", "GatherBlockQuantized", "FusedMatMul")  # of that domain


class DataFile:
    """A data file under construction. `aligned`: bytes; offsets are multiples, so that a tensor can be mapped."""

    def __init__(self, stream: BinaryIO, aligned: int) -> None:
        self.stream, self.aligned = stream, aligned

    def add(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        """Append one tensor of any numpy type that ONNX knows; the TensorProto that points to it."""
        from onnx import TensorProto, helper

        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, dims=values.shape, data_type=kind)
        self.begin(tensor, values.nbytes)
        write_array(self.stream, values)
        return tensor

    def begin(self, tensor: Any, length: int) -> None:
        """Point a tensor to the next aligned place, where its `length` bytes are written then."""
        from onnx import TensorProto

        self.stream.write(bytes(-self.stream.tell() % self.aligned))
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        place = {"location": Path(self.stream.name).name, "offset": self.stream.tell(), "length": length}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))


class Nodes:
    """Nodes in the order of computation and constants, made for a graph. `named`: how a node is called that is given no name."""

    named = "{output}/{kind}"

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def constant(self, name: str, value: Any) -> str:
        """The name of a constant, which is made once."""
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def add(self, kind: str, inputs: Iterable[str], *outputs: str, name: str = "", **settings: Any) -> str:
        """Append a node; the name of its first output."""
        from onnx import helper

        name = name or self.named.format(output=outputs[0], kind=kind)
        domain = CONTRIB if kind in OF_CONTRIB else None
        self.nodes.append(helper.make_node(kind, [*inputs], outputs, name=name, domain=domain, **settings))
        return outputs[0]


@contextmanager
def rewritten(graph_file: Path, out: Path | None = None) -> Iterator[Any]:
    """A graph file as a ModelProto; what the body makes of it becomes `out` (default: the same file). The data file stays."""
    import onnx

    model = onnx.load(graph_file, load_external_data=False)
    yield model
    with whole_file(out or graph_file) as temporary:
        onnx.save(model, temporary)


def save_whole(model: Any, folder: Path) -> None:
    """Write a model that is in memory: `folder`/model.onnx and its data file anew."""
    import onnx

    (folder / DATA).unlink(missing_ok=True)
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location=DATA, size_threshold=IN_GRAPH
    )


def set_nodes(graph: Any, nodes: list[Any]) -> None:
    """Put `nodes`, in the order of computation, in place of all that a graph has."""
    del graph.node[:]
    graph.node.extend(nodes)


def written(folder: Path, *notes: str) -> dict[str, Any]:
    """What an export returns of a folder without sub-folders: {"bytes", "notes"}."""
    return {"bytes": sum(file.stat().st_size for file in folder.iterdir()), "notes": list(notes)}


def unlike(what: str) -> EdgespecError:
    """The error for a graph that the model builder wrote in another way than is known here."""
    return EdgespecError(f"{what}; this onnxruntime-genai writes its graphs differently")
