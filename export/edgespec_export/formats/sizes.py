"""How many bytes of an exported file one token reads, measured on the file itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgespec_export.formats.export import ExportedFile

WIDENED = ("_F16", "_Q8")  # ends of the names of weights that are float32 once they are loaded


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a GGUF file or an ONNX folder, tables of RoPE included; no vocabulary and no graph."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.data"))
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def streamed_bytes(file: ExportedFile) -> int:
    """Weights read for one token: all of them, but one row only of an input embedding that is not also the output head.

    RoPE tables, of which a token reads one row too, count as one row. Weights that ONNX Runtime widens when it loads them (fp16,
    int8 in exact mode) count as the float32 that it reads.
    """
    engine = "onnxruntime" if file.is_head else file.engine
    tables = {"llama.cpp": _gguf, "onnxruntime": _onnx, "static": _static}[engine](file)
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


def _static(file: ExportedFile) -> list[tuple[int, int]]:
    """The output head of static graphs is a tensor of its own; a token reads a row of the embedding and of the RoPE tables."""
    import onnx

    by_row = {"embed_tokens", "rope.cos", "rope.sin"}
    graph = onnx.load(file.path / "step.onnx", load_external_data=False).graph
    found = []
    for tensor in graph.initializer:
        external = {entry.key: entry.value for entry in tensor.external_data}
        size = int(external.get("length", len(tensor.raw_data)))
        found.append((size, tensor.dims[0] if tensor.name in by_row else 1))
    return found


def _onnx(file: ExportedFile) -> list[tuple[int, int]]:
    import onnx

    def size(tensor: Any) -> int:
        if tensor.name.endswith(WIDENED):
            return 4 * int(math.prod(tensor.dims))
        external = {entry.key: entry.value for entry in tensor.external_data}
        return int(external["length"]) if "length" in external else len(tensor.raw_data)

    by_row = {
        "cos_cache",
        "sin_cache",
        "model.embed_tokens.weight",
        "embedding.bytes",
        "embedding.scales",
    }  # RoPE, embeddings
    graph = onnx.load(file.path / "model.onnx", load_external_data=False).graph
    return [
        (size(tensor), tensor.dims[0] if tensor.name.removesuffix("_F16") in by_row else 1)
        for tensor in graph.initializer
    ]
