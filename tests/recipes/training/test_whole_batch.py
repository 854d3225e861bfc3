"""The gradient of a step is that of the whole batch: in one pass, in micro-batches, in several processes. Every loss."""

from __future__ import annotations

from functools import cache

import pytest
import whole_batch_program
from safetensors.torch import load_file
from torch import Tensor
from torchrun import torchrun
from whole_batch_program import CASES, ROWS, gradient, rows

pytestmark = pytest.mark.training

CLOSE = 1e-5  # of the gradient's length


@cache
def whole(name: str) -> Tensor:
    return gradient(CASES[name], ROWS)


def apart(one: Tensor, other: Tensor) -> float:
    """How far two gradients are from each other, in lengths of the second."""
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The gradients that two processes find, each with two micro-batches."""
    out = tmp_path_factory.mktemp("two")
    run = torchrun(out / "log.txt", whole_batch_program.__file__, str(out))
    assert run.wait(300) == 0, (out / "log.txt").read_text()
    return load_file(out / "gradients.safetensors")


def test_the_rows_are_uneven() -> None:
    counts = sorted(int(row["compared"].sum()) for row in rows(student=False))
    assert len(counts) == ROWS
    assert counts[0] == 1
    assert counts[-1] == 20


@pytest.mark.parametrize("name", CASES)
def test_the_same_gradient_however_the_step_is_split(name: str, of_two: dict[str, Tensor]) -> None:
    expected = whole(name)
    assert expected.norm() > 1e-3
    for micro in (8, 1):
        assert apart(gradient(CASES[name], micro), expected) < CLOSE, f"micro-batches of {micro}"
    assert apart(of_two[name], expected) < CLOSE, "two processes"


def test_the_cases_differ() -> None:
    """Each knob changes the gradient, so that a knob without effect is not taken for one that is right."""
    for one, other in [
        ("fkl-tokens-1.0", "fkl-sequences-1.0"),
        ("fkl-tokens-1.0", "fkl-tokens-0.4"),
        ("fkl-sequences-1.0", "fkl-sequences-0.4"),
        ("hard-tokens", "hard-sequences"),
        ("tvd++-sampled-batch-tokens-1.0", "tvd++-sampled-sequence-tokens-1.0"),
        ("tvd++-sampled-sequence-tokens-1.0", "tvd++-sampled-token-tokens-1.0"),
        ("tvd++-exact-batch-tokens-1.0", "tvd++-sampled-batch-tokens-1.0"),
    ]:
        assert apart(whole(one), whole(other)) > 100 * CLOSE, (one, other)


@pytest.mark.parametrize("name", ["tvd++-exact-batch-tokens-0.4"])
def test_a_look_ahead_under_autocast_leaves_every_weight_its_gradient(name: str) -> None:
    """Casts of weights made without gradient are kept by autocast; the pass with gradient must not find them."""
    split, once = (gradient(CASES[name], micro, autocast=True) for micro in (4, ROWS))
    assert apart(split, once) < 0.1
