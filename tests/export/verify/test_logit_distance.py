"""Distances between logits, by hand; and a real engine whose blocks leak."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.file_check import (
    Array,
    FileCheck,
    Passage,
    compare_engine,
    fed,
    judge,
    logit_distance,
    measure,
    note_weight,
)
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from toy_engine import ToyEngine, random_model

P = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], np.float32))
Q = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], np.float32))


def distance(seen: list[Array], wanted: list[Array], prompts: list[list[int]]) -> FileCheck:
    check = FileCheck("target", "toy", "fp32", "toy")
    measure(check, seen, wanted, list(map(Passage, prompts)))
    return check


def test_by_hand() -> None:
    found = distance([Q], [P + 3], [[2, 0, 1]])
    assert found.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 3, abs=1e-6)
    assert found.top1 == pytest.approx(2 / 3)
    assert found.torch_perplexity == pytest.approx(np.exp(-(np.log(0.5) + np.log(0.8)) / 2), rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(-(np.log(0.25) + np.log(0.8)) / 2), rel=1e-6)
    assert found.largest == pytest.approx(3 + np.log(2), rel=1e-6)
    assert found.mean == pytest.approx(3.0, rel=1e-6)
    assert found.positions == 3


def test_kl_has_a_direction() -> None:
    """KL(p of the reference ‖ p of the file)."""
    sharp, flat = np.log(np.array([[0.98, 0.01, 0.01]])), np.zeros((1, 3))
    wanted = 0.98 * np.log(0.98 * 3) + 0.02 * np.log(0.03)
    assert distance([flat], [sharp], [[0]]).kl == pytest.approx(wanted)
    assert distance([sharp], [flat], [[0]]).kl == pytest.approx(-np.log([0.98 * 3, 0.03, 0.03]).mean())
    assert distance([sharp], [sharp], [[0]]).kl == 0


def test_one_token_has_no_perplexity_and_no_number_shows() -> None:
    assert distance([P[:1]], [P[:1]], [[1]]).perplexity is None
    assert distance([P * np.nan], [P], [[0, 1, 2]]).largest == pytest.approx(np.nan, nan_ok=True)


def test_a_distance_is_that_of_all_passages_together() -> None:
    """Row means are left out, a long passage counts for more, and what is no number stays to be seen."""
    rng = np.random.default_rng(2)
    b = [rng.normal(size=(length, 7)).astype(np.float32) for length in (1, 5)]
    a = [rows + 3 + 0.01 * rng.normal(size=rows.shape).astype(np.float32) for rows in b]
    one, other = (np.concatenate(rows) - np.concatenate(rows).mean(1, keepdims=True) for rows in (a, b))
    wanted = np.sqrt(np.square(one - other).sum() / np.square(other).sum())
    assert logit_distance(a, b) == pytest.approx(wanted, rel=1e-4)
    a[1][2, 3] = np.nan
    assert np.isnan(logit_distance(a, b))


def test_one_passage_at_a_time_is_there_in_all_ways() -> None:
    """Of a vocabulary of 262,144 tokens the logits of eight passages are a gigabyte, each time."""
    passages = [Passage([1 + 10 * number + token % 9 for token in range(24)]) for number in range(8)]
    engine = ToyEngine(random_model(0, 4000), 4000, block_length=24)
    own = [fed(CachedEngine(engine), passage, 24) for passage in passages]
    check = FileCheck("target", "toy", "fp32", "toy")
    compare_engine(check, engine, passages, own)  # the toy remembers what it has computed
    tracemalloc.start()
    seen = compare_engine(check, engine, passages, own)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (check.engine_relative, check.block_relative, check.block_leak, check.block_flips) == (0, 0, 0, 0)
    assert peak < 1.6 * sum(rows.nbytes for rows in seen)


def test_weights_that_are_no_numbers_stay_the_worst() -> None:
    check = FileCheck("target", "onnxruntime", "fp32", "onnxruntime")
    for name, difference in (("near", 1e-20), ("broken", np.nan), ("last", 1e-20)):
        note_weight(check, name, difference, 1.0)
    judge(check)
    assert check.broken == ["weights difference nan above 1e-07 (broken)"]


def test_activations_rounded_by_block_leak(families: dict[str, Path], tmp_path: Path) -> None:
    """quantize_dynamic has one scale for all rows of a block: a token that will be rejected moves those before it."""
    from onnxruntime.quantization import quantize_dynamic

    export_onnx(families["llama"], tmp_path / "fp32", "fp32")
    shutil.copytree(tmp_path / "fp32", tmp_path / "dynamic")
    quantize_dynamic(tmp_path / "fp32" / "model.onnx", tmp_path / "dynamic" / "model.onnx")
    passages = [Passage(np.random.default_rng(0).integers(4, 512, 24).tolist())]
    exact, rounded = (FileCheck("drafter", "onnxruntime", "fp32", "onnxruntime") for _ in "ab")
    for check, name in ((exact, "fp32"), (rounded, "dynamic")):
        compare_engine(check, OnnxRuntimeEngine(tmp_path / name, threads=1), passages, None)
        judge(check)
    assert exact.block_leak is not None
    assert exact.block_leak < 1e-6
    assert exact.broken == []
    assert rounded.block_leak is not None
    assert rounded.block_leak > 1e-3
    assert any(reason.startswith("leak difference") for reason in rounded.broken)
