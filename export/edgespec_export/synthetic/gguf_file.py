"""GGUF files of a model's real shape with random weights: for measuring speed where the weights are not at hand.

Blocks are drawn as bytes and get one small scale for each matrix, so a file costs no more than writing it. The files have no
vocabulary but its size (llama.cpp's "no_vocab"). Every matrix has the file's type, the output head too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, MODEL_ARCH, GGMLQuantizationType

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.families import FAMILIES
from edgespec.core.files import whole_file
from edgespec.core.shapes import ModelShape
from edgespec_export.gguf.hyperparameters import write_hyperparameters
from edgespec_export.gguf.quantize import PRECISIONS as ALL_PRECISIONS
from edgespec_export.gguf.quantize import bytes_of
from edgespec_export.synthetic.checkpoint import drawn, family_of

F16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32
Q4_0, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
PRECISIONS = {name: ALL_PRECISIONS[name] for name in ("f16", "q8_0", "q4_0")}
# Standard deviation of a block's integers when their bytes are uniform: of n equally likely steps it is √((n² − 1) / 12).
SPREAD = {Q4_0: (16**2 / 12 - 1 / 12) ** 0.5, Q8_0: (256**2 / 12 - 1 / 12) ** 0.5}
SCALE_BYTES = 2
CHUNK = 2**25  # weights drawn at once


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType


def planned_bytes(shape: ModelShape, precision: str) -> int:
    """Bytes of the file's tensors; its header is a few kilobytes more."""
    return sum(bytes_of(tensor.shape, tensor.kind) for tensor in _tensors(shape, precision))


def write_gguf(shape: ModelShape, out_file: Path, precision: str, seed: int = 0) -> None:
    """Write `out_file`, whole or not at all; one matrix is in memory at a time.

    Weights have mean near 0 and standard deviation 1/√columns, norms are 1, biases 0: logits stay finite and spread like a
    trained model's. Raises InputError for an unknown precision or rows that are no multiple of a block.
    """
    family = FAMILIES[family_of(shape)]
    tensors = list(_tensors(shape, precision))
    writer = GGUFWriter(None, family.gguf)
    writer.add_name(family.gguf)
    write_hyperparameters(writer, family, shape, {"model_type": family.model_type}, [])
    writer.add_file_type(PRECISIONS[precision].file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")
    for tensor in tensors:
        size = bytes_of(tensor.shape, tensor.kind)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=tensor.kind)
    generator = np.random.Generator(np.random.SFC64(seed))
    with whole_file(out_file) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(_drawn(tensor, generator))
        finally:
            writer.close()


def _tensors(shape: ModelShape, precision: str) -> Iterator[Tensor]:
    if precision not in PRECISIONS:
        raise InputError(f"GGUF precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    kind = PRECISIONS[precision].kind
    block = GGML_QUANT_SIZES[kind][0]
    for size in shape.row_lengths:
        if size % block:
            raise InputError(
                f"a matrix has rows of {size}, and {precision} needs a multiple of {block}; choose the precision f16"
            )
    names = get_tensor_name_map(MODEL_ARCH[family_of(shape).upper()], shape.layers)
    for source, dims in shape.tensors().items():
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert name is not None
        yield Tensor(name, dims, F32 if len(dims) == 1 else kind)


def _drawn(tensor: Tensor, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Content of a tensor: uint8 [bytes] of a quantised one, else floats of its shape."""
    if tensor.kind in (F32, F16):
        kind = np.float32 if tensor.kind is F32 else np.float16
        pieces = drawn(tensor.shape, generator, bias=tensor.name.endswith(".bias"))
        return np.concatenate([piece.astype(kind) for piece in pieces])
    rows, columns = tensor.shape
    deviation = columns**-0.5
    weights, size = GGML_QUANT_SIZES[tensor.kind]
    blocks = np.empty((rows * columns // weights, size), dtype=np.uint8)
    blocks[:, :SCALE_BYTES] = np.frombuffer(np.float16(deviation / SPREAD[tensor.kind]).tobytes(), np.uint8)
    for start in range(0, len(blocks), CHUNK // weights):
        part = blocks[start : start + CHUNK // weights, SCALE_BYTES:]
        part[:] = np.frombuffer(generator.bytes(part.size), np.uint8).reshape(part.shape)
    return blocks.reshape(-1)
