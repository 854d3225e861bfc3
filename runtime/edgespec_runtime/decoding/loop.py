"""The decoding loop: a generator of blocks. Plain decoding is the same loop with no drafter (γ = 0).

One block: the drafter proposes γ tokens, the target reads them in one pass, the rule keeps a beginning of them and adds one
token of the target's. Caches never hold a rejected token, and are valid however the generator is left.

Where the context is full and may shift, the text goes on from its first tokens and its newest half: every token after a shift is
drawn exactly as from that shorter text. Plain decoding shifts at the same tokens, so speculation stays lossless through it.

A draft ends where the text would outgrow the target's RoPE factors (rope_border.py): tokens behind that place may be rejected,
and the text would be read twice. Behind it the text is read again, apart from any block.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Generator, Sequence
from time import perf_counter

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.cascade_loops import Reply, decode_by
from edgespec_runtime.decoding.drafters import Drafter, drafter_of, propose, window_of
from edgespec_runtime.decoding.options import SHIFT, UNMEASURED, Block, DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule
from edgespec_runtime.engines.session import CachedEngine, most_kept
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.rules.acceptance import LOSSLESS, Draft, Rule
from edgespec_runtime.rules.reproducible import PositionNoise
from edgespec_runtime.rules.sampling import TokenSource, Uniforms, Warp
from edgespec_runtime.rules.table import LoopRule

NOTHING = Draft()  # of a plain step: making one takes microseconds


def decode(
    target: CachedEngine,
    draft: CachedEngine | None,
    prompt: Sequence[int],
    options: DecodingOptions,
    stop: Collection[int],
    counts: RawCounts,
    schedule: Schedule | None = None,
    rule: Rule | LoopRule | None = None,
) -> Generator[Block, None, None]:
    """Continue `prompt` and yield blocks until a token of `stop`, the length limit or the end of a context that does not shift.

    Args:
        draft: the drafter model, or None: nobody drafts, or prompt lookup alone where `options.drafter` says so.
        prompt: token ids, at least one and fewer than the target's context.
        stop: ids that end a reply; the one met is the last token yielded.
        counts: raw counts, updated before each yield.
        schedule: chooses the draft length of every block (default: always `options.draft_length`, or 3).
        rule: accepts draft tokens (default: that of `options.rule`).

    Raises:
        InputError: the prompt is empty or leaves no room in the context, the drafter is of another vocabulary or missing.
        EdgespecError: an engine failed; its cache is empty then, and the next reply works if the engine does.
    """
    check_prompt(target, draft, prompt, options)
    check_law(draft, rule or options.acceptance_rule())
    limit = target.engine.context_length
    window = window_of(target, options)
    rule = rule or options.acceptance_rule()
    drafter = drafter_of(options, draft)
    if isinstance(rule, LoopRule):
        if draft is not None and drafter is not None:
            yield from decode_by(rule, Reply(target, draft, prompt, options, stop, counts))
            return
        rule = LOSSLESS  # nobody drafts: plain decoding
    schedule = schedule or Fixed(options.draft_length or UNMEASURED)
    schedule.begin()
    how = Warp.of(options)
    if rule.mixes and not rule.raw and how.temperature == 0.0:
        rule = LOSSLESS  # of greedy distributions such a rule keeps the target's token and no other (cascades, Lemma 6)
    source = source_of(rule, options.seed)
    draft_how = dataclasses.replace(how, temperature=0.0) if rule.draft_greedily else how
    ids = list(prompt)
    end = len(ids) + options.max_new_tokens
    if window is None:
        end = min(end, limit)
    longest = target.engine.block_length - 1

    start = perf_counter()
    target.prefill(ids[:-1])
    counts.prefill_seconds += perf_counter() - start
    # What the drafter reads before its first draft; there may be none.
    unread = None if drafter is None else list(ids)

    finish = ""
    try:
        while not finish:
            start = perf_counter()
            shifted_at = start
            if window is not None and len(ids) >= limit:
                dropped = window.surplus(len(ids))
                del ids[window.keep : window.keep + dropped]
                end -= dropped
                source.shift(dropped)
                target.prefill(ids[:-1])
                if unread is not None:
                    unread = list(ids)
                elif drafter is not None:
                    _read(drafter, ids)
                shifted_at = perf_counter()
            context = len(ids)
            if not target.holds_for(context):
                target.prefill(ids[:-1])
                shifted_at = perf_counter()
            reach = target.reach(context)
            room = min(end - context - 1, limit - context - 1, reach - context, longest)
            length = schedule.draft_length(context, room)
            chosen_at = perf_counter()
            choosing = chosen_at - shifted_at
            proposed = NOTHING
            if drafter is not None and (length or rule.mixes):
                if unread is not None:
                    seconds = _read(drafter, unread)
                    unread = None
                    counts.prefill_seconds += seconds
                    start, shifted_at, chosen_at = start + seconds, shifted_at + seconds, chosen_at + seconds
                proposed = propose(drafter, ids, length, draft_how, source, rule)
            drafted = proposed.tokens
            drafted_at = perf_counter()
            size = min(schedule.pass_length(1 + len(drafted), context), reach - context + 1)
            rows = target.forward([ids[-1], *drafted, *[ids[-1]] * (size - 1 - len(drafted))])
            verified_at = perf_counter()
            accepted, added = rule.verify(rows, proposed, how, source, context)
            new = [*drafted[:accepted], added]
            finish = _cut(new, stop)
            ids += new
            accepted = min(accepted, len(new))
            if not finish and len(ids) >= end:
                finish = "context" if end == limit and window is None else "length"
            _settle(target, drafter if unread is None else None, len(ids))
            draft_seconds, verify_seconds = drafted_at - chosen_at, verified_at - drafted_at
            seconds = perf_counter() - chosen_at
            counts.draft_seconds += draft_seconds
            counts.verify_seconds += verify_seconds + (shifted_at - start)
            counts.add_block(len(drafted), accepted, len(new), proposed.copied)
            schedule.observe(
                Outcome(
                    context,
                    len(drafted),
                    accepted,
                    len(new),
                    size,
                    draft_seconds,
                    verify_seconds,
                    seconds,
                    choosing,
                )
            )
            counts.total_seconds += perf_counter() - start
            yield Block(tuple(new), accepted, finish)
    finally:
        _settle(target, drafter if unread is None else None, len(ids))


def source_of(rule: Rule, seed: int | None) -> TokenSource:
    """What a reply's random choices come from; without a seed, from the operating system's randomness."""
    if rule.by_position:
        return PositionNoise(secrets.randbits(63) if seed is None else seed)
    return Uniforms(seed)


def check_prompt(
    target: CachedEngine, draft: CachedEngine | None, prompt: Sequence[int], options: DecodingOptions
) -> None:
    """Raise InputError for what `decode` cannot begin with; before anything is computed or measured."""
    limit = target.engine.context_length
    if not prompt:
        raise InputError("the prompt is empty; give at least one token")
    if limit < 2:
        raise InputError(
            f"the context of {target.engine.name} holds {limit} token, and a prompt and a reply take 2 or more; "
            "load it with a longer --context"
        )
    if len(prompt) >= limit:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and the context holds {limit}; shorten the prompt"
        )
    if options.when_full == SHIFT and options.keep is not None and options.keep > most_kept(limit):
        raise InputError(
            f"keep is {options.keep} and the context holds {limit} tokens; keep at most {most_kept(limit)}, "
            "so that it can shift by half of the rest"
        )
    check_vocabulary(target, draft)


def check_law(draft: CachedEngine | None, rule: Rule | LoopRule) -> None:
    """Raise InputError for a rule that needs a drafter whose answer depends on the text alone, where the drafter is a head."""
    is_head = draft is not None and isinstance(draft.engine, FeatureEngine)
    if is_head and (isinstance(rule, LoopRule) or rule.mixes):
        raise InputError(
            "this rule mixes the drafter's probabilities into the output, and those of a head depend on where a block "
            "began; choose --rule lossless, block or reproducible, or a drafter that is a model"
        )


def check_vocabulary(target: CachedEngine, draft: CachedEngine | None) -> None:
    """Raise InputError where the drafter model is of another vocabulary; before it reads a token."""
    if draft is not None and draft.engine.vocab_size != target.engine.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {draft.engine.vocab_size} tokens and the target's {target.engine.vocab_size}; "
            "they must be the same: build the drafter for this target"
        )


def _read(drafter: Drafter, ids: Sequence[int]) -> float:
    """The drafter knows the text but its last token; what it knows of it already is not computed again. Returns seconds."""
    start = perf_counter()
    for _ in drafter.prefill_steps(ids):
        pass
    return perf_counter() - start


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
