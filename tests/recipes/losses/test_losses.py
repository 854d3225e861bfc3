"""Divergences: exact limits, identities between them, gradients, targets without mass on some tokens."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from edgespec_recipes.losses.losses import (
    LOSSES,
    divergence,
    fkl,
    jsd,
    lk,
    nll,
    reward,
    rewarded,
    rkl,
    tvd,
    tvdpp,
)
from loss_cases import CHOICES, EVERY, NAMES, SCOPES, logits
from torch import Tensor

from edgespec.recipe.schema import DIVERGENCES, DistillOptions

PROPER = [options for options in EVERY if options.divergence != "tvd++"]  # whose value is a distance


def pair(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return logits(*shape, dtype=dtype), logits(*shape, seed=1, dtype=dtype)


def gradient(function, draft: Tensor, target: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    draft = draft.clone().requires_grad_()
    function(draft, target).sum().backward()
    assert draft.grad is not None
    return draft.grad


def test_the_recipe_names_what_there_is() -> None:
    assert tuple(LOSSES) == DIVERGENCES
    draft, target = pair(3, 7)
    skewed = divergence(DistillOptions(divergence="jsd", jsd_beta=0.2)).per_token(draft, target)
    torch.testing.assert_close(skewed, jsd(draft, target, beta=0.2))
    assert not torch.allclose(skewed, jsd(draft, target))
    for name, options in zip(NAMES, EVERY, strict=True):
        of_others, drawn = name.endswith(("-batch", "-sequence")), "-sampled-" in name
        assert divergence(options).sampled == drawn
        assert (divergence(options).scope != "token") == of_others


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_unreduced_float32_and_no_gradient_to_the_target(options: DistillOptions) -> None:
    draft = logits(3, 5, 17).bfloat16().requires_grad_()
    target = logits(3, 5, 17, seed=1).bfloat16().requires_grad_()
    loss = divergence(options).per_token(draft, target)
    assert loss.shape == (3, 5)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert target.grad is None
    assert draft.grad is not None
    assert draft.grad.abs().sum() > 0


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_equal_inputs_give_zero_loss_and_gradient(options: DistillOptions) -> None:
    same = logits(4, 9)
    torch.testing.assert_close(divergence(options).per_token(same, same), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        gradient(divergence(options).per_token, same, same), torch.zeros(4, 9), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("options", PROPER, ids=lambda options: options.divergence)
def test_never_negative(options: DistillOptions) -> None:
    draft, target = pair(200, 31, dtype=torch.float32)
    near = target + 1e-3 * draft
    assert (divergence(options).per_token(draft, target) > 0).all()
    assert (divergence(options).per_token(near, target) > -1e-6).all()


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_gradient_by_finite_differences(options: DistillOptions) -> None:
    """In float64, away from the places where p = q; the sampled token stays the same over so small a step."""
    draft, target = pair(2, 6)
    assert (torch.softmax(draft, -1) - torch.softmax(target, -1)).abs().min() > 1e-4

    def value(given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return divergence(options).per_token(given, target)

    assert torch.autograd.gradcheck(value, draft.requires_grad_())


@pytest.mark.parametrize("options", EVERY, ids=NAMES)
def test_tokens_the_target_never_says(options: DistillOptions) -> None:
    """p = 0 on a part of the vocabulary, and on all of it but one token: finite, and 0 · log 0 = 0."""
    draft, target = logits(4, 9), logits(4, 9, seed=1)
    target[:2, 5:] = -math.inf
    target[2:] = -math.inf
    target[2:, 3] = 0.0
    assert divergence(options).per_token(draft, target).isfinite().all()
    assert gradient(divergence(options).per_token, draft, target).isfinite().all()


def test_one_hot_targets_by_hand() -> None:
    draft = logits(5, 9, dtype=torch.float64)
    said = torch.tensor([3, 0, 8, 2, 2])
    target = torch.full((5, 9), -math.inf, dtype=torch.float64).scatter(1, said[:, None], 0.0)
    q = torch.softmax(draft, -1).gather(1, said[:, None])[:, 0]
    torch.testing.assert_close(nll(draft, said), -q.log())
    for function in (fkl, lk):
        torch.testing.assert_close(function(draft, target), -q.log())
    torch.testing.assert_close(tvd(draft, target), 1 - q)
    mixed = 0.5 * (1 + q)
    by_hand = -0.5 * mixed.log() + 0.5 * (q * (q / mixed).log() + (1 - q) * math.log(2))
    torch.testing.assert_close(jsd(draft, target), by_hand)


def test_labels_are_cross_entropy() -> None:
    draft, labels = logits(2, 5, 9), torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))
    loss = divergence(DistillOptions(labels="hard", divergence="fkl")).per_token
    wanted = torch.nn.functional.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss(draft, labels).flatten(), wanted)


def test_fkl_is_the_kl_divergence_and_its_gradient_is_q_minus_p() -> None:
    draft, target = pair(3, 7)
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    torch.testing.assert_close(fkl(draft, target), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(gradient(fkl, draft, target), q - p)
    entropy = -(p * p.log()).sum(-1)
    cross = torch.nn.functional.cross_entropy(draft, p, reduction="none")
    torch.testing.assert_close(fkl(draft, target), cross - entropy)


def test_rkl_is_fkl_the_other_way_round() -> None:
    draft, target = pair(3, 7)
    torch.testing.assert_close(rkl(draft, target), fkl(target, draft))
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    gap = (q / p).log()
    torch.testing.assert_close(gradient(rkl, draft, target), q * (gap - rkl(draft, target)[:, None]))


def test_jsd_limits_symmetry_and_bound() -> None:
    draft, target = pair(6, 7)
    p, q = torch.softmax(target, -1), torch.softmax(draft, -1)
    m = 0.3 * p + 0.7 * q
    by_hand = 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(jsd(draft, target, beta=0.3), by_hand)
    small = 1e-6
    for beta, limit, scale in ((small, fkl, small), (1 - small, rkl, small)):
        near = partial(jsd, beta=beta)
        torch.testing.assert_close(near(draft, target) / scale, limit(draft, target), rtol=1e-3, atol=0)
        torch.testing.assert_close(
            gradient(near, draft, target) / scale, gradient(limit, draft, target), rtol=1e-3, atol=1e-4
        )
    torch.testing.assert_close(jsd(draft, target), jsd(target, draft))
    apart = torch.tensor([[40.0, -40.0]])
    torch.testing.assert_close(jsd(apart, -apart), torch.tensor([math.log(2)]))


def test_tvd_is_one_minus_the_overlap_and_bounded() -> None:
    draft, target = pair(50, 13, dtype=torch.float32)
    overlap = torch.minimum(torch.softmax(target, -1), torch.softmax(draft, -1)).sum(-1)
    torch.testing.assert_close(tvd(draft, target), 1 - overlap)
    apart = torch.tensor([[40.0, -40.0]])
    torch.testing.assert_close(tvd(apart, -apart), torch.ones(1))
    torch.testing.assert_close(tvd(draft, target), tvd(target, draft))


def test_lk_is_the_logarithm_of_the_acceptance_rate() -> None:
    draft, target = pair(50, 13)
    accepted = 1 - tvd(draft, target)
    torch.testing.assert_close(lk(draft, target), -accepted.log())
    torch.testing.assert_close(gradient(lk, draft, target), gradient(tvd, draft, target) / accepted[:, None])
    apart = torch.tensor([[15.0, -15.0]])  # 1 − TVD is 0 in float32
    torch.testing.assert_close(lk(apart, -apart), torch.tensor([30.0 - math.log(2)]))


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
    draft, target = pair(3, 6)
    rewards = (torch.softmax(target, -1) > torch.softmax(draft, -1)).double()
    torch.testing.assert_close(reward(draft, target), rewards)
    torch.testing.assert_close(gradient(tvd, draft, target), enumerated(draft, target, -rewards))


OVER = {"batch": (0, 1, 2), "sequence": (1, 2), "token": (2,)}


def advantage(draft: Tensor, target: Tensor, scope: str) -> Tensor:
    """Of sequences [S, T, V]."""
    over = OVER[scope]
    rewards = (torch.softmax(target, -1) > torch.softmax(draft, -1)).double()
    mean = rewards.mean(over, keepdim=True)
    return (rewards - mean) / (rewards - mean).square().mean(over, keepdim=True).sqrt()


@pytest.mark.parametrize("scope", SCOPES)
def test_tvdpp_exact_is_eq_1_by_enumeration(scope: str) -> None:
    draft, target = pair(3, 4, 6)
    weight = -advantage(draft, target, scope)
    wanted = enumerated(draft.flatten(0, 1), target.flatten(0, 1), weight.flatten(0, 1))
    found = gradient(partial(tvdpp, scope=scope), draft, target).flatten(0, 1)
    torch.testing.assert_close(found, wanted)
    others = [gradient(partial(tvdpp, scope=other), draft, target) for other in SCOPES if other != scope]
    assert not any(torch.allclose(found, other.flatten(0, 1)) for other in others)


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def test_tvdpp_exact_batch_is_parallel_to_tvd_and_the_others_are_not() -> None:
    draft, target = pair(64, 200)
    reference = gradient(tvd, draft, target)
    exact = gradient(tvdpp, draft, target)
    assert cosine(exact, reference) == pytest.approx(1.0, abs=1e-12)
    mean = reward(draft, target).mean()
    torch.testing.assert_close(exact * (mean * (1 - mean)).sqrt(), reference)
    by_token = gradient(partial(tvdpp, scope="token"), draft, target)
    assert 0.9 < cosine(by_token, reference) < 1 - 1e-6
    uniform = gradient(partial(tvdpp, estimator="uniform", scope="token"), draft, target)
    assert 0.0 < cosine(uniform, reference) < 0.6


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("estimator", CHOICES["tvdpp_estimator"])
def test_tvdpp_of_a_part_with_what_the_whole_gives(estimator: str, scope: str) -> None:
    """The mean reward of each position's scope, and its own random number."""
    draft, target = pair(2, 9, 11)
    noise = torch.rand(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = tvdpp(draft, target, estimator=estimator, scope=scope, noise=noise)
    means = reward(draft, target).mean(OVER[scope], keepdim=True)[..., 0].expand(2, 9)
    torch.testing.assert_close(rewarded(draft, target), reward(draft, target).sum(-1))
    parts = [
        tvdpp(
            draft[:, part],
            target[:, part],
            estimator=estimator,
            scope=scope,
            reward_mean=means[:, part],
            noise=noise[:, part],
        )
        for part in (slice(4), slice(4, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_tvdpp_sampled_is_unbiased() -> None:
    """The mean gradient of many draws against the exact one, in standard errors known by enumeration: 10 comparisons at 5 of
    them fail an unbiased estimator in one of 170,000 seeds."""
    draft, target = pair(2, 5)
    many = 20_000
    torch.manual_seed(0)
    drawn = gradient(
        lambda d, t: tvdpp(d.repeat(many, 1), t.repeat(many, 1), estimator="sampled") / many, draft, target
    )
    exact = gradient(tvdpp, draft, target)
    q, weights = torch.softmax(draft, -1), advantage(draft[None], target[None], "batch")[0]
    scores = torch.eye(5, dtype=torch.float64) - q[:, None, :]  # [row, token x, component]: ∇ log q(x)
    second = (q[..., None] * (weights[..., None] * scores).square()).sum(1)
    errors = ((second - exact.square()) / many).sqrt()
    assert (drawn - exact).abs().max() > 0
    assert ((drawn - exact).abs() < 5 * errors).all()
    assert errors.max() < 0.02  # small enough to see a sign or a baseline that is wrong
