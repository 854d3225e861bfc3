"""A divergence from hidden states, a chunk of positions at a time: no tensor [n, V] of logits ever lives.

Plain distillation keeps up to ten tensors of positions x vocabulary, beside which a small drafter is nothing. Here the logits,
the loss and its gradient of one chunk live at a time. What stays is the gradient of the hidden states and that of the output
layer, summed chunk by chunk while the forward pass runs, so nothing is computed twice. Value and gradient are the plain form's.

Knows an output layer (weight [V, H], perhaps bias [V]) and per-token losses; no formulas (losses.py), no data, no other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from edgespec.core.errors import InputError
from edgespec_recipes.losses.losses import Divergence
from edgespec_recipes.models.packing import fitted

CHUNK = 2**21  # logits at a time: at V = 32,000 the 64 rows that the products want
ACCELERATOR_CHUNK = 2**26  # smaller ones are computed before the next can be asked for; 256 MiB in float32

RowNumbers = slice | Tensor
"""Row numbers: a slice, or where rows are left out an int64 tensor, ascending. Either indexes a tensor's first dimension."""

TargetRows = Callable[[RowNumbers, Tensor], Tensor]
"""(rows, the draft's logits of those rows [m, V]) -> the target's logits [m, V], or token ids [m] for hard labels."""

PerToken = Callable[[Tensor, Tensor], Tensor]


