"""A budget shared out: against every allocation there is, on groups small enough to list them all."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from edgespec_export.bits.allocation import Option, frontier, hull
from edgespec_export.bits.choose import USUAL_QUALITY, Budget, budget_of

from edgespec.core.errors import InputError

Groups = dict[str, list[Option]]


def some_groups(seed: int) -> Groups:
    random = np.random.default_rng(seed)
    return {
        f"g{number}": [
            Option("four", 4 * size, loss := float(random.exponential())),
            Option("five", 5 * size, loss * float(random.uniform(0.2, 1.0))),
            Option("eight", 8 * size, loss * float(random.uniform(0.0, 0.2))),
        ]
        for number, size in enumerate(random.integers(10, 100, 6).tolist())
    }


def best_loss(groups: Groups, most: int) -> float:
    every = [
        (sum(option.bytes for option in chosen), sum(option.loss for option in chosen))
        for chosen in product(*groups.values())
    ]
    return min(loss for size, loss in every if size <= most)


@pytest.mark.parametrize("seed", range(5))
def test_no_allocation_of_a_frontiers_size_is_better(seed: int) -> None:
    groups = some_groups(seed)
    points = frontier(groups)
    assert [point.bytes for point in points] == sorted({point.bytes for point in points})
    for point in points:
        chosen = [next(one for one in groups[name] if one.kind == kind) for name, kind in point.kinds.items()]
        assert point.bytes == sum(one.bytes for one in chosen)
        assert point.loss == pytest.approx(sum(one.loss for one in chosen))
        assert point.loss == pytest.approx(best_loss(groups, point.bytes))


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_between_two_sizes_is_used(seed: int) -> None:
    groups = some_groups(seed)
    points = frontier(groups)
    for small, large in pairwise(points):
        found = frontier(groups, large.bytes - 1)[-1]
        assert small.loss >= found.loss >= best_loss(groups, large.bytes - 1) - 1e-12
        assert found.bytes < large.bytes
    assert frontier(groups, points[0].bytes - 1) == []


def test_options_that_are_never_worth_their_bytes_are_left_out() -> None:
    exact = Option("offset4", 5, 0.0)  # a matrix that was rounded to Q4_1 before
    assert hull([Option("int8", 9, 0.01), exact, Option("int4", 4, 1.0)]) == [Option("int4", 4, 1.0), exact]
    same = [Option("a", 4, 1.0), Option("b", 4, 0.5)]
    assert hull(same) == [same[1]]


def test_budgets_are_read_and_refused() -> None:
    assert budget_of(None, "90MB", None) == Budget(bytes=90_000_000)
    assert budget_of(None, "1.5 GiB", None) == Budget(bytes=3 * 2**29)
    assert budget_of(4.5, "", None) == Budget(bits=4.5)
    assert budget_of(None, "", None) == Budget(quality=USUAL_QUALITY)
    with pytest.raises(InputError, match="the size is '90 apples'; give a number with a unit"):
        budget_of(None, "90 apples", None)
    with pytest.raises(InputError, match="given as bits and quality"):
        budget_of(4.5, "", 0.9)
