"""Divergences between target p and draft q, per token: what distillation minimises. Pure functions of two logit tensors.

Every divergence takes (draft_logits [.., V], target_logits [.., V]) of any floating dtype, computes in float32 (float64 stays
float64) at temperature 1, and returns an unreduced loss [..]; the gradient reaches the draft logits only. A target logit of -inf
is a token of probability 0 (a restricted vocabulary, a target at temperature 0), and 0 · log 0 = 0; the draft's are finite. Knows
no masks, no means and no large vocabularies: those are head_loss.py's.

Notation: p = target, q = draft (the direct-alignment paper prints it the other way round).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgespec.recipe import DistillOptions
from edgespec_recipes.decoding import draw

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
    section 3 calls it supervised KD). It bounds TVD by Pinsker's inequality and has a gradient wherever p ≠ q.
    """
    log_p = _log_p(target_logits)
    return (log_p.exp() * (log_p - torch.log_softmax(_wide(draft_logits), -1))).sum(-1)


def rkl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Reverse KL: Σ q (log q − log p).

    Seeks a mode: the draft pays for mass where the target has little (MiniLLM, Gu et al. 2023; DistillSpec section 3). Infinite
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


def tvdpp(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    estimator: str = "exact",
    scope: str = "batch",
    reward_mean: Tensor | None = None,
) -> Tensor:
    """TVD++: TVD's policy gradient with normalised rewards (direct alignment, Eq. 1).

    Lemma 1 writes ∇TVD = E_{x~q}[∇log q(x) · (−r(x))] with the reward r(x) = 1[p(x) > q(x)]. TVD++ puts the advantage
    A = (r − μ)/σ in the place of r (the printed equation is for ascent; this is a loss to descend). μ and σ are the mean and the
    standard deviation of r over the vocabulary and, with scope `batch`, over all given positions, with `position`, over each
    position alone. `reward_mean` (scalar) is a μ from outside, where the given positions are a part of the batch. The loss value
    has no meaning of its own, its gradient has. Where every reward is equal, A = 0.

    Estimators of the expectation:
      exact    −Σ_v q(v) A(v). A constant baseline has no expectation under q, so with scope `batch` the gradient is
               exactly TVD's divided by σ; with `position` each position is divided by its own σ.
      sampled  −A(x) log q(x) with one x ~ q per position (REINFORCE; unbiased for `exact`). Uses torch's global generator.
      uniform  −mean_v A(v) log q(v): every token of the vocabulary counts alike, as one public trainer does it. Not TVD's
               direction (a cosine of about 0.2).
    """
    logits = _wide(draft_logits)
    rewards = reward(logits, target_logits)
    if reward_mean is None:
        reward_mean = rewards.mean(None if scope == "batch" else -1, keepdim=True)
    mean = reward_mean.to(rewards.dtype)
    deviation = (mean * (1.0 - mean)).sqrt()  # of rewards that are 0 or 1
    advantage = rewards.sub_(mean).mul_(torch.where(deviation > 0, deviation.reciprocal(), 0.0))
    if estimator == "exact":
        return -(torch.softmax(logits, -1) * advantage).sum(-1)
    log_q = torch.log_softmax(logits, -1)
    if estimator == "uniform":
        return -(log_q * advantage).mean(-1)
    chosen = draw(log_q.detach().exp(), _generator(log_q.device))[..., None]
    return -(log_q.gather(-1, chosen) * advantage.gather(-1, chosen))[..., 0]


def _generator(device: torch.device) -> torch.Generator:
    """torch's global generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


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
    """A per-token loss with its knobs bound."""

    per_token: Callable[..., Tensor]
    needs_reward_mean: bool = (
        False  # a position's loss depends on the whole batch, through TVD++'s μ: `reward_mean`
    )

    def __call__(self, draft_logits: Tensor, target: Tensor) -> Tensor:
        """Loss [..] of draft logits [.., V] against target logits [.., V], or against token ids [..] with hard labels."""
        return self.per_token(draft_logits, target)


def divergence(options: DistillOptions) -> Divergence:
    """What a recipe names: with hard labels the written tokens' likelihood, else its divergence."""
    if options.labels == "hard":
        return Divergence(nll)
    if options.divergence == "jsd":
        return Divergence(partial(jsd, beta=options.jsd_beta))
    if options.divergence == "tvd++":
        estimator, scope = options.tvdpp_estimator, options.tvdpp_scope
        return Divergence(partial(tvdpp, estimator=estimator, scope=scope), scope == "batch")
    return Divergence(LOSSES[options.divergence])
