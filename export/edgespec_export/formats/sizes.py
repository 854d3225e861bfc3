"""How many bytes of an exported file one token reads, measured on the file itself."""

from __future__ import annotations

import math
from typing import Any

from edgespec_export.formats.export import ExportedFile

WIDENED = ("_F16", "_Q8")  # ends of the names of weights that are float32 once they are loaded
# Tables of RoPE and embeddings by row, in static graphs, model graphs and heads.
BY_ROW = frozenset(
    {"rope.cos", "rope.sin", "embed_tokens", "cos_cache", "sin_cache", "embedding.bytes", "embedding.scales"}
)
EMBEDDING = "model.embed_tokens."  # what a model graph's input embedding begins with: one tensor, or those of a mixed file


def streamed_bytes(file: ExportedFile) -> int:
    """Weights read for one token: all of them, but one row only of an input embedding that is not also the output head.

    RoPE tables, of which a token reads one row too, count as one row. Weights that ONNX Runtime widens when it loads them (fp16,
    int8 in exact mode) count as the float32 that it reads.
    """
    tables = _gguf(file) if file.engine == "llama.cpp" and not file.is_head else _onnx(file)
    return sum(size // rows for size, rows in tables)


def _gguf(file: ExportedFile) -> list[tuple[int, int]]:
    """(bytes, how many rows share them) of every tensor; 1 where a token reads it whole."""
    from gguf import GGUFReader

    tensors = GGUFReader(file.path).tensors
    untied = any(tensor.name == "output.weight" for tensor in tensors)
    return [
        (int(tensor.n_bytes), int(tensor.shape[-1]) if untied and tensor.name == "token_embd.weight" else 1)
        for tensor in tensors
    ]


def _onnx(file: ExportedFile) -> list[tuple[int, int]]:
    import onnx

    def size(tensor: Any) -> int:
        if not static and tensor.name.endswith(WIDENED):
            return 4 * int(math.prod(tensor.dims))
        external = {entry.key: entry.value for entry in tensor.external_data}
        return int(external.get("length", len(tensor.raw_data)))

    def by_row(name: str) -> bool:
        return name.removesuffix("_F16") in BY_ROW or name.startswith(EMBEDDING)

    static = file.engine == "static" and not file.is_head
    name = "step.onnx" if static else "model.onnx"
    graph = onnx.load(file.path / name, load_external_data=False).graph
    return [(size(tensor), tensor.dims[0] if by_row(tensor.name) else 1) for tensor in graph.initializer]
