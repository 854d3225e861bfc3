"""Divergences: exact limits, identities between them, gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from edgespec_recipes.losses import ESTIMATORS, LOSSES, SCOPES, distillation_loss, divergence, fkl, tvd, tvdpp
from torch import Tensor

from edgespec.recipe import DistillOptions

EVERY = [
    DistillOptions(divergence=name, tvdpp_estimator=estimator, tvdpp_scope=scope)
    for name, estimator, scope in product(LOSSES, ESTIMATORS, SCOPES)
    if name == "tvd++" or (estimator, scope) == ("exact", "batch")
]
NAMES = [f"{o.divergence}-{o.tvdpp_estimator}-{o.tvdpp_scope}" for o in EVERY]


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


def gradient(function, draft: Tensor, target: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    draft = draft.clone().requires_grad_()
    function(draft, target).sum().backward()
    assert draft.grad is not None
    return draft.grad


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_unreduced_float32_and_no_gradient_to_the_target(options: DistillOptions) -> None:
    draft = logits(3, 5, 17).bfloat16().requires_grad_()
    target = logits(3, 5, 17, seed=1).bfloat16().requires_grad_()
    loss = divergence(options)(draft, target)
    assert loss.shape == (3, 5)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert target.grad is None
    assert draft.grad is not None
    assert draft.grad.abs().sum() > 0


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_equal_inputs_give_zero_loss_and_gradient(options: DistillOptions) -> None:
    same = logits(4, 9)
    torch.testing.assert_close(divergence(options)(same, same), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        gradient(divergence(options), same, same), torch.zeros(4, 9), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_all_masked_is_zero_with_a_gradient_path(options: DistillOptions) -> None:
    draft = logits(2, 3, 7).requires_grad_()
    loss = distillation_loss(
        divergence(options), draft, logits(2, 3, 7, seed=1), torch.zeros(2, 3, dtype=torch.bool)
    )
    assert loss.item() == 0
    loss.backward()
    assert draft.grad is not None
    assert not draft.grad.any()


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_masked_positions_change_nothing(options: DistillOptions) -> None:
    """Neither the mean nor a batch statistic of TVD++ may see them."""
    draft, target = logits(2, 4, 11), logits(2, 4, 11, seed=1)
    mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
    wild = torch.where(mask[..., None], draft, 50 * logits(2, 4, 11, seed=2))
    results = []
    for given in (draft, wild):
        torch.manual_seed(3)
        results.append(
            gradient(lambda d, t: distillation_loss(divergence(options), d, t, mask), given, target)
        )
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert not results[0][~mask].any()
    torch.manual_seed(3)
    alone = gradient(lambda d, t: divergence(options)(d, t).mean(), draft[mask], target[mask])
    torch.testing.assert_close(results[0][mask], alone)


def test_fkl_is_the_kl_divergence_and_its_gradient_is_q_minus_p() -> None:
    draft, target = logits(3, 7, dtype=torch.float64), logits(3, 7, seed=1, dtype=torch.float64)
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    torch.testing.assert_close(fkl(draft, target), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(gradient(fkl, draft, target), q - p)
    entropy = -(p * p.log()).sum(-1)
    cross = torch.nn.functional.cross_entropy(draft, p, reduction="none")
    torch.testing.assert_close(fkl(draft, target), cross - entropy)


def test_tvd_is_one_minus_the_overlap_and_bounded() -> None:
    draft, target = logits(50, 13), logits(50, 13, seed=1)
    overlap = torch.minimum(torch.softmax(target, -1), torch.softmax(draft, -1)).sum(-1)
    torch.testing.assert_close(tvd(draft, target), 1 - overlap)
    apart = torch.tensor([[40.0, -40.0]])
    torch.testing.assert_close(tvd(apart, -apart), torch.ones(1))
    torch.testing.assert_close(tvd(draft, target), tvd(target, draft))


def test_tvd_gradient_by_finite_differences() -> None:
    draft, target = logits(2, 6, dtype=torch.float64), logits(2, 6, seed=1, dtype=torch.float64)
    assert (torch.softmax(draft, -1) - torch.softmax(target, -1)).abs().min() > 1e-4  # away from the kinks
    assert torch.autograd.gradcheck(lambda d: tvd(d, target), draft.requires_grad_())


def enumerated(draft: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """E_{x~q}[∇ log q(x) · weight(x)], token by token: the right side of Lemma 1."""
    total = torch.zeros_like(draft)
    for row in range(len(draft)):
        for token in range(draft.shape[1]):
            score = gradient(
                lambda d, t, row=row, token=token: torch.log_softmax(d, -1)[row, token], draft, target
            )
            total += torch.softmax(draft, -1)[row, token] * weight[row, token] * score
    return total


def test_lemma_1_by_enumeration() -> None:
    draft, target = logits(3, 6, dtype=torch.float64), logits(3, 6, seed=1, dtype=torch.float64)
    reward = (torch.softmax(target, -1) > torch.softmax(draft, -1)).double()
    torch.testing.assert_close(gradient(tvd, draft, target), enumerated(draft, target, -reward))


@pytest.mark.parametrize("scope", SCOPES)
def test_tvdpp_exact_is_eq_1_by_enumeration(scope: str) -> None:
    draft, target = logits(3, 6, dtype=torch.float64), logits(3, 6, seed=1, dtype=torch.float64)
    reward = (torch.softmax(target, -1) > torch.softmax(draft, -1)).double()
    over = None if scope == "batch" else -1
    mean = reward.mean(over, keepdim=True)
    deviation = (reward - mean).square().mean(over, keepdim=True).sqrt()
    wanted = enumerated(draft, target, -(reward - mean) / deviation)
    torch.testing.assert_close(gradient(lambda d, t: tvdpp(d, t, scope=scope), draft, target), wanted)


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def test_tvdpp_exact_batch_is_parallel_to_tvd_and_the_others_are_not() -> None:
    draft, target = logits(64, 200, dtype=torch.float64), logits(64, 200, seed=1, dtype=torch.float64)
    reference = gradient(tvd, draft, target)
    exact = gradient(tvdpp, draft, target)
    assert cosine(exact, reference) == pytest.approx(1.0, abs=1e-12)
    mean = (torch.softmax(target, -1) > torch.softmax(draft, -1)).double().mean()
    torch.testing.assert_close(exact * (mean * (1 - mean)).sqrt(), reference)
    by_position = gradient(lambda d, t: tvdpp(d, t, scope="position"), draft, target)
    assert 0.9 < cosine(by_position, reference) < 1 - 1e-6
    uniform = gradient(lambda d, t: tvdpp(d, t, estimator="uniform", scope="position"), draft, target)
    assert 0.0 < cosine(uniform, reference) < 0.6


def test_tvdpp_sampled_is_unbiased() -> None:
    draft, target = logits(2, 5, dtype=torch.float64), logits(2, 5, seed=1, dtype=torch.float64)
    many = 20_000
    torch.manual_seed(0)
    drawn = gradient(
        lambda d, t: tvdpp(d.repeat(many, 1), t.repeat(many, 1), estimator="sampled") / many, draft, target
    )
    torch.testing.assert_close(drawn, gradient(tvdpp, draft, target), atol=0.03, rtol=0)
