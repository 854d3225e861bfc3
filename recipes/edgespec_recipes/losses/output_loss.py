"""A divergence from hidden states, a chunk of positions at a time: no tensor [n, V] of logits ever lives.

Plain distillation keeps up to ten tensors of positions x vocabulary, beside which a small drafter is nothing. Here the logits,
the loss and its gradient of one chunk live at a time. What stays is the gradient of the hidden states and that of the output
layer, summed chunk by chunk while the forward pass runs, so nothing is computed twice. Value and gradient are the plain form's.

Knows an output layer (weight [V, H], perhaps bias [V]) and per-token losses; no formulas (losses.py), no data, no other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from edgespec.core.errors import InputError
from edgespec_recipes.models.packing import fitted

CHUNK = 2**21  # logits at a time: at V = 32,000 the 64 rows that the products want
ACCELERATOR_CHUNK = 2**26  # smaller ones are computed before the next can be asked for; 256 MiB in float32

RowNumbers = slice | Tensor
"""Row numbers: a slice, or where rows are left out an int64 tensor, ascending. Either indexes a tensor's first dimension."""

TargetRows = Callable[[RowNumbers], Tensor]
"""Rows -> the target's logits [m, V] there, or token ids [m] for hard labels."""

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
            "on hidden states cannot follow; give a drafter of another family, or leave the target untuned: --tune.steps 0"
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


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [m, K] · weightᵀ [K, N] + bias [N].

    For every new m oneDNN compiles a bf16 product on a CPU and keeps up to a thousand of them, megabytes each, while every batch
    has another number of positions. So rows of zeros fill it up to the next of 1, 2, 4, ..., 64, 128, 192, ... rows. Products in
    float32 are not compiled.
    """
    rows = len(inputs)
    if inputs.device.type == "cpu" and inputs.dtype not in (torch.float32, torch.float64):
        size = -(-rows // 64) * 64 if rows > 64 else 1 << max(0, rows - 1).bit_length()
        inputs = pad(inputs, (0, 0, 0, size - rows))
    return linear(inputs, weight, bias)[:rows]


def output_rows(hidden: Tensor, head: Any) -> TargetRows:
    """The logits, as they are asked for, of hidden states [n, H] and their output layer, without gradient."""
    weight, bias = output_weights(head)
    hidden = hidden.detach()
    return lambda rows: _product(hidden[rows].to(weight.dtype), weight, bias)


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
    per_token: Callable[..., Tensor],
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
    has what else `per_token` takes by name, one number [n] for each row (whole_batch.py).
    """
    leaves: tuple[Any, ...] = (hidden, head.weight, getattr(head, "bias", None))
    learnt = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves]
    wide = _loss_dtype(hidden)
    of_hidden = torch.zeros_like(hidden) if learnt[0] else None
    of_weight = torch.zeros_like(head.weight, dtype=wide) if learnt[1] else None
    of_bias = torch.zeros_like(head.bias, dtype=wide) if learnt[2] else None
    weight, bias = output_weights(head)
    value = torch.zeros((), dtype=wide, device=hidden.device)
    with torch.no_grad():
        for rows in _chunks(hidden, len(weight), chunk, weights):
            inputs = hidden[rows].to(weight.dtype)
            logits = _product(inputs, weight, bias)
            target = target_rows(rows)
            with torch.set_grad_enabled(any(learnt)):
                own = {name: values[rows] for name, values in (given or {}).items()}
                losses = per_token(logits.requires_grad_(any(learnt)), target, **own)
                loss = (losses if weights is None else losses * weights[rows]).sum()
            value += loss.detach()
            if not any(learnt):
                continue
            (gradient,) = torch.autograd.grad(loss, logits)
            if of_hidden is not None:
                of_hidden[rows] = _product(gradient, weight.t()).to(hidden.dtype)
            if of_weight is not None:
                _add_product(of_weight, gradient, inputs)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=wide)
    gradients = zip((of_hidden, of_weight, of_bias), leaves, strict=True)
    known = [None if gradient is None else gradient.to(leaf.dtype) for gradient, leaf in gradients]
    found: Tensor = _Known.apply((value, known), *leaves)  # type: ignore[no-untyped-call]
    return found


def output_values(
    functions: Sequence[PerToken],
    hidden: Tensor,
    head: Any,
    target_rows: TargetRows,
    chunk: int | None = None,
) -> Tensor:
    """[len(functions), n]: per-token losses of all rows of `hidden` [n, H] in one pass, without gradient (token selection, α)."""
    logits_of = output_rows(hidden, head)
    values = hidden.new_empty(len(functions), len(hidden), dtype=_loss_dtype(hidden))
    with torch.no_grad():
        for rows in _chunks(hidden, len(head.weight), chunk):
            logits, target = logits_of(rows), target_rows(rows)
            for value, function in zip(values, functions, strict=True):
                value[rows] = function(logits, target)
    return values


def _loss_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _Known(torch.autograd.Function):
    """A value whose gradients are known already.

    Takes the parameters themselves, so that autograd, tied embeddings and the hooks of DDP and FSDP see them as ever.
    """

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Sequence[Tensor | None]], *leaves: Tensor | None) -> Tensor:
        value, gradients = known
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if scale != 1:  # otherwise the stored gradients themselves become the leaves': no second [V, H]
            saved = [None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in saved]
        return (None, *saved)


def _add_product(sums: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """sums [V, H] += gradientᵀ [V, m] · inputs [m, H], summed in the dtype of `sums`.

    On a CPU a product in float32 costs less than another [V, H] of bf16 for every chunk; on an accelerator more.
    """
    if sums.dtype == gradient.dtype or sums.device.type == "cpu":
        sums.addmm_(gradient.to(sums.dtype).t(), inputs.to(sums.dtype))
    else:
        sums.add_(gradient.t() @ inputs)
