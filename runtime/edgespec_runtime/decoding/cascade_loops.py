"""Decoding loops of the rules that are no test of one draft token after another: token cascade, sequence cascade, BiLD.

The baselines of Narasimhan et al., Faster Cascades via Speculative Decoding (section 6). They keep the contract of `loop.decode`,
which checks the prompt and hands over: blocks are yielded, counts are true before each, caches are valid however they are left.
Confidence and discrepancy are those of the raw distributions, tokens are drawn from the warped ones. Draft length and schedule
play no part: the drafter's own confidence ends a draft.

What the raw counts mean here (a block is a pass of the target, as everywhere; what the drafter writes without one is in `emitted`
and in no block):
    token cascade       drafted = accepted = tokens the drafter wrote; nothing is taken back; 1/τ is the share of deferrals
    sequence cascade    drafted = the drafter's reply, all of it accepted or none; no blocks where it was kept
    BiLD                as in `loop.decode`; a draft token is rejected where it is rolled back
A look at the drafter that finds it unsure is a step behind its draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any

from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.block_clock import DRAFT, VERIFY
from edgespec_runtime.decoding.drafters import highest_probability
from edgespec_runtime.decoding.options import Block
from edgespec_runtime.decoding.reply_state import ReplyState
from edgespec_runtime.engines.cached_engine import common_length
from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.acceptance import Draft, TokenRule
from edgespec_runtime.rules.cascades import discrepancy, log_total
from edgespec_runtime.rules.sampling import Categorical, warp
from edgespec_runtime.rules.table import MEAN, PRODUCT, Bild, LoopRule, SequenceCascade, TokenCascade

LONGEST_RUN = 10  # draft tokens in a row of a token cascade, as in the paper's appendix F.1


class CascadeState(ReplyState):
    """A reply with tokens behind it that are being tried."""

    def draft_logits(self) -> Logits | None:
        """The drafter's logits [V] behind `ids`; None where its context is too short for them."""
        assert self.drafter is not None
        guess = self.drafter.guess(self.ids) if self.drafter.origins(self.ids) else None
        return None if guess is None else guess.logits

    def draft_while_sure(self, most: int, a: float, *, keeps_logits: bool = False) -> Draft:
        """Draft while max q >= 1 − a and nothing ends the reply, at most `most` tokens in a row."""
        draft = Draft()
        while len(draft.tokens) < most and not self.is_over():
            logits = self.draft_logits()
            if logits is None:
                break
            if highest_probability(logits) < 1 - a:
                self.counts.behind += 1
                break
            if keeps_logits:
                draft.logits.append(logits.copy())
            draft.q.append(warp(logits, self.how))
            draft.tokens.append(self.write(draft.q[-1]))
        self.clock.lap(DRAFT)
        return draft

    def write_by_target(self) -> None:
        """Append a token drawn from what the target says behind `ids`; it is not emitted yet."""
        logits = self.target.read(self.ids[len(self.target.tokens) :])
        self.clock.lap(VERIFY)
        self.check_numbers(logits, self.write(warp(logits, self.how)))

    def write(self, distribution: Categorical) -> int:
        """Append a token drawn from `distribution`; it is not emitted yet."""
        token = self.source.sample(distribution, len(self.ids))
        self.ids.append(token)
        return token

    def is_over(self) -> bool:
        """Whether what is being tried ends the reply."""
        return len(self.ids) >= self.end or (len(self.ids) > self.emitted and self.ids[-1] in self.stop)

    def take_back(self) -> list[int]:
        """Remove the tokens that are not emitted, and return them."""
        tried = self.ids[self.emitted :]
        del self.ids[self.emitted :]
        return tried

    def block(self, drafted: int, accepted: int, *, by_target: bool = True) -> Block:
        """Emit what was tried. `by_target`: the target read it, so it counts as a block."""
        new = self.emit(self.take_back())
        self.settle()
        self.counts.add_block(drafted, accepted, len(new))
        self.counts.blocks -= not by_target
        self.clock.end()
        return Block(tuple(new), accepted, self.finish)


