"""What each format can do to a matrix: its kinds, their bytes, and the values that its engine will then read.

Both classes have the same methods: the `kinds` that fit a matrix's rows, the smallest first, one at least (`wanted`: where all
fit); its `bytes` in the file, tables included; its `values`, float32 [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
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


class OnnxRounding:
    """Blocks of MatMulNBits (onnx/blocks.py).

    A table of tokens may be split: its first rows in eight bits, the rest in four. Tokenizers number their tokens as they are
    merged, frequent ones first, so a sixteenth of the rows is most of the text; where it is not, the split is worth little and
    is not chosen.

    Args:
        vocab_size: rows of a table of tokens.
    """

    name = "onnx"
    wanted: Sequence[str] = blocks.KINDS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def kinds(self, shape: Shape) -> Sequence[str]:
        found = [kind for kind in blocks.KINDS if blocks.fits(shape[1], kind)]
        if shape[0] == self._vocab_size and blocks.fits(shape[1], blocks.INT8):
            found += [blocks.split_kind(shape[0] // part) for part in SPLITS if shape[0] >= part]
        return found

    def bytes(self, shape: Shape, kind: str) -> int:
        return blocks.bytes_of(shape, kind)

    def values(self, weight: Array, kind: str, importance: Array | None) -> Array:
        return blocks.rounded(weight, kind, importance)


class GgufRounding:
    """llama.cpp's types: those of 256 weights where they fit, else those of 32.

    Both lists have Q4_0 and Q8_0; Q4_1 is there because a file that was Q4_1 keeps its values in no other.
    """

    name = "gguf"
    wanted: Sequence[str] = ("Q4_0", "Q4_K", "Q4_1", "Q5_K", "Q6_K", "Q8_0")
    SHORT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

    def kinds(self, shape: Shape) -> Sequence[str]:
        if shape[1] % K_BLOCK == 0:
            return self.wanted
        return self.SHORT if shape[1] % GGML_QUANT_SIZES[Kind.Q8_0][0] == 0 else ("F16",)

    def bytes(self, shape: Shape, kind: str) -> int:
        return gguf_bytes(shape, Kind[kind])

    def values(self, weight: Array, kind: str, importance: Array | None) -> Array:
        packed = kernels.packed(weight, Kind[kind], importance)
        whole: Array = dequantize(packed, Kind[kind]).astype(np.float32, copy=False)
        return whole.reshape(weight.shape)


Rounding = OnnxRounding | GgufRounding
