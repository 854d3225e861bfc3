"""Static graphs that compute next to nothing, of any size: their reply is always the same token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from edgespec_runtime.engines.static import StaticSettings
from onnx import TensorProto, helper, numpy_helper

from edgespec.core.files import write_json

SAID = 5  # the most likely token, everywhere


def settings_of(**changed: int) -> StaticSettings:
    """Of a cache of 8 tokens and blocks of 3, 2 and 1, but for the counts given."""
    counts = {"vocab_size": 16, "length": 8, "layers": 1, "kv_heads": 2, "head_dim": 4} | changed
    return StaticSettings("fp32", masked=-1e4, blocks={"prefill": 3, "verify": 2, "step": 1}, **counts)


def static_model(folder: Path, settings: StaticSettings) -> Path:
    """A folder as the static export writes it, whose graphs have the sizes of these settings."""
    folder.mkdir(parents=True)
    for name, tokens in settings.blocks.items():
        onnx.save(_graph(tokens, settings), folder / f"{name}.onnx")
    write_json(folder / "static.json", settings.plain())
    return folder


def _graph(tokens: int, settings: StaticSettings) -> onnx.ModelProto:
    """What a pass adds to the cache is the cache's own beginning."""
    layers = [f"{layer}.{part}" for layer in range(settings.layers) for part in ("key", "value")]
    logits = np.eye(1, settings.vocab_size, SAID, dtype=np.float32).repeat(tokens, 0)[None]
    parts = {"start": [0], "end": [tokens], "axis": [2]}
    constants = {"said": logits} | {name: np.array(value, np.int64) for name, value in parts.items()}
    nodes = [helper.make_node("Slice", [f"past.{name}", *parts], [f"new.{name}"]) for name in layers]

    def cache(kind: str, length: int) -> dict[str, tuple[int, ...]]:
        return {f"{kind}.{name}": (1, settings.kv_heads, length, settings.head_dim) for name in layers}

    mask = {"attention_mask": (1, 1, tokens, settings.length + tokens)}
    graph = helper.make_graph(
        [helper.make_node("Identity", ["said"], ["logits"]), *nodes],
        "static",
        _values(TensorProto.INT32, dict.fromkeys(("input_ids", "position_ids"), (1, tokens)))
        + _values(TensorProto.FLOAT, mask | cache("past", settings.length)),
        _values(TensorProto.FLOAT, {"logits": logits.shape} | cache("new", tokens)),
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _values(kind: int, shapes: Mapping[str, tuple[int, ...]]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
