"""A model folder of a real shape with random weights: bf16 safetensors, written shard by shard, in Hugging Face layout.

Every tensor has a generator of its own, so a shard made again is the same, and a killed run goes on with the first
shard that is missing. Memory holds a piece of one matrix. Knows no tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from edgespec.core.files import whole_file, write_array, write_json
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import INDEX, header_of

SHARD_BYTES = 2 * 2**30
PIECE = 2**23  # weights drawn at once: 32 MiB as float32
BYTES = 2  # of a bf16

Size = tuple[int, ...]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def write_checkpoint(shape: ModelShape, folder: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json, generation_config.json, the shards and their index; whole shards stay. Returns the bytes of the weights.

    Matrices have deviation 1/√columns, norms are 1, biases 0: logits stay finite and spread like a trained model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    tensors = shape.tensors()
    numbers = {name: number for number, name in enumerate(tensors)}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    total = int(split.metadata["total_size"])
    with progress("write random weights", total >> 20, "MiB") as bar:
        for file, names in split.filename_to_tensors.items():
            shard = {name: tensors[name] for name in names}
            if not (folder / file).exists():
                _write_shard(folder / file, shard, seed, numbers)
            bar.update(sum(map(_bytes, shard.values())) >> 20)
    write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return total


def _bytes(size: Size) -> int:
    return BYTES * prod(size)


def _write_shard(file: Path, shard: Mapping[str, Size], seed: int, numbers: Mapping[str, int]) -> None:
    with whole_file(file) as temporary, open(temporary, "wb") as stream:
        stream.write(header_of({name: ("BF16", size) for name, size in shard.items()}))
        for name, size in shard.items():
            generator = np.random.Generator(np.random.SFC64([seed, numbers[name]]))
            for floats in drawn(size, generator, bias=name.endswith(".bias")):
                write_array(stream, (floats.view(np.uint32) >> 16).astype(np.uint16))  # bf16: the upper half


def drawn(size: Size, generator: np.random.Generator, *, bias: bool) -> Iterator[Floats]:
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
