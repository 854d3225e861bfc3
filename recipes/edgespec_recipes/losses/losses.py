"""Divergences between target p and draft q, per token: what distillation minimises. Pure functions of two logit tensors.

Every divergence takes (draft_logits [.., V], target_logits [.., V]) of any floating dtype, computes in float32 (float64 stays
float64) at temperature 1, and returns an unreduced loss [..]; the gradient reaches the draft logits only. A target logit of -inf
is a token of probability 0 (a restricted vocabulary, a target at temperature 0), and 0 · log 0 = 0; the draft's are finite. Knows
no masks and no means (whole_batch.py), and no large vocabularies (output_loss.py).

Notation: p = target, q = draft (the direct-alignment paper prints it the other way round).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgespec.recipe.schema import DistillOptions
from edgespec_recipes.losses.distributions import token_at

SMALLEST = torch.finfo(torch.float32).tiny  # 1.2e-38
LOG_SMALLEST = -87.336544  # its logarithm


def _wide(logits: Tensor) -> Tensor:
    """float32, or float64 where it is given (gradient checks)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _p(target_logits: Tensor) -> Tensor:
    return torch.softmax(_wide(target_logits.detach()), -1)


def _log_p(target_logits: Tensor) -> Tensor:
    """log p, held at that of the smallest normal float32: finite, and its exponential as good as 0."""
    return torch.log_softmax(_wide(target_logits.detach()), -1).clamp_min_(LOG_SMALLEST)


def fkl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Forward KL: Σ p (log p − log q).

    Covers every mode of the target; its gradient with respect to the draft logits is q − p (Hinton et al. 2015; DistillSpec
    section 4 calls it supervised KD). It bounds TVD by Pinsker's inequality and has a gradient wherever p ≠ q.
    """
    log_p = _log_p(target_logits)
    return (log_p.exp() * (log_p - torch.log_softmax(_wide(draft_logits), -1))).sum(-1)


def rkl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Reverse KL: Σ q (log q − log p).

    Seeks a mode: the draft pays for mass where the target has little (MiniLLM, Gu et al. 2023; DistillSpec A.1). Infinite
    where p = 0 < q by the letter; here a token of no p costs 87 nats. ∇ = Σ ∇q (log q − log p), for Σ q ∇log q = Σ ∇q = 0.
    """
    logits = _wide(draft_logits)
    gap = torch.log_softmax(logits.detach(), -1) - _log_p(target_logits)
    return (torch.softmax(logits, -1) * gap).sum(-1)


def jsd(draft_logits: Tensor, target_logits: Tensor, *, beta: float = 0.5) -> Tensor:
    """Jensen-Shannon divergence: β KL(p‖m) + (1 − β) KL(q‖m), m = βp + (1 − β)q (GKD, Agarwal et al. 2023, section 2).

    Bounded by the entropy of β (log 2 at ½). JSD/β → FKL as β → 0, JSD/(1 − β) → RKL as β → 1; symmetric at ½.
    ∇ = (1 − β) Σ ∇q (log q − log m), for what the logarithms give is Σ ∇m = 0.
    """
    logits, log_p = _wide(draft_logits), _log_p(target_logits)
    q, p = torch.softmax(logits, -1), log_p.exp()
    log_m = (beta * p + (1.0 - beta) * q.detach()).clamp_min_(SMALLEST).log_()
    gap = torch.log_softmax(logits.detach(), -1) - log_m
    return beta * (p * (log_p - log_m)).sum(-1) + (1.0 - beta) * (q * gap).sum(-1)


