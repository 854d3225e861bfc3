"""A model folder as a mixed ONNX folder: each matrix in the kind of blocks that was chosen for it (blocks.py).

The builder writes its int4 graph; then the weights are read from the model folder once more, one matrix at a time, and rounded
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec.core.files import scratch_beside, whole_folder, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import is_surplus
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.blocks import Blocks, SplitBlocks, in_blocks
from edgespec_export.onnx.by_layers import export_int4
from edgespec_export.onnx.folder import DATA, written
from edgespec_export.onnx.mixed_graph import EXACT_LEVEL, FAST_LEVEL, write_graphs
from edgespec_export.onnx.to_onnx import FAST_GRAPH, log_of
from edgespec_export.onnx.to_onnx_stored import widen_once

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
    tied = ModelShape.from_config(read_config(model_folder)).tied
    names = {name for name in checkpoint if not is_surplus(name, tied=tied)}
    with scratch_beside(out_folder, "int4") as scratch, whole_folder(out_folder) as folder:
        source = scratch / "int4"
        export_int4(model_folder, source, hidden_states=hidden_states, log=log or log_of(out_folder))
        for file in source.iterdir():
            if file.name not in ("model.onnx", DATA, FAST_GRAPH):
                file.rename(folder / file.name)
        for name, content in (about or {}).items():
            write_json(folder / name, content)

        def blocks_of(stem: str) -> Blocks | SplitBlocks:
            parts = parts_of(stem, names)
            weight = np.concatenate([_matrix(checkpoint, *part) for part in parts])
            name = parts[0][0]
            return in_blocks(weight, kinds[name], importance.get(name))

        write_graphs(source, folder, blocks_of, {"model.onnx": EXACT_LEVEL, FAST_GRAPH: FAST_LEVEL})
        widen_once(folder)
    return written(out_folder)


def parts_of(stem: str, names: set[str]) -> list[tuple[str, int, int]]:
    """(the checkpoint's tensor, which of how many equal parts of its rows) that make up a matrix of the graph, in order.

    Raises EdgespecError for a matrix that the checkpoint does not have.
    """
    plain = stem.replace(".attn.", ".self_attn.") + ".weight"
    if stem == "lm_head" and plain not in names:
        plain = "model.embed_tokens.weight"
    if plain in names:
        return [(plain, 0, 1)]
    if stem.endswith(".qkv_proj"):
        return [(plain.replace("qkv_proj", f"{one}_proj"), 0, 1) for one in "qkv"]
    for place, part in enumerate(("gate_proj", "up_proj")):
        joined = plain.replace(part, "gate_up_proj")
        if stem.endswith(f".{part}") and joined in names:
            return [(joined, place, 2)]
    raise EdgespecError(
        f"the graph has a matrix {stem}, and the checkpoint no tensor {plain}; this onnxruntime-genai names it differently"
    )


def _matrix(checkpoint: Checkpoint, name: str, place: int, count: int) -> Array:
    whole = np.concatenate(list(checkpoint.pieces(name)))
    rows = len(whole) // count
    return whole[place * rows : (place + 1) * rows]
