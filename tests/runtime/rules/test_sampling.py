"""Warping and drawing against plain implementations that sort the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edgespec_runtime.rules.sampling import Categorical, Uniforms, Warp, _invert, _largest, _nucleus, warp
from scipy.stats import chisquare

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping

SIZES = (1, 2, 7, 255, 256, 257, 1024, 1025, 4096, 5000, 32000)


def rows(size: int) -> list[np.ndarray]:
    """Logits of many forms: normal, Zipf, flat, one-hot, with ties, mostly -inf."""
    generator = np.random.default_rng(size)
    zipf = -1.2 * np.log(np.arange(1, size + 1))
    masked = np.full(size, -np.inf)
    masked[generator.integers(size, size=3)] = generator.normal(size=3)
    forms = (
        generator.normal(size=size),
        generator.permutation(zipf),
        np.zeros(size),
        np.eye(1, size, size // 2)[0] * 50,
        generator.integers(0, 4, size=size),
        masked,
    )
    return [form.astype(np.float32) for form in forms]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return (exponentials / exponentials.sum()).astype(np.float32)


def plain_nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    order = np.lexsort((np.arange(len(probs)), -probs))
    total = np.cumsum(probs[order], dtype=np.float64)
    size = np.flatnonzero(total >= top_p)[0] + 1 if total[-1] >= top_p else len(probs)
    return np.sort(order[:size])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-9])
def test_nucleus_is_that_of_a_full_sort(size: int, top_p: float) -> None:
    for logits in rows(size):
        probs = softmax(logits)
        np.testing.assert_array_equal(_nucleus(probs, top_p), plain_nucleus(probs, top_p))


@pytest.mark.parametrize(("size", "count"), [(size, k) for size in SIZES for k in (1, 3, 50) if k < size])
def test_largest_are_those_of_a_full_sort(size: int, count: int) -> None:
    for logits in rows(size):
        found = _largest(logits, count)
        assert len(set(found.tolist())) == count
        assert np.all(np.diff(found) > 0)
        np.testing.assert_array_equal(np.sort(logits[found]), np.sort(logits)[-count:])


@pytest.mark.parametrize("size", SIZES)
def test_inversion_is_that_of_a_plain_cumulative_sum(size: int) -> None:
    generator = np.random.default_rng(1)
    for logits in rows(size):
        probs = softmax(logits)
        total = np.cumsum(probs, dtype=np.float64)
        for uniform in generator.random(50):
            place, mass = _invert(probs, uniform)
            assert mass == pytest.approx(total[-1], rel=1e-6)
            goal = uniform * total[-1]
            assert probs[place] > 0
            below = total[place] - probs[place].astype(np.float64)
            # block sums round differently in the last bits
            assert below - 1e-12 <= goal <= total[place] + 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_inversion_at_both_ends_draws_a_token_with_mass(size: int) -> None:
    for logits in rows(size):
        probs = softmax(logits)
        assert _invert(probs, 0.0)[0] == np.flatnonzero(probs)[0]
        last, _ = _invert(probs, np.nextafter(1.0, 0.0))
        assert probs[last] > 0
        assert probs[last + 1 :].sum(dtype=np.float64) < 1e-9


def test_inversion_survives_a_block_that_ends_without_mass() -> None:
    probs = np.zeros(4096, dtype=np.float32)
    probs[[10, 300]] = 0.5
    assert [_invert(probs, uniform)[0] for uniform in (0.0, 0.49, 0.51, 1.0)] == [10, 10, 300, 300]


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 3,000 tokens merged into 20 bins; a right sampler fails with probability 1e-4."""
    generator = np.random.default_rng(7)
    probs = softmax(generator.normal(size=3000).astype(np.float32) * 2)
    categorical = Categorical(None, probs)
    draws = np.array([categorical.sample(generator) for _ in range(20_000)])
    bins = np.arange(3000) % 20
    seen = np.bincount(bins[draws], minlength=20)
    wanted = np.bincount(bins, weights=probs, minlength=20)
    assert chisquare(seen, wanted / wanted.sum() * len(draws)).pvalue > 1e-4


def test_temperature_zero_is_the_first_maximum_and_draws_nothing() -> None:
    generator = np.random.default_rng(0)
    state = generator.bit_generator.state
    greedy = warp(np.array([1, 3, 3, 2], dtype=np.float32), Warp())
    assert greedy.sample(generator) == 1
    assert greedy.prob(1) == 1.0
    assert greedy.prob(2) == 0.0
    assert generator.bit_generator.state == state


def test_warp_is_temperature_then_top_k_then_top_p() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.3, 0.15, 0.1], dtype=np.float32))
    squared = np.array([0.4**2, 0.3**2])
    kept = warp(logits, Warp(temperature=0.5, top_k=2))
    assert kept.ids is not None
    np.testing.assert_array_equal(kept.ids, [1, 2])
    np.testing.assert_allclose(kept.probs, squared / squared.sum(), rtol=1e-5)
    # of the two kept by top-k the first has 0.16 / 0.25 = 0.64 of the mass, which reaches 0.6 (of all five it would have 0.57)
    np.testing.assert_array_equal(warp(logits, Warp(temperature=0.5, top_k=2, top_p=0.6)).ids, [1])  # type: ignore[arg-type]
    np.testing.assert_array_equal(warp(logits, Warp(temperature=0.5, top_p=0.6)).ids, [1, 2])  # type: ignore[arg-type]
    np.testing.assert_allclose(warp(logits, Warp(temperature=1.0)).dense(5), np.exp(logits), rtol=1e-5)
    assert warp(logits, Warp(temperature=1.0, top_k=5)).ids is None  # k = V keeps all