def tvd(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Total variation distance: ½ Σ |p − q| = 1 − Σ min(p, q).

    One minus the acceptance rate of lossless speculative decoding (Leviathan et al. 2023, Corollary 3.6), so the metric itself.
    """
    return 0.5 * (_p(target_logits) - torch.softmax(_wide(draft_logits), -1)).abs().sum(-1)


def lk(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """−log of the acceptance rate: −log Σ min(p, q) = −log(1 − TVD).

    TVD's direction, each position's length divided by its overlap, so that positions where the draft is far off count most; TVD
    gives those next to nothing. Summed over min(p, q) itself, because 1 − TVD has no digits left there.
    """
    p, q = _p(target_logits), torch.softmax(_wide(draft_logits), -1)
    short = (p > q.detach()).to(p.dtype)
    overlap = (q * short).sum(-1) + (p - p * short).sum(-1)
    return -overlap.clamp_min(SMALLEST).log()


def nll(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """−log q of the written token, `labels` [..] (int64): FKL to a one-hot target (SeqKD, Kim and Rush 2016)."""
    return -torch.log_softmax(_wide(draft_logits), -1).gather(-1, labels[..., None])[..., 0]


def reward(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """TVD++'s reward r(x) = 1[p(x) > q(x)] as numbers [.., V], without gradient."""
    return _p(target_logits).gt_(torch.softmax(_wide(draft_logits.detach()), -1))


def rewarded(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """How many tokens have TVD++'s reward at each position [..], without gradient."""
    return reward(draft_logits, target_logits).sum(-1)


_OVER: dict[str, Any] = {"token": -1, "sequence": (-2, -1), "batch": None}


def tvdpp(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    estimator: str = "exact",
    scope: str = "batch",
    reward_mean: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """TVD++: TVD's policy gradient with normalised rewards (direct alignment, Eq. 1).

    Lemma 1 writes ∇TVD = E_{x~q}[∇log q(x) · (−r(x))] with the reward r(x) = 1[p(x) > q(x)]. TVD++ puts the advantage
    A = (r − μ)/σ in the place of r (the printed equation is for ascent; this is a loss to descend). μ and σ are the mean and the
    standard deviation of r over the vocabulary and over the positions of the scope. The loss value has no meaning of its own, its
    gradient has. Where every reward is equal, A = 0.

    Scopes:
      token     each position alone.
      sequence  the positions of one sequence: the last two dimensions [T, V] of what is given.
      batch     all positions: everything that is given.
    `reward_mean` (a scalar, or one number for each position [..]) is a μ from outside, where what is given is only a part.

    Estimators of the expectation:
      exact    −Σ_v q(v) A(v). A constant baseline has no expectation under q, so with scope `batch` the gradient is exactly
               TVD's divided by σ; with the other scopes each sequence's or each token's part is divided by its own σ.
      sampled  −A(x) log q(x) with one x ~ q per position (REINFORCE; unbiased for `exact`). `noise` [..] (float64, uniform from
               0 to below 1) chooses x; without it torch's global generator does.
      uniform  −mean_v A(v) log q(v): every token of the vocabulary counts alike, as one public trainer does it. Not TVD's
               direction (a cosine of about 0.2).
    """
    logits = _wide(draft_logits)
    rewards = reward(logits, target_logits)
    if reward_mean is None:
        reward_mean = rewards.mean(_OVER[scope], keepdim=True)[..., 0]
    mean = reward_mean.to(rewards.dtype)[..., None]
    deviation = (mean * (1.0 - mean)).sqrt()  # of rewards that are 0 or 1
    advantage = rewards.sub_(mean).mul_(torch.where(deviation > 0, deviation.reciprocal(), 0.0))
    if estimator == "exact":
        return -(torch.softmax(logits, -1) * advantage).sum(-1)
    log_q = torch.log_softmax(logits, -1)
    if estimator == "uniform":
        return -(log_q * advantage).mean(-1)
    if noise is None:
        noise = torch.rand(log_q.shape[:-1], dtype=torch.float64, device=log_q.device)
    chosen = token_at(log_q.detach().exp(), noise)[..., None]
    return -(log_q.gather(-1, chosen) * advantage.gather(-1, chosen))[..., 0]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "fkl": fkl,
    "rkl": rkl,
    "jsd": jsd,
    "tvd": tvd,
    "tvd++": tvdpp,
    "lk": lk,
}


@dataclass(frozen=True)
class Divergence:
    """A per-token loss with its knobs bound.

    per_token: loss [..] of draft logits [.., V] against target logits [.., V], or against token ids [..] with hard labels.
    scope: what that depends on: the token alone, or through TVD++'s μ its sequence or the batch. Where it sees only a part of
    these, it has to be given a `reward_mean`.
    sampled: it takes a random number for each position, `noise`.
    """

    per_token: Callable[..., Tensor]
    scope: str = "token"
    sampled: bool = False


def divergence(options: DistillOptions) -> Divergence:
    """What a recipe names: with hard labels the written tokens' likelihood, else its divergence."""
    if options.labels == "hard":
        return Divergence(nll)
    if options.divergence == "jsd":
        return Divergence(partial(jsd, beta=options.jsd_beta))
    if options.divergence == "tvd++":
        estimator, scope = options.tvdpp_estimator, options.tvdpp_scope
        return Divergence(partial(tvdpp, estimator=estimator, scope=scope), scope, estimator == "sampled")
    return Divergence(LOSSES[options.divergence])