def _token_cascade(reply: CascadeState, rule: TokenCascade) -> Iterator[Block]:
    """Token by token: the drafter's where max q >= 1 − a, at most `LONGEST_RUN` in a row, else the target's (Algorithm 2)."""
    reply.prefill()
    reply.prefill_drafter()
    while not reply.finish:
        reply.clock.begin()
        drafted = len(reply.draft_while_sure(LONGEST_RUN, rule.a).tokens)
        defers = not reply.is_over()
        if defers:
            reply.write_by_target()
        yield reply.block(drafted, drafted, by_target=defers)


def _sequence_cascade(reply: CascadeState, rule: SequenceCascade) -> Iterator[Block]:
    """The drafter's reply, or the target's where the drafter's confidence in its own is below 1 − a (Eq. 1).

    The confidence is the probability of the reply that was written, in place of the most probable one; nothing leaves the loop
    before the decision. With `mean` it is the geometric mean over the tokens (Gupta et al. 2024).
    """
    # It may never be asked, and must not keep another conversation.
    reply.target.rewind(common_length(reply.target.tokens, reply.ids))
    reply.prefill_drafter()
    reply.clock.begin()
    drafted, log_q, keeps = 0, 0.0, True
    while keeps and not reply.is_over():
        logits = reply.draft_logits()
        if logits is None:
            keeps = False  # the drafter's context is full, and its reply has no end
            break
        token = reply.write(warp(logits, reply.how))
        drafted += 1
        log_q += float(logits[token]) - log_total(logits)
        if rule.confidence == PRODUCT:
            keeps = math.exp(log_q) >= 1 - rule.a  # the product only falls: no need to write on
    if rule.confidence == MEAN and drafted:
        keeps = keeps and math.exp(log_q / drafted) >= 1 - rule.a
    reply.clock.lap(DRAFT)
    if keeps:
        yield reply.block(drafted, drafted, by_target=False)
        return
    reply.take_back()
    reply.counts.add(RawCounts(drafted=drafted, tested=[1] * drafted, accepted=[0] * drafted))
    reply.clock.end()
    reply.prefill()
    while not reply.finish:
        reply.clock.begin()
        reply.write_by_target()
        yield reply.block(0, 0)


def _bild(reply: CascadeState, rule: Bild) -> Iterator[Block]:
    """Draft until max q < 1 − a_f or `window` tokens; the target reads it; back to the first D(q, p) > a.

    The target reads every draft, also the one that ends the reply: nothing leaves unseen, unlike in the original (F.5). A draft
    may fill the reply to its limit, so the limit does not decide who speaks.
    """
    roll_back = TokenRule(
        accept=lambda place, _: float(discrepancy(place) <= rule.a), residual=lambda place: place.p, raw=True
    )
    reply.prefill()
    reply.prefill_drafter()
    while not reply.finish:
        reply.clock.begin()
        draft = reply.draft_while_sure(rule.window, rule.a_f, keeps_logits=True)
        rows = reply.target.read_rows(reply.ids[reply.emitted - 1 :])
        reply.clock.lap(VERIFY)
        accepted, added = roll_back.verify(rows, draft, reply.how, reply.source, reply.emitted)
        reply.check_numbers(rows[accepted], added)
        reply.take_back()
        reply.ids += draft.tokens[:accepted]
        if not reply.is_over():
            reply.ids.append(added)
        yield reply.block(len(draft.tokens), accepted)


_LOOPS: dict[type[LoopRule], Callable[[CascadeState, Any], Iterator[Block]]] = {
    TokenCascade: _token_cascade,
    SequenceCascade: _sequence_cascade,
    Bild: _bild,
}


def decode_by(rule: LoopRule, reply: CascadeState) -> Generator[Block, None, None]:
    """Write a reply by a rule with a loop of its own; blocks as in `loop.decode`."""
    try:
        yield from _LOOPS[type(rule)](reply, rule)
    finally:
        reply.take_back()
        reply.settle()
