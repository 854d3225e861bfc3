"""Many rows drawn at once: the runtime's law, token by token and by counting; records as the torch path makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from edgespec_recipes.generating import batch_sampling
from edgespec_recipes.generating.batch_sampling import draw_rows, largest
from edgespec_recipes.stored.top_k import compress
from edgespec_runtime.rules.sampling import Categorical, Uniforms, Warp, warp

from edgespec.core.errors import NoNumbers

HEAT = (0.0, 0.3, 0.7, 1.0)
CUTS = ((0.95, 0.0), (1.0, 0.0), (0.9, 0.05), (1.0, 0.2), (1e-6, 0.0))


class Fixed:
    """A source that gives one number, and counts how often it was asked."""

    def __init__(self, number: float) -> None:
        self.number, self.asked = number, 0

    def random(self) -> float:
        self.asked += 1
        return self.number


def rows_of(count: int, columns: int, spread: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, columns)) * spread).astype(np.float32)


@pytest.mark.parametrize("columns", [11, 700, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("cuts", [Warp(top_p=top_p, min_p=min_p) for top_p, min_p in CUTS])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_a_tokens_law_is_the_runtimes(columns: int, cuts: Warp, spread: float) -> None:
    """By enumeration: equally spaced numbers through the inversion give each token as often as it is probable."""
    logits, marks = rows_of(1, columns, spread), 2000
    for temperature in HEAT:
        law = warp(logits[0], Warp(temperature, top_p=cuts.top_p, min_p=cuts.min_p)).dense(columns)
        sources = [Fixed((mark + 0.5) / marks) for mark in range(marks)]
        tokens, _ = draw_rows(np.repeat(logits, marks, 0), [temperature] * marks, cuts, sources)
        found = np.bincount(tokens, minlength=columns) / marks
        assert np.abs(found - law).max() <= 1.01 / marks
        assert not found[law == 0].any()


def test_the_same_number_gives_the_token_that_one_sequence_would_draw() -> None:
    logits, heat = rows_of(64, 49_152, 5.0), HEAT * 16
    tokens, _ = draw_rows(logits, heat, Warp(top_p=0.95, min_p=0.02), [Uniforms(seed) for seed in range(64)])
    ways = [Warp(temperature, top_p=0.95, min_p=0.02) for temperature in heat]
    assert tokens == [
        warp(row, how).sample(Uniforms(seed))
        for seed, (row, how) in enumerate(zip(logits, ways, strict=True))
    ]


def test_numbers_are_drawn_only_where_there_is_a_choice() -> None:
    logits = rows_of(3, 500, 1.0)
    logits[1, 7] = 60.0
    sources = [Fixed(0.3) for _ in range(3)]
    tokens, _ = draw_rows(logits, [0.0, 1.0, 1.0], Warp(top_p=0.95), sources)
    assert [source.asked for source in sources] == [0, 0, 1]
    assert tokens[:2] == [logits[0].argmax(), 7]


def test_a_wide_nucleus_goes_through_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Warp] = []

    def counted(row: np.ndarray, how: Warp) -> Categorical:
        asked.append(how)
        return warp(row, how)

    monkeypatch.setattr(batch_sampling, "warp", counted)
    flat, peaked = rows_of(2, 9000, 0.1), rows_of(2, 9000, 9.0)
    draw_rows(np.concatenate([flat, peaked]), [1.0] * 4, Warp(top_p=0.95), [Fixed(0.5)] * 4)
    assert len(asked) == 2


@pytest.mark.parametrize(("columns", "count"), [(12, 12), (300, 64), (9001, 128), (49_152, 128)])
def test_the_largest_entries(columns: int, count: int) -> None:
    logits = np.round(rows_of(5, columns, 4.0), 1)  # ties
    ids, values = largest(logits, count)
    for row, found, value in zip(logits, ids, values, strict=True):
        order = np.argsort(-row, kind="stable")[:count]
        np.testing.assert_array_equal(found, order)
        np.testing.assert_array_equal(value, row[order])


@pytest.mark.parametrize(("columns", "top_k"), [(12, 12), (512, 8), (20_000, 64), (70_000, 200)])
def test_records_are_those_of_the_torch_path(columns: int, top_k: int) -> None:
    logits = rows_of(19, columns, 5.0)
    _, records = draw_rows(logits, [0.7] * 19, Warp(top_p=0.95), [Fixed(0.5)] * 19, top_k)
    ids, log_p, log_rest = compress(torch.from_numpy(logits), top_k)
    np.testing.assert_array_equal(records["ids"], ids.numpy())
    np.testing.assert_allclose(records["log_p"].astype(float), log_p.numpy(), rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(records["log_rest"].astype(float), log_rest.numpy(), rtol=2e-3)


@pytest.mark.parametrize("columns", [500, 49_152])
@pytest.mark.parametrize("entries", [slice(None), slice(70, 71)], ids=["all", "one"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_row_that_is_nan_is_an_error(columns: int, entries: slice, heat: float, top_k: int) -> None:
    """Else the answers would be one token again and again, and their records NaN."""
    logits = rows_of(11, columns, 1.0)
    logits[9, entries] = np.nan
    with pytest.raises(NoNumbers, match=r"the target gives logits that are no numbers \(NaN\)"):
        draw_rows(logits, [heat] * 11, Warp(), [Uniforms(seed) for seed in range(11)], top_k)
