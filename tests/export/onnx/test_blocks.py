"""Blocks of MatMulNBits: GGUF's grids found again, errors smaller than plain rounding's, and odd weights."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_export.onnx.blocks import BLOCK, INT4, INT8, KINDS, OFFSET4, bytes_of, fits, in_blocks, rounded
from edgespec_export.verify.readback import matrix_of
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

WEIGHTS = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32) * 0.05


def error(weight: np.ndarray, other: np.ndarray) -> float:
    return float(np.sqrt(np.square(other - weight).mean() / np.square(weight).mean()))


@pytest.mark.parametrize(("before", "kind"), [(Kind.Q4_0, INT4), (Kind.Q8_0, INT8)])
def test_a_matrix_that_was_rounded_by_llama_cpp_keeps_every_value(before: Kind, kind: str) -> None:
    values = dequantize(quantize(WEIGHTS, before), before)
    assert np.array_equal(rounded(values, kind), values)


def test_a_matrix_that_was_q4_1_errs_by_a_fiftieth_of_a_step() -> None:
    """All weights of a block by the same, since only its rest is rounded."""
    weights = np.random.default_rng(1).standard_normal((8, 1024)).astype(np.float32)  # 32 rests share a scale
    values = dequantize(quantize(weights, Kind.Q4_1), Kind.Q4_1)
    off = (rounded(values, OFFSET4) - values).reshape(-1, BLOCK)
    blocks = values.reshape(-1, BLOCK)
    steps = (blocks.max(1) - blocks.min(1)) / 15
    assert np.ptp(off, axis=1).max() < 1e-5
    assert 1 / 60 < np.sqrt(np.square(off).mean() / np.square(steps).mean()) < 1 / 45


def test_older_tables_with_a_shift_for_each_block_are_read() -> None:
    """Mixed files of before have such; today's have a zero and a rest."""
    shifted = quantize(WEIGHTS, Kind.Q4_1).reshape(len(WEIGHTS), -1, 20)
    half = shifted[..., :4].copy().view(np.float16)
    low, high = shifted[..., 4:] & 15, shifted[..., 4:] >> 4  # GGUF's first 16 weights, then the other 16
    q = np.concatenate([low, high], axis=-1)
    tables = {"w_Q4": q[..., ::2] | q[..., 1::2] << 4, "w_scales": half[..., 0], "w_shifts": half[..., 1]}
    expected = dequantize(quantize(WEIGHTS, Kind.Q4_1), Kind.Q4_1)
    assert np.array_equal(matrix_of("w", 4, tables.get, WEIGHTS.shape[1]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_arrays(kind: str) -> None:
    [blocks] = in_blocks(WEIGHTS, kind)
    arrays = [blocks.packed, blocks.scales, blocks.zeros]
    assert bytes_of(WEIGHTS.shape, kind) == sum(array.nbytes for array in arrays if array is not None)


def test_the_search_beats_plain_rounding() -> None:
    plain = dequantize(quantize(WEIGHTS, Kind.Q4_0), Kind.Q4_0)
    errors = [error(WEIGHTS, rounded(WEIGHTS, kind)) for kind in KINDS]
    assert errors[0] < 0.9 * error(WEIGHTS, plain)
    assert errors[0] > errors[1] > 5 * errors[2]


def test_important_columns_are_rounded_better() -> None:
    importance = np.where(np.arange(96) % 8 == 0, 100.0, 1.0).astype(np.float32)
    important = importance > 1
    for kind in (INT4, OFFSET4):
        plain, weighted = rounded(WEIGHTS, kind), rounded(WEIGHTS, kind, importance)
        assert error(WEIGHTS[:, important], weighted[:, important]) < 0.8 * error(
            WEIGHTS[:, important], plain[:, important]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_channels_of_zeros_and_equal_weights(kind: str) -> None:
    weight = WEIGHTS.copy()
    weight[3] = 0
    weight[:, 32:64] = 0
    weight[5] = 0.25
    values = rounded(weight, kind, np.zeros(96, np.float32))
    assert np.isfinite(values).all()
    assert not values[3].any()
    assert np.allclose(values[5], 0.25, rtol=1e-3)


def test_rows_that_are_no_whole_blocks() -> None:
    odd = WEIGHTS[:, :80]
    assert [kind for kind in KINDS if fits(80, kind)] == [INT4]
    assert error(odd, rounded(odd, INT4)) < 0.1