@pytest.mark.parametrize(
    "how", [Warp(temperature=0.7), Warp(temperature=1.0, top_k=40), Warp(temperature=1.3, top_p=0.8)]
)
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 7, 257, 5000])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(size: int, min_p: float, how: Warp) -> None:
    """After the other warps: p / max p >= min_p on what they kept, renormalised."""
    for logits in rows(size):
        before = warp(logits, how).dense(size)
        wanted = np.where(before >= np.float32(min_p) * before.max(), before, 0).astype(np.float64)
        found = warp(logits, replace(how, min_p=min_p)).dense(size)
        np.testing.assert_allclose(found, wanted / wanted.sum(), rtol=1e-5)
        assert found.argmax() == before.argmax()


def test_min_p_comes_after_top_p() -> None:
    """transformers' order: top-p counts the mass of the tokens that min-p drops. First min-p, top-p would keep one token."""
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.1], dtype=np.float32))
    how = Warp(temperature=1.0, top_p=0.6, min_p=0.5)
    np.testing.assert_array_equal(warp(logits, how).ids, [0, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_warping_is_that_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    import torch
    from transformers import generation

    warpers = [generation.TemperatureLogitsWarper(temperature)]
    warpers += [generation.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [generation.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [generation.MinPLogitsWarper(min_p)] if min_p else []
    logits = np.random.default_rng(3).normal(size=(20, 300)).astype(np.float32) * 3
    scores = torch.from_numpy(logits)
    for warper in warpers:
        scores = warper(torch.zeros(20, 1, dtype=torch.long), scores)
    how = Warp(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = np.stack([warp(row, how).dense(300) for row in logits])
    np.testing.assert_allclose(found, torch.softmax(scores, -1).numpy(), atol=1e-6)


def test_a_temperature_close_to_zero_is_greedy_without_overflow() -> None:
    logits = np.array([90, -90, 89.5], dtype=np.float32)
    for temperature in (1e-3, 1e-7, 1e-300):
        assert warp(logits, Warp(temperature=temperature)).prob(0) == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "how",
    [
        Warp(),
        Warp(temperature=1.0),
        Warp(temperature=0.7, top_k=40),
        Warp(temperature=1.3, top_p=0.8),
        Warp(temperature=1.0, min_p=0.1),
    ],
)
def test_a_row_that_is_no_numbers_is_one_token(how: Warp, value: float) -> None:
    """Else a share of NaN, or a list without a token, would be compared with what the other model says."""
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    logits[[70, 4000]] = value
    found = warp(logits, how)
    assert found.certain
    assert found.sample(Uniforms(0)) == 70
    assert (found.prob(70), found.prob(4000)) == (1.0, 0.0)


def test_warping_leaves_the_logits_alone() -> None:
    logits = np.arange(2000, dtype=np.float32)
    for how in (Warp(), Warp(temperature=1.0), Warp(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1)):
        warp(logits, how)
        np.testing.assert_array_equal(logits, np.arange(2000, dtype=np.float32))


def test_sparse_and_dense_views_agree() -> None:
    sparse = Categorical(np.array([2, 5, 9]), np.array([0.5, 0.25, 0.25], dtype=np.float32))
    dense = sparse.dense(10)
    assert [sparse.prob(token) for token in range(10)] == dense.tolist()
    ids = np.array([0, 2, 5, 9])
    np.testing.assert_array_equal(sparse.at(ids), dense[ids])
    np.testing.assert_array_equal(Categorical(None, dense).at(ids), dense[ids])


@pytest.mark.parametrize("ids", [None, np.array([3, 4, 9])])
def test_weights_become_probabilities_when_asked_for(ids: np.ndarray | None) -> None:
    weights = np.array([1.0, 0.0, 3.0], dtype=np.float32)
    last = 2 if ids is None else 9
    for total in (None, 4.0):
        categorical = Categorical(ids, weights.copy(), total)
        assert {categorical.sample(Uniforms(seed)) for seed in range(50)} == {last, 0 if ids is None else 3}
        assert categorical.prob(last) == 0.75
        np.testing.assert_array_equal(categorical.probs, [0.25, 0, 0.75])
        assert categorical.prob(last) == 0.75
        assert categorical.dense(10 if ids is not None else 3)[last] == 0.75


def test_numbers_drawn_ahead_are_those_of_single_calls() -> None:
    generator, ahead = np.random.default_rng(5), Uniforms(5)
    assert [ahead.random() for _ in range(200)] == [generator.random() for _ in range(200)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.1), ("temperature", 101), ("temperature", "nan"), ("top_k", -1)),
        *(("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1)),
    ],
)
def test_values_out_of_bounds_are_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} is"):
        from_mapping(Warp, {name: value})
