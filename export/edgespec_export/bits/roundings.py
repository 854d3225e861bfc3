"""What each format can do to a matrix: its kinds, their bytes, and the values that its engine will then read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from edgespec_export.gguf import kernels
from edgespec_export.gguf.quantize import K_BLOCK
from edgespec_export.gguf.quantize import bytes_of as gguf_bytes
from edgespec_export.onnx import blocks

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

SPLITS = (16, 8, 4, 2)  # parts of a table's rows that may have eight bits


@dataclass(frozen=True)
class Rounding:
    """A format: the `kinds` that fit a matrix's rows, the smallest first, one at least (`wanted`: where all fit); its `bytes` in
    the file, tables included; its `values`, float32 [N, K], with an importance [K] where there is one.
    """

    name: str
    wanted: Sequence[str]
    kinds: Callable[[Shape], Sequence[str]]
    bytes: Callable[[Shape, str], int]
    values: Callable[[Array, str, Array | None], Array]


def onnx_rounding(vocab_size: int) -> Rounding:
    """Blocks of MatMulNBits (onnx/blocks.py).

    A table of tokens, which has `vocab_size` rows, may be split: its first rows in eight bits, the rest in four. Tokenizers
    number their tokens as they are merged, frequent ones first, so a sixteenth of the rows is most of the text; where it is not,
    the split is worth little and is not chosen.
    """

    def kinds(shape: Shape) -> Sequence[str]:
        found = [kind for kind in blocks.KINDS if blocks.fits(shape[1], kind)]
        if shape[0] == vocab_size and blocks.fits(shape[1], blocks.INT8):
            found += [blocks.split_kind(shape[0] // part) for part in SPLITS if shape[0] >= part]
        return found

    return Rounding("onnx", blocks.KINDS, kinds, blocks.bytes_of, blocks.rounded)


def gguf_rounding() -> Rounding:
    """llama.cpp's types: those of 256 weights where they fit, else those of 32.

    Both lists have Q4_0 and Q8_0; Q4_1 is there because a file that was Q4_1 keeps its values in no other.
    """
    long = ("Q4_0", "Q4_K", "Q4_1", "Q5_K", "Q6_K", "Q8_0")
    short = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

    def kinds(shape: Shape) -> Sequence[str]:
        fitting = long if shape[1] % K_BLOCK == 0 else short
        return fitting if shape[1] % GGML_QUANT_SIZES[Kind.Q8_0][0] == 0 else ("F16",)

    def values(weight: Array, kind: str, importance: Array | None) -> Array:
        whole: Array = dequantize(kernels.packed(weight, Kind[kind], importance), Kind[kind])
        return whole.reshape(weight.shape)

    return Rounding("gguf", long, kinds, lambda shape, kind: gguf_bytes(shape, Kind[kind]), values)