def in_output_layer(
    model: Any, keep: Tensor, inputs: Mapping[str, Any], compute: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """Run the model's forward pass with `compute(hidden [n, H], head)` in the place of its output layer; return what it returned.

    `hidden` are the inputs of the output layer at the n positions where `keep` [B, T] is true, in row order. The loss is thus
    computed inside the forward pass, where DDP watches it and FSDP has gathered the weights of `head`. `model` may be wrapped.
    Raises InputError for a result with gradient from a model that changes its logits after the output layer: the loss would too.
    """
    inner = getattr(model, "module", model)
    head = inner.get_output_embeddings()
    if head is None:
        raise InputError(
            f"{type(inner).__name__} has no output layer to compute a loss in; give a causal language model"
        )
    computed: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        computed.append(compute(hidden[keep], head))
        return computed[0]

    given = fitted(inner, inputs)
    with forward_replaced(head, forward):
        result: Tensor = model(**given, use_cache=False).logits
    if result.requires_grad and result is not computed[0] and not _equal(result, computed[0]):
        raise InputError(
            f"{type(inner).__name__} changes its logits after the output layer (soft-capping or scaling), which training "
            "on hidden states cannot follow; give a drafter of another family"
        )
    return result


@contextmanager
def forward_replaced(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The instance's `forward` shadows the class's; hooks (FSDP's among them) still run around it."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    return one.shape == other.shape and torch.allclose(
        one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True
    )


def output_weights(head: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an output layer, detached, in the dtype autocast multiplies in. Once, not for every chunk."""
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    dtype, device = weight.dtype, weight.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return weight.to(dtype), None if bias is None else bias.detach().to(dtype)


def _sizes(rows: int) -> int:
    """The least of 1, 2, 4, ..., 64, 128, 192, ... that is not below `rows`."""
    return -(-rows // 64) * 64 if rows > 64 else 1 << max(0, rows - 1).bit_length()


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [m, K] · weightᵀ [K, N] + bias [N].

    For every new m oneDNN compiles a bf16 product on a CPU and keeps up to a thousand of them, megabytes each, while every batch
    has another number of positions. So rows of zeros fill it up to one of a few sizes. Products in float32 are not compiled.
    """
    rows = len(inputs)
    if inputs.device.type == "cpu" and inputs.dtype not in (torch.float32, torch.float64):
        inputs = pad(inputs, (0, 0, 0, _sizes(rows) - rows))
    return linear(inputs, weight, bias)[:rows]


def output_rows(hidden: Tensor, head: Any) -> TargetRows:
    """The target's logits, as they are asked for, from its hidden states [n, H] at the same positions and its output layer."""
    weight, bias = output_weights(head)
    hidden = hidden.detach()

    def rows_of(rows: RowNumbers, _: Tensor) -> Tensor:
        return _product(hidden[rows].to(weight.dtype), weight, bias)

    return rows_of


def _chunks(
    hidden: Tensor, vocabulary: int, chunk: int | None, weights: Tensor | None = None
) -> list[RowNumbers]:
    """Rows in pieces of at most `chunk` logits (at least one row); rows of weight 0 are in none."""
    count = len(hidden)
    chunk = chunk or (CHUNK if hidden.device.type == "cpu" else ACCELERATOR_CHUNK)
    size = max(1, chunk // vocabulary)
    size = size if size < 64 else size // 64 * 64
    if weights is not None and not bool(weights.all()):
        return list(torch.split(weights.nonzero()[:, 0], size)) if bool(weights.any()) else []
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def output_loss(
    divergence: Divergence,
    hidden: Tensor,
    head: Any,
    target_rows: TargetRows,
    weights: Tensor | None = None,
    chunk: int | None = None,
    given: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Σ_i w_i D_i over the rows of `hidden` [n, H]: a scalar (float32; float64 for float64 input) whose gradient is at hand.

    `weights` [n] are 1 if not given; rows of weight 0 are skipped, and `target_rows` is not asked for them. Without any row
    the result is 0, with a gradient path. `hidden`, `head.weight` [V, H] and `head.bias` [V] (or None) get gradients. Under
    autocast the products are in its dtype, loss and sums in float32. `chunk` is how many logits live at a time (None: what suits
    the device). A factor belongs in the weights: multiplied to the result, it costs another [V, H] in the backward pass. `given`
    has what `divergence.takes` names, one number [n] for each row (whole_batch.py).
    """
    weight, bias = output_weights(head)
    rows = _chunks(hidden, len(weight), chunk, weights)
    taken = {name: (given or {})[name] for name in divergence.takes}
    job = _Job(divergence.per_token, taken, weight, bias, target_rows, weights, rows, torch.is_grad_enabled())
    loss: Tensor = _HeadLoss.apply(hidden, head.weight, getattr(head, "bias", None), job)  # type: ignore[no-untyped-call]
    return loss


def output_values(
    functions: Sequence[PerToken],
    hidden: Tensor,
    head: Any,
    target_rows: TargetRows,
    chunk: int | None = None,
) -> Tensor:
    """[len(functions), n]: per-token losses of all rows of `hidden` [n, H] in one pass, without gradient (token selection, α)."""
    weight, bias = output_weights(head)
    values = hidden.new_empty(len(functions), len(hidden), dtype=_loss_dtype(hidden))
    with torch.no_grad():
        for rows in _chunks(hidden, len(weight), chunk):
            logits = _product(hidden[rows].to(weight.dtype), weight, bias)
            target = target_rows(rows, logits)
            for value, function in zip(values, functions, strict=True):
                value[rows] = function(logits, target)
    return values


def _loss_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Job:
    """What `_HeadLoss` needs beside the tensors that get gradients. `weight` and `bias` are in the dtype of the products."""

    per_token: Callable[..., Tensor]
    given: Mapping[str, Tensor]
    weight: Tensor
    bias: Tensor | None
    target_rows: TargetRows
    weights: Tensor | None
    chunks: list[RowNumbers]
    learn: bool


class _HeadLoss(torch.autograd.Function):
    """Takes the parameters themselves, so that autograd, tied embeddings and the hooks of DDP and FSDP see them as ever."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        wanted = [job.learn and needed for needed in ctx.needs_input_grad[:3]]
        wide = _loss_dtype(hidden)
        of_hidden = torch.zeros_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        value = torch.zeros((), dtype=wide, device=hidden.device)
        for rows in job.chunks:
            inputs = hidden[rows].to(job.weight.dtype)
            logits = _product(inputs, job.weight, job.bias)
            target = job.target_rows(rows, logits)
            with torch.set_grad_enabled(any(wanted)):
                given = {name: values[rows] for name, values in job.given.items()}
                losses = job.per_token(logits.requires_grad_(any(wanted)), target, **given)
                loss = (losses if job.weights is None else losses * job.weights[rows]).sum()
            value += loss.detach()
            if not any(wanted):
                continue
            (gradient,) = torch.autograd.grad(loss, logits)
            if of_hidden is not None:
                of_hidden[rows] = _product(gradient, job.weight.t()).to(hidden.dtype)
            if of_weight is not None:
                _add_product(of_weight, gradient, inputs)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=wide)
        ctx.save_for_backward(
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if scale != 1:  # otherwise the stored gradients themselves become the leaves': no second [V, H]
            saved = [None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in saved]
        return (*saved, None)


def _add_product(sums: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """sums [V, H] += gradientᵀ [V, m] · inputs [m, H], summed in the dtype of `sums`.

    On a CPU a product in float32 costs less than another [V, H] of bf16 for every chunk; on an accelerator more.
    """
    if sums.dtype == gradient.dtype or sums.device.type == "cpu":
        sums.addmm_(gradient.to(sums.dtype).t(), inputs.to(sums.dtype))
    else:
        sums.add_(gradient.t() @ inputs)
