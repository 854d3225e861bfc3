"""What keeps llama.cpp's CPU kernels from giving a block other logits than single steps. Knows types and counts, no model.

With quantised weights and flash attention a block is computed as single steps are, but for three shortcuts of llama.cpp:

  split keys      from 512 cached positions on, several threads share one token's attention and add up their parts; those of a
                  block are not split. It needs keys and values of one type (F16 or F32), so one of them is BF16: as many bytes.
                  It is the values, since sums of F16 values are slow on some processors; or the keys, where products of BF16
                  are fast and those sums are not.
  tiled matrices  K and IQ types multiply 8 tokens or more in tiles; a block to be verified goes through in pieces of 7.
  repacked rows   Q4_K rows, interleaved for speed, sum a block of 4 in another order than single tokens; so files with a K or
                  IQ type are not repacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

BF16 = 30  # ggml_type
TILED = frozenset({10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29})  # K and IQ types with blocks of 256
PIECE = 7  # tokens: from one more on llama.cpp takes the tiled kernel
VERIFIED = 64  # tokens: a longer pass reads a prompt, which plain and speculative decoding do alike


class BlockKernels(NamedTuple):
    """Settings of one model and its context.

    Attributes:
        tiled: no rows are interleaved, and a pass of at most VERIFIED tokens goes through in pieces of PIECE.
        cache_types: ggml_types of the cache by their names in llama_context_params, where they are not llama.cpp's own, F16.
    """

    tiled: bool
    cache_types: Mapping[str, int]


def kernels_for(
    types: Collection[int], threads: int, *, exact: bool, bf16_keys: bool = False
) -> BlockKernels:
    """`types`: ggml_types of the file's tensors. `exact`: flash attention over quantised weights; else nothing is changed.

    `bf16_keys`: where keys and values must differ in type, the keys are BF16 and not the values.
    """
    split = {"type_k" if bf16_keys else "type_v": BF16} if threads > 1 else {}
    return BlockKernels(exact and not TILED.isdisjoint(types), split if exact else {})
