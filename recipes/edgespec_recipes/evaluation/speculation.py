"""Lossless speculative decoding of a batch of prompts in torch: what the evaluation counts. Knows no files and no metrics.

The reference for counting, not for speed: the runtime has the fast loop. Rejection sampling is exact for every row on its own
(Leviathan et al. 2023, Algorithm 1), at temperature 0 too, where p and q are one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgespec.core.metrics import RawCounts
from edgespec_recipes.losses.distributions import draw, warp
from edgespec_recipes.models.batch_decoder import BatchDecoder, left_pad


def accept(
    p: Tensor, q: Tensor, drafted: Tensor, limits: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of one block in every row.

    Args:
        p: [B, γ + 1, V] target probabilities, row i before draft token i. q: [B, γ, V] draft probabilities.
        drafted: [B, γ] tokens, each drawn from its q. limits: [B] how many of them are in play.

    Returns:
        (accepted [B]: length of the kept beginning, token [B]: drawn from norm(max(0, p − q)) after a rejection and from p
        after `limits` acceptances).
    """
    places = torch.arange(drafted.shape[1], device=drafted.device)
    chance_p = p[:, :-1].gather(-1, drafted[..., None])[..., 0].double()
    chance_q = q.gather(-1, drafted[..., None])[..., 0].double()
    uniform = torch.rand(drafted.shape, dtype=torch.float64, device=p.device, generator=generator)
    passed = (uniform * chance_q < chance_p) & (places < limits[:, None])
    accepted = passed.long().cumprod(1).sum(1)
    rows = torch.arange(len(p), device=p.device)
    final = p[rows, accepted]
    refused = accepted < limits
    rest = (final - q[rows, accepted.clamp_max(q.shape[1] - 1)]).clamp_min(0)
    usable = refused & (rest.sum(-1) > 0)  # p = q up to rounding leaves nothing: then p itself
    return accepted, draw(torch.where(usable[:, None], rest, final), generator)


def speculate(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    stops: Sequence[int],
    generator: torch.Generator,
) -> tuple[list[list[int]], list[RawCounts]]:
    """(response, raw counts) of every prompt (of two tokens or more). Responses are distributed as the target's own.

    A row drafts min(γ, tokens left − 1) tokens and stops drafting after a stop token, so a draft token that could never be
    emitted is not counted as drafted. Seconds stay 0: rows share their passes.
    """
    device = target.device
    models = target_side, draft_side = BatchDecoder(target), BatchDecoder(draft)
    for model in models:
        model.forward(*left_pad([prompt[:-1] for prompt in prompts]), keep=1)
    responses: list[list[int]] = [[] for _ in prompts]
    counts = [RawCounts() for _ in prompts]
    ends = torch.tensor(list(stops), dtype=torch.long, device=device)
    rows = torch.arange(len(prompts), device=device)  # which prompt each row of the batch answers
    last = torch.tensor([prompt[-1] for prompt in prompts], device=device)  # emitted, in no cache yet
    room = torch.full_like(rows, max_new_tokens)
    # the token before `last`: after a fully accepted block the draft has not read it yet, so it always reads both
    before = torch.tensor([prompt[-2] for prompt in prompts], device=device)
    draft_side.take_back(torch.ones_like(rows))
    active = torch.ones_like(rows, dtype=torch.bool)
    while active.any():
        if active.sum() * 2 <= len(active):
            left = active.nonzero()[:, 0]
            for model in models:
                model.select(left)
            rows, before, last, room, active = (x[left] for x in (rows, before, last, room, active))
        alive = active[:, None]
        tokens = torch.stack([before, last], 1)
        drafted, q = [], []
        for _ in range(draft_length):
            valid = alive.expand_as(tokens)
            q.append(warp(draft_side.forward(tokens, valid, keep=1)[:, -1], temperature, top_p))
            drafted.append(draw(q[-1], generator))
            tokens = drafted[-1][:, None]
        block = torch.stack(drafted, 1)  # [B, γ]
        read = torch.cat([last[:, None], block], 1)
        p = warp(target_side.forward(read, alive.expand_as(read)), temperature, top_p)

        stopping = torch.isin(block, ends)
        until_stop = torch.where(stopping.any(1), stopping.int().argmax(1) + 1, draft_length)
        limits = torch.minimum(until_stop, room - 1)
        accepted, added = accept(p, torch.stack(q, 1), block, limits, generator)
        # a stop token among the accepted is the last of them: nothing follows it
        stopped = (accepted > 0) & stopping.gather(1, (accepted - 1).clamp_min(0)[:, None])[:, 0]
        emitted = accepted + (~stopped).long()

        for model in models:  # the draft read one token less of the block, and reads `before` again
            model.take_back((draft_length - accepted) * active)
        before = read.gather(1, accepted[:, None])[:, 0]
        _record(responses, counts, rows, active, block, added, limits, accepted, stopped)
        room = room - emitted
        last = added
        active = active & ~stopped & ~torch.isin(added, ends) & (room > 0)
    return responses, counts


def _record(
    responses: list[list[int]],
    counts: list[RawCounts],
    rows: Tensor,
    active: Tensor,
    block: Tensor,
    *columns: Tensor,
) -> None:
    """Append one block of every active row to its prompt's response and counts; columns: added, limits, accepted, stopped."""
    lists = [column.tolist() for column in (rows, active, block, *columns)]
    for row, alive, tokens, added, limit, accepted, stopped in zip(*lists, strict=True):
        if alive:
            new = tokens[:accepted] + ([] if stopped else [added])
            responses[row] += new
            counts[row].add_block(limit, accepted, len(new))
