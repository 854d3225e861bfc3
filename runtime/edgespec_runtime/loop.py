"""The decoding loop: a generator of blocks. Plain decoding is the same loop with no drafter (γ = 0).

One block: the draft model proposes γ tokens, the target reads them in one pass, the rule keeps a beginning of them and adds one
token of the target's. Caches never hold a rejected token, and are valid however the generator is left.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec.errors import InputError
from edgespec.metrics import RawCounts
from edgespec.options import knob
from edgespec_runtime.acceptance import RULES, verify
from edgespec_runtime.sampling import Categorical, Warp, warp
from edgespec_runtime.session import CachedEngine


@dataclass(frozen=True)
class ReplyOptions(Warp):
    """How a reply is drawn, whatever the draft length."""

    max_new_tokens: int = knob(256, "longest reply in tokens", at_least=1)
    seed: int = knob(0, "seed of the sampling", at_least=0)
    rule: str = knob("lossless", "acceptance rule", choices=tuple(RULES))


@dataclass(frozen=True)
class DecodingOptions(ReplyOptions):
    draft_length: int = knob(3, "draft tokens in a block (γ)", at_least=1)


@dataclass(frozen=True)
class Block:
    """Tokens that left the loop together: the first `accepted` are the drafter's. `finish`: eos, length, context or ''."""

    tokens: tuple[int, ...]
    accepted: int
    finish: str = ""


def decode(
    target: CachedEngine,
    draft: CachedEngine | None,
    prompt: Sequence[int],
    options: DecodingOptions,
    stop: Collection[int],
    counts: RawCounts,
) -> Generator[Block, None, None]:
    """Continue `prompt` and yield blocks until a token of `stop`, the length limit or the end of the context.

    Args:
        prompt: token ids, at least one and fewer than the target's context.
        stop: ids that end a reply; the one met is the last token yielded.
        counts: raw counts, updated before each yield.

    Raises:
        InputError: the prompt is empty or leaves no room in the context.
    """
    limit = target.engine.context_length
    if not prompt:
        raise InputError("the prompt is empty; give at least one token")
    if len(prompt) >= limit:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and the context holds {limit}; shorten the prompt"
        )
    if draft is not None and draft.engine.vocab_size != target.engine.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {draft.engine.vocab_size} tokens and the target's {target.engine.vocab_size}; "
            "they must be the same: build the drafter for this target"
        )
    generator = np.random.default_rng(options.seed)
    rule = RULES[options.rule]
    ids = list(prompt)
    end = min(len(ids) + options.max_new_tokens, limit)

    start = perf_counter()
    for model in (target, draft):
        if model is not None:
            model.prefill(ids[: model.engine.context_length][:-1])
    counts.prefill_seconds += perf_counter() - start

    finish = ""
    try:
        while not finish:
            start = perf_counter()
            drafted, distributions = _draft(
                draft, ids, min(options.draft_length, end - len(ids) - 1), options, generator
            )
            drafted_at = perf_counter()
            rows = target.forward([ids[-1], *drafted])
            verified_at = perf_counter()
            accepted, added = verify(rows, drafted, distributions, options, rule, generator)
            new = [*drafted[:accepted], added]
            finish = _cut(new, stop)
            ids += new
            accepted = min(accepted, len(new))
            if not finish and len(ids) >= end:
                finish = "context" if end == limit else "length"
            _settle(target, draft, len(ids))
            counts.draft_seconds += drafted_at - start
            counts.verify_seconds += verified_at - drafted_at
            counts.total_seconds += perf_counter() - start
            counts.add_block(len(drafted), accepted, len(new))
            yield Block(tuple(new), accepted, finish)
    finally:
        _settle(target, draft, len(ids))


def _draft(
    draft: CachedEngine | None, ids: list[int], room: int, how: Warp, generator: np.random.Generator
) -> tuple[list[int], list[Categorical]]:
    """Draw up to `room` tokens from the drafter, which first reads what it has not seen (two tokens after a full block)."""
    drafted: list[int] = []
    distributions: list[Categorical] = []
    if draft is None:
        return drafted, distributions
    room = min(room, draft.engine.context_length - len(ids) + 1)
    unseen = ids[len(draft.tokens) :]
    while len(drafted) < room:
        q = warp(draft.forward(unseen)[-1], how)
        token = q.sample(generator)
        drafted.append(token)
        distributions.append(q)
        unseen = [token]
    return drafted, distributions


def _cut(new: list[int], stop: Collection[int]) -> str:
    """Drop what follows a stop token inside the block; 'eos' where there is one."""
    for position, token in enumerate(new):
        if token in stop:
            del new[position + 1 :]
            return "eos"
    return ""


def _settle(target: CachedEngine, draft: CachedEngine | None, length: int) -> None:
    """Both caches hold at most what was emitted, less the last token, which the next block reads."""
    target.rewind(length - 1)
    if draft is not None:
        draft.rewind(length - 1)
