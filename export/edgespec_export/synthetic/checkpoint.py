"""A model folder of a real shape with random weights: bf16 safetensors, written shard by shard, in Hugging Face layout.

Every tensor has a generator of its own, so a shard made again is the same, and a killed run goes on with the first
shard that is missing. Memory holds a piece of one matrix. Knows no tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.files import whole_file, write_array, write_json
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import INDEX, header_of

SHARD_BYTES = 2 * 2**30
PIECE = 2**23  # weights drawn at once: 32 MiB as float32
BYTES = 2  # of a bf16

Tensor = tuple[str, tuple[int, ...]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def write_checkpoint(shape: ModelShape, folder: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json, generation_config.json, the shards and their index; whole shards stay. Returns the bytes of the weights.

    Matrices have deviation 1/√columns, norms are 1, biases 0: logits stay finite and spread like a trained model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    tensors = list(shape.tensors().items())
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
    with whole_file(file) as temporary, open(temporary, "wb") as stream:
        stream.write(header_of({name: ("BF16", size) for name, size in shard}))
        for name, size in shard:
            generator = np.random.Generator(np.random.SFC64([seed, places[name]]))
            for floats in drawn(size, generator, bias=name.endswith(".bias")):
                write_array(stream, (floats.view(np.uint32) >> 16).astype(np.uint16))  # bf16: the upper half


def drawn(size: tuple[int, ...], generator: np.random.Generator, *, bias: bool) -> Iterator[Floats]:
    """Content of one tensor in float32, in pieces of rows."""
    if len(size) == 1:
        yield np.full(size, 0.0 if bias else 1.0, dtype=np.float32)
        return
    rows, columns = size
    step = max(1, PIECE // columns)
    for start in range(0, rows, step):
        piece = generator.standard_normal((min(step, rows - start), columns), dtype=np.float32)
        yield piece * np.float32(columns**-0.5)


def family_of(shape: ModelShape) -> str:
    """The Hugging Face model_type that has a layer of this shape."""
    return "qwen3" if shape.head_norms else "qwen2" if shape.attention_bias else "llama"


def model_config(shape: ModelShape) -> dict[str, Any]:
    """config.json, readable for transformers 4.57 and 5.x."""
    kind = family_of(shape)
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **shape.to_config(),
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
