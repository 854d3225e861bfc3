"""A model folder of a real shape with random weights: bf16 safetensors, written shard by shard, in Hugging Face layout.

Every tensor has a generator of its own, so a shard made again is the same, and a killed run goes on with the first
shard that is missing. Memory holds a piece of one matrix. Knows no tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.files import whole_file, write_json
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec_export.onnx.synthetic import checkpoint_tensors, model_config

SHARD_BYTES = 2 * 2**30
PIECE = 2**23  # weights drawn at once: 32 MiB as float32
BYTES = 2  # of a bf16
INDEX = "model.safetensors.index.json"

Tensor = tuple[str, tuple[int, ...]]


def write_checkpoint(shape: ModelShape, folder: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json, generation_config.json, the shards and their index; whole shards stay. Returns the bytes of the weights.

    Matrices have deviation 1/√columns, norms are 1, biases 0: logits stay finite and spread like a trained model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(shape, "bfloat16"))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    tensors = list(checkpoint_tensors(shape, shape.layers))
    shards = _shards(tensors, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places = {tensor: number for number, (tensor, _) in enumerate(tensors)}
    total = sum(_size(size) for _, size in tensors)
    with progress("write random weights", total >> 20, "MiB") as bar:
        for name, shard in zip(names, shards, strict=True):
            if not (folder / name).exists():
                _write_shard(folder / name, shard, seed, places)
            bar.update(sum(_size(size) for _, size in shard) >> 20)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _size(size: tuple[int, ...]) -> int:
    return BYTES * int(np.prod(size, dtype=np.int64))


def _shards(tensors: list[Tensor], most: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for name, size in tensors:
        if shards[-1] and filled + _size(size) > most:
            shards.append([])
            filled = 0
        shards[-1].append((name, size))
        filled += _size(size)
    return shards


def _write_shard(file: Path, shard: list[Tensor], seed: int, places: dict[str, int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in shard:
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + _size(size)]}
        at += _size(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(file) as temporary, open(temporary, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, size in shard:
            for piece in _drawn(name, size, np.random.Generator(np.random.SFC64([seed, places[name]]))):
                piece.tofile(stream)


def _drawn(
    name: str, size: tuple[int, ...], generator: np.random.Generator
) -> Iterator[np.ndarray[Any, Any]]:
    """The tensor as bf16 bits (uint16): the upper half of a float32."""
    if len(size) == 1:
        value = 0.0 if name.endswith(".bias") else 1.0
        yield _upper(np.full(size, value, dtype=np.float32))
        return
    rows, columns = size
    step = max(1, PIECE // columns)
    for start in range(0, rows, step):
        drawn = generator.standard_normal((min(step, rows - start), columns), dtype=np.float32)
        drawn *= np.float32(columns**-0.5)
        yield _upper(drawn)


def _upper(floats: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (floats.view(np.uint32) >> 16).astype(np.uint16)
