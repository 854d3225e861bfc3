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

from collections.abc import Collection
from dataclasses import dataclass

BF16 = 30  # ggml_type
TILED = frozenset({10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29})  # K and IQ types with blocks of 256
TILE_ROWS = 8  # tokens from which llama.cpp takes the tiled kernel
VERIFIED = 64  # tokens: a longer pass reads a prompt, which plain and speculative decoding do alike


@dataclass(frozen=True)
class BlockKernels:
    """Settings of one model and its context.

    Attributes:
        repacked: llama.cpp may interleave rows.
        key_type, value_type: ggml_type of the cache's keys and values; None: llama.cpp's own choice, F16.
        piece: tokens of a pass that is verified; a longer one, up to VERIFIED, goes through in several. 0: as it is.
    """

    repacked: bool = True
    key_type: int | None = None
    value_type: int | None = None
    piece: int = 0


def kernels_for(
    types: Collection[int], threads: int, *, exact: bool, bf16_keys: bool = False
) -> BlockKernels:
    """`types`: ggml_types of the file's tensors. `exact`: flash attention over quantised weights; else nothing is changed.

    `bf16_keys`: where keys and values must differ in type, the keys are BF16 and not the values.
    """
    if not exact:
        return BlockKernels()
    tiled = not TILED.isdisjoint(types)
    other = BF16 if threads > 1 else None
    return BlockKernels(
        repacked=not tiled,
        key_type=other if bf16_keys else None,
        value_type=None if bf16_keys else other,
        piece=TILE_ROWS - 1 if tiled else 0,
    )
