"""Divergences between target p and draft q, per token: what distillation minimises. Pure functions of two logit tensors.

Every divergence takes (draft_logits [.., V], target_logits [.., V]) of any floating dtype, computes in float32 (float64 stays
float64) at temperature 1, and returns an unreduced loss [..]; the gradient reaches the draft logits only. Masks and means live in
`distillation_loss` alone, which drops the masked positions before a divergence sees them, so no batch statistic can include them.

Notation: p = target, q = draft (the direct-alignment paper prints it the other way round).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from edgespec.recipe import DistillOptions

Divergence = Callable[[Tensor, Tensor], Tensor]


def _wide(logits: Tensor) -> Tensor:
    """float32, or float64 where it is given (gradient checks)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def fkl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Forward KL: Σ p (log p − log q).

    Covers every mode of the target; its gradient with respect to the draft logits is q − p (Hinton et al. 2015; DistillSpec
    section 3 calls it supervised KD). It bounds TVD by Pinsker's inequality and has a gradient wherever p ≠ q.
    """
    log_q = torch.log_softmax(_wide(draft_logits), -1)
    log_p = torch.log_softmax(_wide(target_logits).detach(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def tvd(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Total variation distance: ½ Σ |p − q| = 1 − Σ min(p, q).

    One minus the acceptance rate of lossless speculative decoding (Leviathan et al. 2023, Corollary 3.6), so the metric itself.
    """
    q = torch.softmax(_wide(draft_logits), -1)
    p = torch.softmax(_wide(target_logits).detach(), -1)
    return 0.5 * (p - q).abs().sum(-1)


ESTIMATORS = ("exact", "sampled", "uniform")
SCOPES = ("batch", "position")


def tvdpp(
    draft_logits: Tensor, target_logits: Tensor, *, estimator: str = "exact", scope: str = "batch"
) -> Tensor:
    """TVD++: TVD's policy gradient with normalised rewards (direct alignment, Eq. 1).

    Lemma 1 writes ∇TVD = E_{x~q}[∇log q(x) · (−r(x))] with the reward r(x) = 1[p(x) > q(x)]. TVD++ puts the advantage
    A = (r − μ)/σ in the place of r (the printed equation is for ascent; this is a loss to descend). μ and σ are the mean and the
    standard deviation of r over the vocabulary and, with scope `batch`, over all given positions, with `position`, over each
    position alone. The loss value has no meaning of its own, its gradient has. Where every reward is equal, A = 0.

    Estimators of the expectation:
      exact    −Σ_v q(v) A(v). A constant baseline has no expectation under q, so with scope `batch` the gradient is
               exactly TVD's divided by σ; with `position` each position is divided by its own σ.
      sampled  −A(x) log q(x) with one x ~ q per position (REINFORCE; unbiased for `exact`). Uses torch's global generator.
      uniform  −mean_v A(v) log q(v): every token of the vocabulary counts alike, as one public trainer does it. Not TVD's
               direction (a cosine of about 0.2).
    """
    logits = _wide(draft_logits)
    q = torch.softmax(logits, -1)
    advantage = _advantage(torch.softmax(_wide(target_logits).detach(), -1) > q.detach(), scope, q.dtype)
    if estimator == "exact":
        return -(q * advantage).sum(-1)
    log_q = torch.log_softmax(logits, -1)
    if estimator == "uniform":
        return -(log_q * advantage).mean(-1)
    chosen = torch.multinomial(q.detach().flatten(0, -2), 1).reshape(*q.shape[:-1], 1)
    return -(log_q * advantage).gather(-1, chosen)[..., 0]


def _advantage(reward: Tensor, scope: str, dtype: torch.dtype) -> Tensor:
    """(r − μ)/σ of a reward that is 0 or 1; 0 where all rewards in the scope are equal."""
    mean = reward.to(dtype).mean(None if scope == "batch" else -1, keepdim=True)
    deviation = (mean * (1.0 - mean)).sqrt()
    scale = torch.where(deviation > 0, deviation.reciprocal(), 0.0)
    return torch.where(reward, (1.0 - mean) * scale, -mean * scale)


LOSSES: dict[str, Callable[..., Tensor]] = {"fkl": fkl, "tvd": tvd, "tvd++": tvdpp}


def divergence(options: DistillOptions) -> Divergence:
    """The function a recipe names, with its own knobs bound."""
    function = LOSSES[options.divergence]
    if function is tvdpp:
        return partial(tvdpp, estimator=options.tvdpp_estimator, scope=options.tvdpp_scope)
    return function


def distillation_loss(
    function: Divergence, draft_logits: Tensor, target_logits: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Mean of a divergence over the positions where `mask` [..] is true (all without a mask).

    The one place that knows masks and means. With nothing left the loss is 0 and still has a gradient path.
    """
    if mask is not None:
        draft_logits, target_logits = draft_logits[mask], target_logits[mask]
    if not draft_logits.numel():
        return draft_logits.sum()
    return function(draft_logits, target_logits).mean()
