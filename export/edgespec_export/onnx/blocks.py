"""A matrix in blocks of 32 weights, as ONNX Runtime's MatMulNBits reads it. Numbers only: no graph, no model.

int4     w = scale (q − zero)         q and zero of 4 bits                       4.625 bits a weight
offset4  w = scale (q − zero) + rest  the rest of a block in 4 bits too          4.8 to 4.9 bits a weight
int8     w = scale (q − 128)          q of 8 bits                                8.5 bits a weight
int8:n   the first n rows in int8, the rest in offset4: a table whose first tokens are the frequent ones

Scales are float16 in the file. Each block's grid is searched for: of a few candidates the one with the least error, weighted by
how strong each input is (E[x²], as llama.cpp's importance matrix). Among the candidates are the grids of GGUF's types, so that a
matrix that was rounded to Q4_0 (int4) or Q8_0 (int8) before keeps every value.

A grid of offset4 may lie anywhere, as Q4_1's do: `rest` is what its zero leaves, at most half a step. A block adds to a product
its rest times the sum of its inputs, which is 32 rests times their mean. So offset4 is an int4 matrix with one column more for
each block: it holds 32 rests, and its input is the mean of the block's inputs. Rounding the rests errs by a fiftieth of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from edgespec_runtime.engines.engine import default_threads

BLOCK = 32
INT4, OFFSET4, INT8 = "int4", "offset4", "int8"
KINDS = (INT4, OFFSET4, INT8)
HALF_BYTES = 2  # of a scale
PIECE = 2**17  # weights that a thread searches at once: their dozen arrays stay in the processor's cache
FULL = {INT4: 15, OFFSET4: 15, INT8: 255}  # the largest q
# Ranges of a block over its step. 15 is the whole range; a step wider than that (14, 13 ...) suits blocks that do not use all 16
# values, as those of K types; a narrower one cuts the outermost weights off.
SPANS = (15.0, 14.0, 13.0, 16.5)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Blocks:
    """A matrix [N, K]. packed: uint8 [N, blocks, 16 or 32]; scales: float16 [N, blocks]; zeros: uint8 [N, ⌈blocks/2⌉].

    int8 has no zeros. The last blocks of offset4 are those of its rests.
    """

    kind: str
    columns: int
    packed: Array
    scales: Array
    zeros: Array | None = None

    def values(self) -> Array:
        """The matrix as the engine reads it: float32 [N, K]."""
        bits = 8 if self.kind == INT8 else 4
        return expanded(self.packed, self.scales, self.zeros, bits, self.columns)


def expanded(packed: Array, scales: Array, zeros: Array | None, bits: int, columns: int) -> Array:
    """The float32 [N, columns] of a matrix's tables in a file: packed uint8 [N, blocks, bytes], any float scales [N, blocks].

    Blocks may have any size; `bits` of a weight: 4 or 8. Where there are more blocks than the columns need, the last ones hold
    rests.
    """
    rows, blocks = packed.shape[:2]
    size = 8 * packed.shape[2] // bits
    q = packed if bits == 8 else halves(packed).reshape(rows, blocks, size)
    middle: Any = (
        np.float32(2 ** (bits - 1)) if zeros is None else halves(zeros).reshape(rows, -1)[:, :blocks, None]
    )
    whole = (q.astype(np.float32) - middle) * scales.astype(np.float32).reshape(rows, blocks, 1)
    own = -(-columns // size)
    if blocks > own:
        rests = whole[:, own:].reshape(rows, -1)[:, :own, None]
        whole = whole[:, :own] + rests / np.float32(size)
    return np.ascontiguousarray(whole.reshape(rows, -1)[:, :columns])


def halves(packed: Array) -> Array:
    """Both values of 4 bits in every byte, low one first: [..., 2]."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-1)


def _paired(values: Array) -> Array:
    """[..., n] values of 4 bits -> bytes [..., ⌈n/2⌉], the low half first."""
    even = np.zeros((*values.shape[:-1], values.shape[-1] + values.shape[-1] % 2), np.uint8)
    even[..., : values.shape[-1]] = values
    both: Array = even[..., ::2] | even[..., 1::2] << 4
    return both


def split_kind(rows: int) -> str:
    """The kind of a table whose first `rows` are in int8."""
    return f"{INT8}:{rows}"


def parts(kind: str) -> list[tuple[slice, str]]:
    """Which rows of a matrix have which kind: of a split one the first ones int8 and the rest offset4."""
    _, _, first = kind.partition(":")
    if not first:
        return [(slice(None), kind)]
    return [(slice(int(first)), INT8), (slice(int(first), None), OFFSET4)]


def fits(columns: int, kind: str) -> bool:
    """Whether rows of that length can have a kind: all but int4 need whole blocks."""
    return kind == INT4 or columns % BLOCK == 0


