"""Costs of passes: arithmetic on made-up tables."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from edgespec_runtime.chooser.pass_costs import Costs

from edgespec.core.errors import InputError
from edgespec.core.metrics import predicted_block_efficiency

# v(1..8) of llama.cpp 7B Q4_0 on one processor: its kernels work on rows of four
SAW = (1.0, 1.51, 2.12, 1.40, 2.12, 2.70, 2.64, 2.58)


def made_up(v: Sequence[float], c_t: float, step: float = 0.1) -> Costs:
    return Costs((64,), (tuple(step * value for value in v),), (step * c_t,))


def test_costs_are_linear_between_contexts_and_constant_outside() -> None:
    costs = Costs((100, 300), ((1.0, 2.0), (3.0, 5.0)), (0.1, 0.5))
    assert [costs.at(at).verify(2) for at in (1, 100, 150, 200, 300, 900)] == [2.0, 2.0, 2.75, 3.5, 5.0, 5.0]
    assert costs.at(200).draft == pytest.approx(0.3)
    assert costs.at(200).v(2) == pytest.approx(3.5 / 2.0)
    assert costs.at(200).c_t == pytest.approx(0.15)
    assert costs.at(100).verify(4) == pytest.approx(4.0)  # past the longest: as much for each token as below
    for context, measured in ((1, 100), (199, 100), (201, 300), (999, 300)):
        assert costs.nearest(context) == costs.at(measured)


@pytest.mark.parametrize(
    "table",
    [
        {"contexts": ()},
        {"contexts": (300, 100)},
        {"contexts": (0, 100)},
        {"verify_seconds": ((1.0,), (1.0, 2.0))},
        {"verify_seconds": ((), ())},
        {"verify_seconds": ((1.0, 2.0),)},
        {"verify_seconds": ((1.0, 0.0), (1.0, 2.0))},
        {"verify_seconds": ((1.0, float("nan")), (1.0, 2.0))},
        {"draft_seconds": (0.1,)},
        {"draft_seconds": (0.1, -1.0)},
        {"draft_seconds": (0.1, float("inf"))},
    ],
)
def test_a_table_with_holes_is_refused(table: dict[str, object]) -> None:
    whole = {
        "contexts": (100, 300),
        "verify_seconds": ((1.0, 2.0), (3.0, 5.0)),
        "draft_seconds": (0.1, 0.5),
    }
    Costs(**whole)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="measure again"):
        Costs(**{**whole, **table})  # type: ignore[arg-type]


def test_three_tokens_are_padded_to_four_on_a_saw_tooth() -> None:
    costs = made_up(SAW, 0.02)
    assert [costs.at(64).pass_length(n) for n in range(1, 9)] == [1, 4, 4, 4, 5, 6, 7, 8]
    smooth = made_up((1.0, 1.08, 1.25, 1.40), 0.02)
    assert [smooth.at(64).pass_length(n) for n in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    noise = made_up((1.0, 1.08, 1.25, 1.24), 0.02)
    assert noise.at(64).pass_length(3) == 3  # 1 % is no reason to pad
    # A plain step is never padded: with it all gains are compared.
    assert made_up((1.0, 0.7, 1.25), 0.02).at(64).pass_length(1) == 1


def test_a_row_is_the_table_at_one_context() -> None:
    costs = made_up(SAW, 0.02)
    _, _, draft, verify, size = costs.at(64)
    assert draft == pytest.approx(0.1 * 0.02)
    assert verify[1:] == pytest.approx([0.1 * value for value in SAW])
    assert size == [costs.at(64).pass_length(n) for n in range(1, 9)]


def test_speedup_is_the_formula_with_the_cheaper_pass() -> None:
    costs = made_up(SAW, 0.02)
    assert costs.at(64).speedup(0.7, 3) == pytest.approx(predicted_block_efficiency(0.7, 3) / (0.06 + 1.40))
    assert costs.at(64).speedup(0.7, 2) == pytest.approx(predicted_block_efficiency(0.7, 2) / (0.04 + 1.40))
    assert costs.at(64).speedup(0.7, 0) == 1.0


@pytest.mark.parametrize(("c_t", "v2"), [(0.1, 1.2), (0.02, 1.05), (0.4, 1.5)])
def test_break_even_of_one_draft_token_is_known_in_closed_form(c_t: float, v2: float) -> None:
    """γ = 1: (1 + α) / (c_t + v(2)) = 1."""
    costs = made_up((1.0, v2), c_t)
    assert costs.at(64).break_even(1) == pytest.approx(c_t + v2 - 1.0, abs=1e-5)


def test_break_even_at_its_ends() -> None:
    assert made_up((1.0, 1.9), 0.1).at(64).break_even(1) is None  # even α = 1 gives 2 tokens for 2 steps
    assert made_up((1.0, 0.8), 0.1).at(64).break_even(1) == 0.0
    costs = made_up(SAW, 0.02)
    for length in range(1, 8):
        needed = costs.at(64).break_even(length)
        assert needed is not None
        assert costs.at(64).speedup(needed, length) == pytest.approx(1.0, abs=1e-4)


def test_the_best_draft_length_is_zero_where_nothing_pays() -> None:
    assert made_up((1.0, 2.0, 3.0, 4.0), 0.0).at(64).best(0.9) == (0, 1.0)
    assert made_up(SAW, 0.02).at(64).best(0.05) == (0, 1.0)
    assert made_up((1.0,), 0.0).at(64).best(0.9) == (0, 1.0)  # no room for a draft
    length, gain = made_up(SAW, 0.02).at(64).best(0.7)
    assert (length, gain) == (3, pytest.approx(2.533 / 1.46))
    assert made_up((1.0,) * 16, 0.0).at(64).best(0.9)[0] == 15


def test_of_equally_cheap_passes_the_shortest_is_made() -> None:
    assert Costs((64,), ((1.0, 2.0, 1.5, 1.5),), (0.1,)).at(64).size == [1, 3, 3, 4]
