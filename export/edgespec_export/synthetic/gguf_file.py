"""GGUF files of a model's real shape with random weights: for measuring speed where the weights are not at hand.

Blocks are drawn as bytes and get one small scale for each matrix, so a file costs no more than writing it. The files have no
vocabulary but its size (llama.cpp's "no_vocab"). Every matrix has the file's type, the output head too.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, MODEL_ARCH
from gguf.constants import GGMLQuantizationType as Kind

from edgespec.core.errors import InputError
from edgespec.core.families import FAMILIES
from edgespec.core.files import whole_file
from edgespec.core.shapes import ModelShape
from edgespec_export.gguf.hyperparameters import write_hyperparameters
from edgespec_export.gguf.quantize import PRECISIONS, bytes_of
from edgespec_export.synthetic.checkpoint import Size, drawn, family_of

# Standard deviation of a block's integers when their bytes are uniform: of n equally likely steps it is √((n² − 1) / 12).
SPREAD = {Kind.Q4_0: (16**2 / 12 - 1 / 12) ** 0.5, Kind.Q8_0: (256**2 / 12 - 1 / 12) ** 0.5}
SCALE_BYTES = 2
CHUNK = 2**25  # weights drawn at once


def planned_bytes(shape: ModelShape, precision: str) -> int:
    """Bytes of the file's tensors; its header is a few kilobytes more."""
    return sum(bytes_of(*tensor) for tensor in _tensors(shape, precision).values())


def write_gguf(shape: ModelShape, out_file: Path, precision: str, seed: int = 0) -> None:
    """Write `out_file`, whole or not at all; one matrix is in memory at a time.

    Weights have mean near 0 and standard deviation 1/√columns, norms are 1, biases 0: logits stay finite and spread like a
    trained model's. `precision`: f16, q8_0 or q4_0. Raises InputError for rows that are no multiple of a block.
    """
    family = FAMILIES[family_of(shape)]
    tensors = _tensors(shape, precision)
    writer = GGUFWriter(None, family.gguf)
    writer.add_name(family.gguf)
    write_hyperparameters(writer, family, shape, {"model_type": family.model_type}, [])
    writer.add_file_type(PRECISIONS[precision].file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")
    for name, (size, kind) in tensors.items():
        writer.add_tensor_info(name, size, np.dtype(np.float32), bytes_of(size, kind), raw_dtype=kind)
    generator = np.random.Generator(np.random.SFC64(seed))
    with whole_file(out_file) as temporary, closing(writer):
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, (size, kind) in tensors.items():
            writer.write_tensor_data(_drawn(name, size, kind, generator))


def _tensors(shape: ModelShape, precision: str) -> dict[str, tuple[Size, Kind]]:
    """Shape and type of every tensor, by llama.cpp's name."""
    kind = PRECISIONS[precision].kind
    block = GGML_QUANT_SIZES[kind][0]
    for size in shape.row_lengths:
        if size % block:
            raise InputError(
                f"a matrix has rows of {size}, and {precision} needs a multiple of {block}; choose the precision f16"
            )
    names = get_tensor_name_map(MODEL_ARCH[family_of(shape).upper()], shape.layers)
    return {
        names.get_name(source, try_suffixes=(".weight", ".bias")): (
            size,
            Kind.F32 if len(size) == 1 else kind,
        )
        for source, size in shape.tensors().items()
    }


def _drawn(name: str, size: Size, kind: Kind, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Content of a tensor: uint8 [bytes] of a quantised one, else floats of its shape."""
    if kind in (Kind.F32, Kind.F16):
        floats = np.float32 if kind is Kind.F32 else np.float16
        pieces = drawn(size, generator, bias=name.endswith(".bias"))
        return np.concatenate([piece.astype(floats) for piece in pieces])
    rows, columns = size
    deviation = columns**-0.5
    weights, block = GGML_QUANT_SIZES[kind]
    blocks = np.empty((rows * columns // weights, block), dtype=np.uint8)
    blocks[:, :SCALE_BYTES] = np.frombuffer(np.float16(deviation / SPREAD[kind]).tobytes(), np.uint8)
    for start in range(0, len(blocks), CHUNK // weights):
        part = blocks[start : start + CHUNK // weights, SCALE_BYTES:]
        part[:] = np.frombuffer(generator.bytes(part.size), np.uint8).reshape(part.shape)
    return blocks.reshape(-1)