def bytes_of(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a matrix [N, K] in the file, its tables included."""
    split = parts(kind)
    if len(split) > 1:
        return sum(bytes_of((len(range(shape[0])[rows]), shape[1]), own) for rows, own in split)
    rows, blocks = shape[0], -(-shape[1] // BLOCK)
    if kind == INT8:
        return rows * blocks * (BLOCK + HALF_BYTES)
    blocks += -(-blocks // BLOCK) if kind == OFFSET4 else 0
    return rows * (blocks * (BLOCK // 2 + HALF_BYTES) + -(-blocks // 2))


def in_blocks(weight: Array, kind: str, importance: Array | None = None) -> list[Blocks]:
    """Round a matrix [N, K] float32, each of its parts; `importance` [K]: the weight of an error in each column (default: all
    alike)."""
    return [_rounded(weight[rows], own, importance) for rows, own in parts(kind)]


def rounded(weight: Array, kind: str, importance: Array | None = None) -> Array:
    """The matrix as the engine reads it once it is `in_blocks`: float32 [N, K]."""
    found = [blocks.values() for blocks in in_blocks(weight, kind, importance)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _rounded(weight: Array, kind: str, importance: Array | None) -> Blocks:
    q, scales, low = _grids(weight, kind, importance)
    if kind == INT8:
        return Blocks(kind, weight.shape[1], q, scales.astype(np.float16))
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    if kind == OFFSET4:
        rests = np.float32(BLOCK) * (low + zeros * scales)
        of_block = None if importance is None else importance.reshape(-1, BLOCK).mean(1)
        rest_q, rest_scales, rest_low = _grids(rests, INT4, of_block)
        q, scales = np.concatenate([q, rest_q], 1), np.concatenate([scales, rest_scales], 1)
        zeros = np.concatenate([zeros, np.rint(-rest_low / rest_scales)], 1)
    return Blocks(kind, weight.shape[1], _paired(q), scales.astype(np.float16), _paired(zeros))


def _grids(weight: Array, kind: str, importance: Array | None) -> tuple[Array, Array, Array]:
    """(q uint8 [N, blocks, 32], scales, values at q = 0, float32 [N, blocks]) of a matrix [N, K]."""
    rows, columns = weight.shape
    count = -(-columns // BLOCK)
    padded = np.zeros((rows, count * BLOCK), np.float32)
    padded[:, :columns] = weight
    weights = np.zeros(count * BLOCK, np.float32)
    weights[:columns] = 1.0 if importance is None else importance
    weights = weights.reshape(1, count, BLOCK)
    weights = np.where(weights.any(-1, keepdims=True), weights, np.float32(1))  # inputs that were never used
    weights = np.broadcast_to(weights, (rows, count, BLOCK)).reshape(-1, BLOCK)
    blocks = padded.reshape(-1, BLOCK)
    step = PIECE // BLOCK
    places = [slice(at, at + step) for at in range(0, len(blocks), step)]
    with ThreadPoolExecutor(default_threads()) as threads:
        pieces = [*threads.map(lambda at: _searched(blocks[at], weights[at], kind), places)]
    q, scale, low = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return (
        q.astype(np.uint8).reshape(rows, count, BLOCK),
        scale.reshape(rows, count),
        low.reshape(rows, count),
    )


def _searched(blocks: Array, importance: Array, kind: str) -> tuple[Array, Array, Array]:
    """(q [n, 32], scale [n, 1], the value at q = 0 [n, 1]), float32, of the candidate with the least error."""
    best: tuple[Array, ...] = ()
    least = np.full((len(blocks), 1), np.inf, np.float32)
    for scale, low in _candidates(blocks, kind):
        q = _assigned(blocks, scale, low, kind)
        scale, low = _fitted(blocks, importance, q, scale, low, kind)
        q = _assigned(blocks, scale, low, kind)
        error = (importance * np.square(blocks - (q * scale + low))).sum(1, keepdims=True)
        better = error < least
        least = np.where(better, error, least)
        new = (q, scale, low)
        best = tuple(np.where(better, one, old) for one, old in zip(new, best or new, strict=True))
    q, scale, low = best
    return q, scale, low


def _candidates(blocks: Array, kind: str) -> Iterator[tuple[Array, Array]]:
    """(scale, the value at q = 0) [n, 1] each."""
    lowest, highest = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    largest = np.maximum(-lowest, highest)
    if kind == INT8:
        scale = _half(largest / 127)
        yield scale, -128 * scale
    elif kind == OFFSET4:
        for span in SPANS:
            yield _half((highest - lowest) / span), lowest
    else:
        lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)
        scale = _half(largest / 8)
        yield scale, -np.where(-lowest >= highest, 8, 7) * scale
        for span in SPANS:
            scale = _half((highest - lowest) / span)
            zero = np.clip(-lowest / scale, 0, 15)
            yield scale, -np.floor(zero) * scale
            yield scale, -np.ceil(zero) * scale


def _assigned(blocks: Array, scale: Array, low: Array, kind: str) -> Array:
    return np.clip(np.rint((blocks - low) / scale), 0, FULL[kind])


def _fitted(
    blocks: Array, importance: Array, q: Array, scale: Array, low: Array, kind: str
) -> tuple[Array, Array]:
    """Scale and value at q = 0 with the least error for these q: a weighted line through the block's points."""
    if kind == OFFSET4:
        total = importance.sum(1, keepdims=True)
        total = np.where(total > 0, total, 1)
        middle_q = (importance * q).sum(1, keepdims=True) / total
        middle = (importance * blocks).sum(1, keepdims=True) / total
        spread = (importance * np.square(q - middle_q)).sum(1, keepdims=True)
        slope = (importance * (q - middle_q) * (blocks - middle)).sum(1, keepdims=True)
        scale = _half(np.where(spread > 0, slope / np.where(spread > 0, spread, 1), scale))
        return scale, middle - middle_q * scale
    zero = np.rint(-low / scale)
    steps = q - zero
    square = (importance * steps * steps).sum(1, keepdims=True)
    slope = (importance * steps * blocks).sum(1, keepdims=True)
    scale = _half(np.where(square > 0, slope / np.where(square > 0, square, 1), scale))
    return scale, -zero * scale


def _half(scale: Array) -> Array:
    """Rounded as the file holds it; 1 in place of 0, for blocks of equal weights."""
    rounded = scale.astype(np.float16).astype(np.float32)
    return np.where(rounded == 0, np.float32(1), rounded)
