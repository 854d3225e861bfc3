"""The target's side of a batch, a few rows of logits at a time: from a live model, or from it and a store.

TargetRows(rows, draft_logits) gives what a divergence compares the draft's logits of these positions with. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgespec_recipes.losses.output_loss import RowNumbers, TargetRows, forward_replaced, output_rows
from edgespec_recipes.models.packing import fitted


def _after_head(config: Any) -> Callable[[Tensor], Tensor]:
    """What a family does to its logits behind the output layer (Gemma's soft cap, Cohere's and Granite's scale)."""
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)

    def finish(logits: Tensor) -> Tensor:
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return finish


def hidden_at(model: Any, keep: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """(the inputs [n, H] of the output layer at the n positions of `keep` [B, T], the output layer), without gradient."""
    head = model.get_output_embeddings()
    found: list[Tensor] = []

    def note(hidden: Tensor) -> Tensor:
        found.append(hidden[keep])
        return hidden[:, :1]  # nobody looks at the logits

    given = fitted(model, inputs)
    with torch.no_grad(), forward_replaced(head, note):
        model(**given, use_cache=False)
    return found[0], head


def live_rows(
    target: Any, keep: Tensor, inputs: dict[str, Tensor], *, set_aside: bool = False
) -> Callable[[Tensor | None], TargetRows]:
    """Run the target once over [B, T] inputs; its output layer is applied when rows are asked for.

    The result takes the target's token ids that the drafter knows (None: all) and gives the rows at the n positions of
    `keep`. Until then it holds hidden states [n, H] only; with `set_aside` these wait in the memory of the CPU.
    """
    hidden, head = hidden_at(target, keep, inputs)
    finish, device = _after_head(target.config), hidden.device
    waiting = hidden.cpu() if set_aside else hidden
    del hidden

    def of(columns: Tensor | None) -> TargetRows:
        logits_of = output_rows(waiting.to(device), head)

        @torch.no_grad()
        def rows(part: RowNumbers, draft_logits: Tensor) -> Tensor:
            logits = finish(logits_of(part, draft_logits))
            return logits if columns is None else logits[:, columns]

        return rows

    return of


def join_rows(first: TargetRows, second: TargetRows, is_second: Tensor) -> TargetRows:
    """Positions of two sources in one order: `is_second` [n] says whose each one is."""
    # each one's number in its own source
    place = torch.where(is_second, is_second.cumsum(0), (~is_second).cumsum(0)) - 1

    def rows(part: RowNumbers, draft_logits: Tensor) -> Tensor:
        theirs, at = is_second[part], place[part]
        logits = torch.empty_like(draft_logits, dtype=torch.float32, requires_grad=False)
        for source, mine in ((first, ~theirs), (second, theirs)):
            if mine.any():
                logits[mine] = source(at[mine], draft_logits[mine]).float()
        return logits

    return rows
