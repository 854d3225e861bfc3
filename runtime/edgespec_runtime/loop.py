"""The decoding loop: a generator of blocks. Plain decoding is the same loop with no drafter (γ = 0).

One block: the draft model proposes γ tokens, the target reads them in one pass, the rule keeps a beginning of them and adds one
token of the target's. Caches never hold a rejected token, and are valid however the generator is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Sequence
from time import perf_counter

import numpy as np

from edgespec.errors import InputError
from edgespec.metrics import RawCounts
from edgespec_runtime.acceptance import Draft, verify
from edgespec_runtime.decoding import Block, DecodingOptions
from edgespec_runtime.drafters import Drafter, ModelDrafter
from edgespec_runtime.rules import rule_of
from edgespec_runtime.sampling import Warp
from edgespec_runtime.schedule import Fixed, Outcome, Schedule
from edgespec_runtime.session import CachedEngine


def decode(
    target: CachedEngine,
    draft: CachedEngine | None,
    prompt: Sequence[int],
    options: DecodingOptions,
    stop: Collection[int],
    counts: RawCounts,
    schedule: Schedule | None = None,
) -> Generator[Block, None, None]:
    """Continue `prompt` and yield blocks until a token of `stop`, the length limit or the end of the context.

    Args:
        prompt: token ids, at least one and fewer than the target's context.
        stop: ids that end a reply; the one met is the last token yielded.
        counts: raw counts, updated before each yield.
        schedule: chooses the draft length of every block (default: `options.draft_length`, always).

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
    rule = rule_of(options.rule)
    drafter = drafter_of(options, draft)
    schedule = schedule or Fixed(options.draft_length)
    how = Warp(options.temperature, options.top_k, options.top_p)
    draft_how = dataclasses.replace(how, temperature=0.0) if rule.draft_greedily else how
    ids = list(prompt)
    end = min(len(ids) + options.max_new_tokens, limit)

    start = perf_counter()
    target.prefill(ids[:-1])
    if drafter is not None:
        drafter.prefill(ids)
    counts.prefill_seconds += perf_counter() - start

    finish = ""
    try:
        while not finish:
            start = perf_counter()
            room = end - len(ids) - 1
            context = len(ids)
            length = schedule.draft_length(context, room)
            proposed = (
                drafter.propose(ids, length, draft_how, generator, rule.raw)
                if drafter is not None and length
                else Draft()
            )
            drafted = proposed.tokens
            drafted_at = perf_counter()
            size = min(schedule.pass_length(1 + len(drafted), context), limit - context + 1)
            rows = target.forward([ids[-1], *drafted, *[ids[-1]] * (size - 1 - len(drafted))])
            verified_at = perf_counter()
            accepted, added = verify(rows, proposed, how, rule, generator)
            new = [*drafted[:accepted], added]
            finish = _cut(new, stop)
            ids += new
            accepted = min(accepted, len(new))
            if not finish and len(ids) >= end:
                finish = "context" if end == limit else "length"
            _settle(target, drafter, len(ids))
            counts.draft_seconds += drafted_at - start
            counts.verify_seconds += verified_at - drafted_at
            seconds = perf_counter() - start
            counts.total_seconds += seconds
            counts.add_block(len(drafted), accepted, len(new))
            schedule.observe(
                Outcome(
                    context,
                    len(drafted),
                    accepted,
                    len(new),
                    size,
                    drafted_at - start,
                    verified_at - drafted_at,
                    seconds,
                )
            )
            yield Block(tuple(new), accepted, finish)
    finally:
        _settle(target, drafter, len(ids))


def drafter_of(options: DecodingOptions, model: CachedEngine | None) -> Drafter | None:
    """Who drafts under these options; None for plain decoding."""
    return None if model is None else ModelDrafter(model, options.p_min)


def _cut(new: list[int], stop: Collection[int]) -> str:
    """Drop what follows a stop token inside the block; 'eos' where there is one."""
    for position, token in enumerate(new):
        if token in stop:
            del new[position + 1 :]
            return "eos"
    return ""


def _settle(target: CachedEngine, drafter: Drafter | None, length: int) -> None:
    """Both caches hold at most what was emitted, less the last token, which the next block reads."""
    target.rewind(length - 1)
    if drafter is not None:
        drafter.settle(length - 1)
