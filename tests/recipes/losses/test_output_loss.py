"""The chunked loss against the plain one: values, every gradient, what is skipped, what never lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgespec_recipes.losses.losses import divergence, fkl, reward, tvd
from edgespec_recipes.losses.output_loss import RowNumbers, output_loss, output_rows, output_values
from loss_cases import EVERY, NAMES, logits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgespec.recipe.schema import DistillOptions

HARD = DistillOptions(labels="hard")
VOCABULARY, HIDDEN = 13, 5
every_loss = pytest.mark.parametrize("options", [*EVERY, HARD], ids=[*NAMES, "hard"])


class Case:
    """Hidden states, an output layer and a target, all float64, in leaves of their own."""

    def __init__(self, count: int, hard: bool = False, dtype: torch.dtype = torch.float64) -> None:
        self.hidden = logits(count, HIDDEN, seed=2, dtype=dtype).requires_grad_()
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)
        self.head.weight = nn.Parameter(logits(VOCABULARY, HIDDEN, seed=3, dtype=dtype))
        self.head.bias = nn.Parameter(logits(VOCABULARY, seed=4, dtype=dtype))
        self.target = logits(count, VOCABULARY, seed=5, dtype=dtype)
        self.noise = torch.rand(count, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        if hard:
            self.target = self.target.argmax(-1)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.head.weight, self.head.bias

    def plain(self, options: DistillOptions, weights: Tensor | None = None) -> Tensor:
        """Whole logits, autograd; only rows of a weight other than 0 are there."""
        weights = torch.ones(len(self.hidden)) if weights is None else weights
        kept, loss = weights != 0, divergence(options)
        drawn = {"noise": self.noise[kept]} if loss.sampled else {}
        losses = loss.per_token(self.head(self.hidden)[kept], self.target[kept], **drawn)
        return (losses * weights[kept]).sum()

    def chunked(self, options: DistillOptions, weights: Tensor | None = None, rows: int = 3) -> Tensor:
        chunk, given = rows * VOCABULARY, self.given(options, weights)
        loss = divergence(options).per_token
        return output_loss(loss, self.hidden, self.head, self.rows, weights, chunk, given)

    def given(self, options: DistillOptions, weights: Tensor | None = None) -> dict[str, Tensor]:
        """What each row takes from the others: all of them are one sequence."""
        kept = slice(None) if weights is None else weights != 0
        loss = divergence(options)
        found = {"noise": self.noise} if loss.sampled else {}
        if loss.scope != "token":
            mean = reward(self.head(self.hidden)[kept], self.target[kept]).mean()
            found["reward_mean"] = mean.expand(len(self.hidden))
        return found

    def rows(self, rows: RowNumbers) -> Tensor:
        return self.target[rows]


def value_and_gradients(loss: Any, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    value: Tensor = loss()
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@every_loss
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("count", [1, 7])
def test_equals_the_plain_form(options: DistillOptions, count: int, rows: int) -> None:
    case = Case(count, options is HARD)
    plain = value_and_gradients(lambda: case.plain(options), case.leaves)
    chunked = value_and_gradients(lambda: case.chunked(options, rows=rows), case.leaves)
    assert all(gradient.any() for gradient in plain[1:])
    for ours, wanted in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, wanted)


@every_loss
@pytest.mark.parametrize(
    "kept", [[0.5, 2.0, 1.0, 3.0, 0.1, 1.0, 1.0, 0.25], [0.0, 2.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.0]]
)
def test_weights_and_skipped_rows(options: DistillOptions, kept: list[float]) -> None:
    """The sum sees no row of weight 0, and nobody asks for its target."""
    case, weights = Case(8, options is HARD), torch.tensor(kept, dtype=torch.float64)
    plain = value_and_gradients(lambda: case.plain(options, weights), case.leaves)
    asked: list[int] = []

    def rows(rows: RowNumbers) -> Tensor:
        asked.extend(torch.arange(8)[rows].tolist())
        return case.target[rows]

    loss, chunk, given = divergence(options).per_token, 3 * VOCABULARY, case.given(options, weights)
    chunked = value_and_gradients(
        lambda: output_loss(loss, case.hidden, case.head, rows, weights, chunk, given),
        case.leaves,
    )
    for ours, wanted in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert asked == weights.nonzero()[:, 0].tolist()


@every_loss
@pytest.mark.parametrize("count", [0, 4])
def test_nothing_to_compare_is_zero_with_a_gradient_path(options: DistillOptions, count: int) -> None:
    case = Case(count, options is HARD)
    loss = case.chunked(options, torch.zeros(count))
    assert loss.item() == 0
    loss.backward()
    for leaf in case.leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


@every_loss
def test_gradients_by_finite_differences(options: DistillOptions) -> None:
    case = Case(3, options is HARD)
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def value(*_: Tensor) -> Tensor:
        return case.chunked(options, weights, rows=2)

    assert torch.autograd.gradcheck(value, case.leaves)


def test_the_gradient_follows_what_is_done_with_the_loss() -> None:
    case = Case(5)
    once = torch.autograd.grad(case.plain(DistillOptions(divergence="jsd")), case.leaves)
    for scale in (1.0, -3.0):
        loss = case.chunked(DistillOptions(divergence="jsd")) * scale
        for leaf in case.leaves:
            leaf.grad = None
        for times in (
            1,
            2,
            3,
        ):  # gradients add up, and a backward pass that keeps the graph leaves it as it was
            loss.backward(retain_graph=True)
            for leaf, wanted in zip(case.leaves, once, strict=True):
                torch.testing.assert_close(leaf.grad, times * scale * wanted)


def test_the_stored_gradient_becomes_the_parameters() -> None:
    """Not a copy of it: of a large vocabulary it is the largest tensor there is."""
    case = Case(5)
    with Sizes() as sizes:
        loss = case.chunked(DistillOptions(divergence="fkl"), torch.full((5,), 0.2))
    assert case.head.weight.numel() in sizes.seen
    with Sizes() as sizes:
        loss.backward()
    assert case.head.weight.numel() not in sizes.seen


def test_only_what_needs_a_gradient_gets_one() -> None:
    case, options = Case(5), DistillOptions(divergence="fkl")
    wanted = case.plain(options)
    with torch.no_grad():
        assert not case.chunked(options).requires_grad
        torch.testing.assert_close(case.chunked(options), wanted.detach())
    case.head.requires_grad_(False)
    case.chunked(options).backward()
    torch.testing.assert_close(case.hidden.grad, torch.autograd.grad(wanted, case.hidden)[0])
    assert case.head.weight.grad is None


@every_loss
def test_autocast(options: DistillOptions) -> None:
    """bf16 products, loss and sums in float32: no further from float32 than the plain form."""
    case = Case(40, options is HARD, torch.float32)
    exact = value_and_gradients(lambda: case.plain(options), case.leaves)
    with torch.autocast("cpu", torch.bfloat16):
        plain = value_and_gradients(lambda: case.plain(options), case.leaves)
        chunked = value_and_gradients(lambda: case.chunked(options), case.leaves)
    for ours, its, wanted in zip(chunked, plain, exact, strict=True):
        assert ours.dtype == torch.float32
        scale = wanted.norm()
        assert (ours - its).norm() < 0.02 * scale
        assert (ours - wanted).norm() <= 1.05 * (its - wanted).norm() + 1e-3 * scale


class Sizes(TorchDispatchMode):
    """The numbers of elements of what operations give while it is on, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and func is not torch.ops.aten.detach.default:
                self.seen.add(tensor.numel())
        return result


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_no_tensor_of_positions_by_vocabulary_ever_lives(options: DistillOptions) -> None:
    count, vocabulary, width, chunk = 400, 512, 8, 4096
    hidden, states = logits(count, width).requires_grad_(), logits(count, width, seed=1)
    head, target = nn.Linear(width, vocabulary, bias=False), nn.Linear(width, vocabulary, bias=False)
    loss = divergence(options)
    given = {"noise": torch.rand(count, dtype=torch.float64)} if loss.sampled else {}
    if loss.scope != "token":
        given["reward_mean"] = torch.full((count,), 0.5)
    with Sizes() as sizes:
        rows = output_rows(states, target)
        output_loss(loss.per_token, hidden, head, rows, None, chunk, given).backward()
    assert max(sizes.seen) == chunk == vocabulary * width
    with Sizes() as sizes:
        loss.per_token(head(hidden), target(states).detach()).sum().backward()
    assert max(sizes.seen) == count * vocabulary


