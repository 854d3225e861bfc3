"""A target's graph for a head that reads three layers: its features are one matrix times their states (EAGLE-3).

The head was trained with that matrix, and it stands in the target's graph. So a feature has the width of one state, whatever the
head reads: the runtime, the cache of features and the head's own graph know nothing of the layers. The states are what the
attention of the early layers and the output layer read, behind their norms; no logit changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.onnx_runtime import HIDDEN_STATES

from edgespec.core.errors import InputError
from edgespec.core.files import scratch_beside
from edgespec.model_folder.head import JOINING, head_weights, target_layers
from edgespec_export.onnx.folder import Nodes, rewritten, unlike, written
from edgespec_export.onnx.head_graph import add_bytes
from edgespec_export.onnx.smoothing import read_factors
from edgespec_export.onnx.to_onnx import FAST_GRAPH

AT = "/joined_states/"


def export_for_head(
    head_folder: Path | None, out_folder: Path, export: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Write a target's graphs with the features that a head reads; of a model without a head, its graphs as they are.

    `export` writes them into a folder, told whether with the last `hidden_states`. `out_folder` becomes whole or is not there.
    Returns what `export` returns, with the bytes as they are then. Raises InputError where the head is damaged.
    """
    early = target_layers(head_folder) if head_folder is not None else ()
    if head_folder is None or not early:
        return export(out_folder, hidden_states=head_folder is not None)
    matrix = head_weights(head_folder).get(JOINING)
    if matrix is None or matrix.ndim != 2 or matrix.shape[1] != matrix.shape[0] * (len(early) + 1):
        raise InputError(
            f"{head_folder} has no {JOINING} for its {len(early) + 1} layers; train the head again"
        )
    with scratch_beside(out_folder, "alone") as scratch:
        alone = scratch / out_folder.name
        made = export(alone, hidden_states=True)
        matrix = matrix * _true_states(alone, early, len(matrix))
        for name in ("model.onnx", FAST_GRAPH):
            if (alone / name).is_file():
                join_states(alone / name, early, matrix)
        if out_folder.exists():
            shutil.rmtree(out_folder)
        alone.rename(out_folder)
    return made | {"bytes": written(out_folder)["bytes"]}


def _true_states(folder: Path, early: tuple[int, ...], width: int) -> np.ndarray:
    """By what a smoothed graph divided the states [G] that are joined; the last ones it left as they are."""
    factors, ones = read_factors(folder, width), np.ones(width, np.float32)
    norms = [f"model.layers.{layer}.input_layernorm" for layer in early]
    return np.concatenate([*(factors.get(norm, ones) for norm in norms), ones])


def join_states(graph_file: Path, early: tuple[int, ...], matrix: np.ndarray) -> None:
    """Rewrite a graph file: its output `hidden_states` is `matrix` [H, G] times the states of the early layers and the last one.

    The matrix is in bytes where the graph's others are in blocks, else in floats. Raises EdgespecError where the graph has no
    such output or layers.
    """
    with rewritten(graph_file) as model:
        graph = model.graph
        norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in early]
        found = {name: node.output[0] for node in graph.node for name in {*norms} & {*node.input}}
        if len(found) < len(norms) or HIDDEN_STATES not in {output.name for output in graph.output}:
            raise unlike(f"{graph_file} gives no states of the layers {list(early)}")
        last = AT + "last"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [last if name == HIDDEN_STATES else name for name in names]
        made = Nodes()
        states = made.add("Concat", [*(found[name] for name in norms), last], AT + "states", axis=-1)
        if any(node.op_type == "MatMulNBits" for node in graph.node):
            add_bytes(made, states, matrix, (AT + "weight", AT + "scales"), HIDDEN_STATES)
        else:
            made.add("MatMul", [states, made.constant(AT + "weight", matrix.T)], HIDDEN_STATES)
        graph.node.extend(made.nodes)
        graph.initializer.extend(made.constants.values())
