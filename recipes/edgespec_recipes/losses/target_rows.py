"""The target's side of a batch, a few rows of logits at a time: from a live model, or from it and a store.

TargetRows(rows) gives what a divergence compares the draft's logits of these positions with. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgespec_recipes.losses.output_loss import RowNumbers, TargetRows, in_output_layer, output_rows


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
    found: list[tuple[Tensor, Any]] = []

    def note(hidden: Tensor, head: Any) -> Tensor:
        found.append((hidden, head))
        return hidden[None, :1]  # nobody looks at the logits

    with torch.no_grad():
        in_output_layer(model, keep, inputs, note)
    return found[0]


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
        def rows(part: RowNumbers) -> Tensor:
            logits = finish(logits_of(part))
            return logits if columns is None else logits[:, columns]

        return rows

    return of


def join_rows(first: TargetRows, second: TargetRows, is_second: Tensor) -> TargetRows:
    """Positions of two sources in one order: `is_second` [n] says whose each one is."""
    # each one's number in its own source
    place = torch.where(is_second, is_second.cumsum(0), (~is_second).cumsum(0)) - 1

    def rows(part: RowNumbers) -> Tensor:
        theirs, at = is_second[part], place[part]
        of_first, of_second = first(at[~theirs]).float(), second(at[theirs]).float()
        logits = of_first.new_empty(len(at), of_first.shape[-1])
        logits[~theirs], logits[theirs] = of_first, of_second
        return logits

    return rows
