"""The one data file that all graphs of a static export read: weights as float32, matrices as [in, out], and the RoPE tables.

Written tensor by tensor: memory holds one of them, not the model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import is_surplus
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.families import rope_tables, rotary_of
from edgespec_export.onnx.folder import DataFile

DATA = "weights.data"
ALIGNED = 4096  # bytes; offsets are multiples, so that a tensor can be mapped
_WHOLE = {
    "model.embed_tokens.weight": "embed_tokens",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
}
_LAYER = re.compile(r"model\.(layers\.\d+\.[\w.]+?)(\.weight|\.bias)")


def write_weights(folder: Path, shape: ModelShape, length: int, sink: DataFile) -> dict[str, Any]:
    """Append every weight of the model folder and the tables for `length` positions; TensorProtos by name.

    A tied embedding is written twice, once as rows to look up and once as the columns of the output head.
    Raises InputError for a tensor that the graph has no place for, and for one that is missing.
    """
    checkpoint = Checkpoint(folder)
    tensors: dict[str, Any] = {}
    for stored in checkpoint:
        if is_surplus(stored, tied=shape.tied):
            continue
        name = graph_name(stored)
        if name is None:
            raise InputError(f"{folder} has a tensor {stored!r}, which the static graph has no place for")
        whole = np.concatenate(list(checkpoint.pieces(stored)))
        if name != "embed_tokens" and whole.ndim == 2:
            whole = whole.T
        tensors[name] = sink.add(name, whole)
        if name == "embed_tokens" and shape.tied:
            tensors["lm_head"] = sink.add("lm_head", whole.T)
    for name, table in zip(("rope.cos", "rope.sin"), rope_tables(rotary_of(folder), length), strict=True):
        tensors[name] = sink.add(name, table)
    missing = sorted(({str(graph_name(name)) for name in shape.tensors()} | {"lm_head"}) - set(tensors))
    if missing:
        raise InputError(
            f"{folder} has no tensor for {missing[0]} ({len(missing)} are missing); fetch the model again"
        )
    return tensors


def graph_name(stored: str) -> str | None:
    """The name in the graph of a tensor of the checkpoint: 'model.layers.0.mlp.up_proj.weight' is 'layers.0.mlp.up_proj'."""
    if stored in _WHOLE:
        return _WHOLE[stored]
    match = _LAYER.fullmatch(stored)
    return None if match is None else match[1] + (".bias" if match[2] == ".bias" else "")
