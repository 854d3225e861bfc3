"""The decoding loop: a generator of blocks. Plain decoding is the same loop with no drafter (γ = 0).

    prefill -> (draft -> verify -> emit -> settle) until the reply ends

One block: the drafter proposes γ tokens, the target reads them in one pass, the rule keeps a beginning of them and adds one
token of the target's. Caches never hold a rejected token, and are valid however the generator is left.

Where the context is full and may shift, the text goes on from its first tokens and its newest half: every token after a shift is
drawn exactly as from that shorter text. Plain decoding shifts at the same tokens, so speculation stays lossless through it.

A draft ends where the text would outgrow the target's RoPE factors (cached_engine.py): tokens behind that place may be rejected,
and the text would be read twice. Behind it the text is read again, apart from any block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Sequence

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.cascade_loops import CascadeState, decode_by
from edgespec_runtime.decoding.drafters import drafter_of
from edgespec_runtime.decoding.options import SHIFT, UNMEASURED, Block, DecodingOptions
from edgespec_runtime.decoding.reply_state import NOTHING, ReplyState
from edgespec_runtime.decoding.schedule import Fixed, Schedule
from edgespec_runtime.engines.cached_engine import CachedEngine, most_kept
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Rule, at_temperature
from edgespec_runtime.rules.sampling import Uniforms
from edgespec_runtime.rules.table import RULES, Kind, LoopRule, rule_of


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
        NoNumbers: the target's logits are NaN.
    """
    check_prompt(target, draft, prompt, options)
    rule, drafter = rule or options.acceptance_rule(), drafter_of(options, draft)
    check_rule_fits(draft, rule)
    given = (target, drafter, prompt, options, stop, counts)
    if isinstance(rule, LoopRule):
        if drafter is not None:
            yield from decode_by(rule, CascadeState(*given, Uniforms(options.seed)))
            return
        rule = LOSSLESS_RULE  # nobody drafts: plain decoding
    rule = at_temperature(rule, options.temperature)
    schedule = schedule or Fixed(options.draft_length or UNMEASURED)
    reply = ReplyState(*given, rule.source(options.seed))
    how = reply.how
    draft_how = dataclasses.replace(how, temperature=0.0) if rule.draft_greedily else how
    reply.prefill()
    try:
        while not reply.finish:
            reply.clock.begin()
            if reply.is_full():
                reply.make_room()
            context = len(reply.ids)
            length = reply.choose(schedule)

            proposed, origin = NOTHING, schedule.origin
            if length or rule.mixes:
                proposed = reply.draft(length, draft_how, rule, origin)
            drafted = len(proposed.tokens)

            rows = reply.verify(proposed.tokens, schedule.pass_length(1 + drafted))
            accepted, added = rule.verify(rows, proposed, how, reply.source, context)
            reply.check_numbers(rows[accepted], None if rule.mixes else added)

            new = reply.emit([*proposed.tokens[:accepted], added])
            accepted = min(accepted, len(new))  # a stop token among them ends the reply

            reply.settle()
            counts.add_block(drafted, accepted, len(new), proposed.copied, proposed.behind)
            schedule.observe(reply.clock.outcome(drafted, accepted, len(new), len(rows), origin))
            reply.clock.end()
            yield Block(tuple(new), accepted, reply.finish)
    finally:
        reply.settle()


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


def check_rule_fits(draft: CachedEngine | None, rule: Rule | LoopRule) -> None:
    """Raise InputError for a rule that needs a drafter whose answer depends on the text alone, where the drafter is a head."""
    if not _fits(draft, rule):
        raise InputError(
            "this rule mixes the drafter's probabilities into the output, and those of a head depend on where a block "
            "began; choose the rule lossless, block or reproducible, or a drafter that is a model"
        )


def rules_for(draft: CachedEngine | None) -> dict[str, Kind]:
    """The rows of the table of rules that `check_rule_fits` lets pass."""
    return {name: kind for name, kind in RULES.items() if _fits(draft, rule_of(name))}


def _fits(draft: CachedEngine | None, rule: Rule | LoopRule) -> bool:
    is_head = draft is not None and isinstance(draft.engine, FeatureEngine)
    return not (is_head and (isinstance(rule, LoopRule) or rule.mixes))


def check_vocabulary(target: CachedEngine, draft: CachedEngine | None) -> None:
    """Raise InputError where the drafter model is of another vocabulary; before it reads a token."""
    if draft is not None and draft.engine.vocab_size != target.engine.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {draft.engine.vocab_size} tokens and the target's {target.engine.vocab_size}; "
            "they must be the same: build the drafter for this target"
        )
