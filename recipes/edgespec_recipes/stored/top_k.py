"""A distribution as its k most probable tokens and the mass of all others: made from logits, turned back, and how far off it is.

Pure functions of tensors; knows no files and no models.

The remainder is spread evenly over the other tokens. In proportion to q, every f-divergence would be that with one bucket for the
rest: blind where q is most wrong, on tokens it likes and the target has not among its k. Measured, the even spread's gradients
are several times closer to the live ones at every k (benchmarks/training/stored_targets.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec_recipes.losses.output_loss import RowNumbers, TargetRows

LEAST = -80.0  # log of the least remainder: exp(−80) is still a normal float32
CHUNK = 1024  # positions whose float32 logits are alive at once


def record_type(top_k: int, vocab_size: int) -> np.dtype[np.void]:
    """One position on disk: 4 bytes for a token (6 where the vocabulary exceeds 65,536) and 2 for the remainder."""
    ids = np.uint16 if vocab_size <= 2**16 else np.uint32
    return np.dtype([("ids", ids, (top_k,)), ("log_p", np.float16, (top_k,)), ("log_rest", np.float16)])


def compress(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] -> ids [n, k] (int64) of the most probable tokens, their log p [n, k] and the log of the others' mass [n].

    float32. The remainder is summed by itself: one minus the stored mass would keep nothing of it where it is small.
    """
    wide = logits.float()
    normaliser = wide.logsumexp(-1, keepdim=True)
    values, ids = wide.topk(top_k, dim=-1)
    others = wide.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return ids, values - normaliser, (others - normaliser)[:, 0].clamp_min(LEAST)


def records_of(logits: Tensor, top_k: int) -> np.ndarray:
    """Records [n] of `record_type` from logits [n, V]."""
    records = np.empty(len(logits), record_type(top_k, logits.shape[-1]))
    for at in range(0, len(logits), CHUNK):
        part = records[at : at + CHUNK]
        kept = compress(logits[at : at + CHUNK], top_k)
        for name, values in zip(part.dtype.names or (), kept, strict=True):
            part[name] = values.cpu().numpy()
    return records


def check_top_k(top_k: int, vocab_size: int) -> None:
    """Raise InputError where a vocabulary has not so many tokens."""
    if top_k > vocab_size:
        raise InputError(
            f"stored_top_k is {top_k}; the target's vocabulary has {vocab_size} tokens: give at most that"
        )


def expand(columns: Tensor, log_p: Tensor, log_rest: Tensor, width: int, vocab_size: int) -> Tensor:
    """Log-probabilities [m, width]: `log_p` [m, k] at `columns` [m, k], and evenly spread what is left, log_rest [m].

    `width` is below `vocab_size` where the draft knows a part of the vocabulary; the column `width` then stands for a stored
    token that it does not know, and the rows sum to less than one.
    """
    each = log_rest - math.log(max(1, vocab_size - columns.shape[-1]))
    spread = each[:, None].repeat(1, width + (width < vocab_size))
    return spread.scatter_(-1, columns, log_p)[:, :width]


def target_rows_of(
    records: np.ndarray, vocab_size: int, device: torch.device, ids: Tensor | None = None
) -> TargetRows:
    """Target rows from records of `record_type`, one a position.

    `ids` [C] int64 (each once): the target's ids that the draft's columns stand for, where it knows a part of the vocabulary. The
    result then has these columns, else all of the vocabulary; what the target gives other stored tokens is left out, and a
    divergence takes what is left as the whole.
    """
    columns = torch.from_numpy(records["ids"].astype(np.int64)).to(device)
    log_p = torch.from_numpy(np.ascontiguousarray(records["log_p"])).to(device)
    log_rest = torch.from_numpy(np.ascontiguousarray(records["log_rest"])).to(device)
    if ids is not None:
        column_of = torch.full((vocab_size,), len(ids), device=device)
        column_of[ids.to(device)] = torch.arange(len(ids), device=device)
        columns = column_of[columns]

    def target_rows(part: RowNumbers) -> Tensor:
        width = vocab_size if ids is None else len(ids)
        return expand(columns[part], log_p[part].float(), log_rest[part].float(), width, vocab_size)

    return target_rows


class Store:
    """A target that need not run: its distributions at the compared positions of packed rows, by the rows' numbers."""

    vocab_size: int

    def records(self, row: int) -> np.ndarray:
        """Records of `record_type` at the compared positions of one row."""
        raise NotImplementedError

    def rows(self, row_ids: Sequence[int], device: torch.device, ids: Tensor | None = None) -> TargetRows:
        """Target rows over the compared positions of these rows, one row after the other; `ids`: see target_rows_of."""
        records = np.concatenate([self.records(row) for row in row_ids])
        return target_rows_of(records, self.vocab_size, device, ids)


def divergence_errors(
    functions: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
    draft_logits: Tensor,
    live_logits: Tensor,
    stored_logits: Tensor,
) -> dict[str, dict[str, float]]:
    """What a mean divergence loses when the target comes from a store, all logits [n, V].

    For every function its value with either target (`live`, `stored`), the `relative_error` of the second, and of the gradients
    in the draft's logits the cosine (`gradient_cosine`) and the ratio of the norms, stored to live (`gradient_ratio`).
    """
    errors = {}
    # torch would keep the random states of all GPUs, and warn of it
    own = [draft_logits.device] if draft_logits.is_cuda else []
    for name, function in functions.items():
        values, gradients = [], []
        for target in (live_logits, stored_logits):
            leaf = draft_logits.detach().float().requires_grad_()
            with torch.random.fork_rng(own):
                torch.manual_seed(0)  # a loss that draws tokens draws alike from both
                value = function(leaf, target).mean()
            gradients.append(torch.autograd.grad(value, leaf)[0].flatten().double())
            values.append(float(value.detach()))
        norms = [float(gradient.norm()) for gradient in gradients]
        errors[name] = {
            "live": values[0],
            "stored": values[1],
            "relative_error": abs(values[1] - values[0]) / max(1e-30, abs(values[0])),
            "gradient_cosine": float(gradients[0] @ gradients[1]) / max(1e-30, norms[0] * norms[1]),
            "gradient_ratio": norms[1] / max(1e-30, norms[0]),
        }
    return errors