class Products(TorchDispatchMode):
    """The shapes of the bf16 factors of all matrix products while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            factors = [factor for factor in args[-2:] if factor.dtype == torch.bfloat16]
            self.shapes.update(tuple(factor.shape) for factor in factors)
        return func(*args, **(kwargs or {}))


def test_bf16_products_on_a_cpu_come_in_few_shapes() -> None:
    """oneDNN keeps compiled code for every shape: a run whose batches differ would fill the memory with it."""
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        for count in range(1, 200):
            case = Case(count, dtype=torch.float32)
            target = output_rows(case.hidden, case.head)
            loss = output_loss(fkl, case.hidden, case.head, target, chunk=150 * VOCABULARY)
            loss.backward()
            output_values([fkl], case.hidden, case.head, target)
    rows = {shape[0] for shape in products.shapes} - {HIDDEN, VOCABULARY}
    assert rows == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}


def test_values_of_several_functions_in_one_pass() -> None:
    case, asked = Case(7), []

    def rows(rows: RowNumbers) -> Tensor:
        asked.append(rows)
        return case.target[rows]

    found = output_values([fkl, tvd], case.hidden, case.head, rows, chunk=3 * VOCABULARY)
    assert not found.requires_grad
    assert asked == [slice(0, 3), slice(3, 6), slice(6, 7)]
    whole = case.head(case.hidden)
    for values, function in zip(found, (fkl, tvd), strict=True):
        torch.testing.assert_close(values, function(whole, case.target).detach())
    assert output_values([fkl], case.hidden[:0], case.head, rows).shape == (1, 0)


def test_output_rows_are_the_targets_logits() -> None:
    case = Case(6, dtype=torch.float32)
    rows = output_rows(case.hidden, case.head)
    chosen = torch.tensor([0, 4, 5])
    torch.testing.assert_close(rows(chosen), case.head(case.hidden[chosen]).detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert output_rows(case.hidden, case.head)(slice(2)).dtype == torch.bfloat16
