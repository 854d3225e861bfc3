"""An exported graph of two layers made as long as wanted: its second layer is repeated, since only the exporter can write one.

Each copy has a region of its own in the data file, with other content: ONNX Runtime maps the file, and keeps weights with equal
content once in memory (of a 910 MB file of equal layers 284 MB were resident). Such a model would be read from the processor's
cache, which no real one is.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json, whole_folder, write_json
from edgespec_export.onnx.folder import DATA, rewritten, unlike

TEMPLATE_LAYERS = 2  # the first layer is written in another way than all that follow
ALIGNED = 2**16  # large tensors start at a multiple, so that they can be mapped
LARGE = 2**20
PIECE = 2**24
# Bytes by which each copy's content is turned against the one before: whole blocks and whole floats.
TURN = 16 * 9973
_LAYER = re.compile(r"(?<=layers\.)\d+|(?<=past_key_values\.)\d+|(?<=present\.)\d+")


def repeat_layers(exported: Path, out_folder: Path, layers: int, turn: int = TURN) -> None:
    """A folder like `exported`, which has two layers, with its second layer `layers` − 1 times.

    turn: bytes by which a copy's weights are moved around in a circle, against the copy before; 0 leaves all copies equal.

    Raises EdgespecError where the graph is not built of layers as expected.
    """
    config = read_json(exported / "genai_config.json")
    has = int(config["model"]["decoder"]["num_hidden_layers"])
    if layers != has and has != TEMPLATE_LAYERS:
        raise EdgespecError(
            f"{exported} has {has} layers; only a graph of {TEMPLATE_LAYERS} can be made longer"
        )
    config["model"]["decoder"]["num_hidden_layers"] = layers
    with (
        whole_folder(out_folder) as folder,
        rewritten(exported / "model.onnx", folder / "model.onnx") as model,
    ):
        shutil.copyfile(exported / DATA, folder / DATA)
        if layers > has:
            lengthen(model.graph, layers)
            with open(exported / DATA, "rb") as source, open(folder / DATA, "ab") as sink:
                _repeat_weights(model.graph.initializer, layers, turn, source, sink)
        write_json(folder / "genai_config.json", config)


def moved(name: str, by: int) -> str:
    """A name of one layer as that of the layer `by` further up; names without a layer stay."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), name)


def layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[0]) if found else None


def lengthen(graph: Any, layers: int) -> None:
    """All but the weights of further layers: copies of the second layer go behind it, and what follows reads from the last."""
    nodes = graph.node
    second = [place for place, node in enumerate(nodes) if layer_of(node.name) == 1]
    if not second:
        raise unlike("the exported graph has no nodes of a layer 1")
    split = second[-1] + 1
    middle = [_moved_node(nodes[place], by) for by in range(1, layers - 1) for place in second]
    last = [_moved_node(node, layers - TEMPLATE_LAYERS) for node in nodes[split:]]
    del nodes[split:]
    nodes.extend([*middle, *last])
    for values in (graph.input, graph.output, graph.value_info):
        values.extend(list(copies(values, layers)))


def _moved_node(node: Any, by: int) -> Any:
    made = copy.deepcopy(node)
    made.name = moved(node.name, by)
    made.input[:] = [moved(name, by) for name in node.input]
    made.output[:] = [moved(name, by) for name in node.output]
    return made


def copies(named: Iterable[Any], layers: int) -> Iterator[Any]:
    """Further layers' copies of the entries of layer 1. Entries behind the layers (the last norm) are renamed in place."""
    for one in named:
        layer = layer_of(one.name)
        if layer == TEMPLATE_LAYERS:
            one.name = moved(one.name, layers - TEMPLATE_LAYERS)
        elif layer == 1:
            for by in range(1, layers - 1):
                made = copy.deepcopy(one)
                made.name = moved(one.name, by)
                yield made


def _repeat_weights(weights: Any, layers: int, turn: int, source: BinaryIO, sink: BinaryIO) -> None:
    """Copies of the second layer's weights, each with its bytes at the end of the data file."""
    sink.seek(0, 2)
    made = list(copies(weights, layers))
    for tensor in (one for one in made if one.external_data):  # small ones lie in the graph itself
        append_data(tensor, source, sink, turn * (int(_LAYER.findall(tensor.name)[0]) - 1))
    weights.extend(made)


def append_data(tensor: Any, source: BinaryIO, sink: BinaryIO, start: int = 0) -> None:
    """Copy a tensor's bytes from `source` to the end of `sink`, turned by `start` bytes, and note where they lie.

    Raises EdgespecError where `source` is too short.
    """
    entries = {entry.key: entry for entry in tensor.external_data}
    offset, length = int(entries["offset"].value), int(entries["length"].value)
    if length >= LARGE:
        sink.write(bytes(-sink.tell() % ALIGNED))
    entries["offset"].value = str(sink.tell())
    start %= length
    _copy(source, offset + start, length - start, sink)
    _copy(source, offset, start, sink)


def _copy(source: BinaryIO, offset: int, length: int, sink: BinaryIO) -> None:
    source.seek(offset)
    while length:
        piece = source.read(min(PIECE, length))
        if not piece:
            raise EdgespecError(f"the exported weights end {length} bytes too early; export them again")
        sink.write(piece)
        length -= len(piece)
