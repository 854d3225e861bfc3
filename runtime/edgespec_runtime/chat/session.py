"""One chat with a pair of models: what was said, under which knobs, and how a message is answered.

Draws nothing and reads no keys. Replies stream into a `View`; the KV cache lives from turn to turn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from time import perf_counter

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec_runtime.chat.conversation import Conversation, keeping_system
from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.chat.settings import Options, changed, shown
from edgespec_runtime.chat.terminal import interruptible
from edgespec_runtime.chat.view import Show, Tally, View
from edgespec_runtime.chooser.adaptive import AdaptiveSchedule
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.drafters import drafter_of
from edgespec_runtime.decoding.loop import check_rule_fits, check_vocabulary
from edgespec_runtime.decoding.options import numbered, plain
from edgespec_runtime.decoding.schedule import Schedule
from edgespec_runtime.decoding.speed import plain_step_seconds
from edgespec_runtime.pair.bundle import Pair


class Chat:
    """One conversation with a pair of models.

    Attributes:
        options: the knobs now; `change` checks new ones.
        totals: raw counts of all replies; `replies`: how many there were.
        last: the figures of the last one.
        stopped: whether Ctrl-C ended the last reply.
        prefill: what the next message is edited from; None where it is a new one.
        leaving: whether the chat is over.
        on_change: called when the conversation has changed.
    """

    def __init__(self, pair: Pair, options: Options, interactive: bool, view: View | None = None) -> None:
        self.pair = pair
        self.options = options
        self.interactive = interactive
        self.view = view or View()
        self.conversation = Conversation(pair.tokenizer, options.system)
        self.totals = RawCounts()
        self.replies = 0
        self.last = Tally(self.context, options.max_new_tokens)
        self.stopped = False
        self.prefill: str | None = None
        self.leaving = False
        self.on_change: Callable[[], None] = lambda: None
        self._draws = 0  # replies since the seed was set: each has a seed of its own
        self._step: float | None = None  # seconds of a plain step, as last timed
        self._schedules = Schedules(pair, self.view.note)

    @property
    def context(self) -> int:
        """Tokens that the target's context holds."""
        return self.pair.target.engine.context_length

    def change(self, /, **values: str) -> None:
        """Set knobs, given as text. Raises InputError, and changes nothing, for a value that cannot be."""
        options = changed(self.options, **values)
        if options.draft and options.needs_model and self.pair.draft is None:
            name, value = next(iter(values.items()))
            raise InputError(
                f"{name} is {value}, and the drafter model was not loaded; start the chat without --no-draft "
                "and --drafter lookup"
            )
        if options.draft:
            check_rule_fits(self.pair.draft, options.acceptance_rule())
        self.options = options
        if "seed" in values:
            self._draws = 0

    def fitting(self, conversation: Conversation, text: str) -> tuple[list[int], int]:
        """(the prompt of `text` as the next message, how many more turns it leaves out), with room for a reply behind it."""
        limit = self.context
        return conversation.fit(text, limit - min(self.options.max_new_tokens, limit // 4))

    def reply(self, text: str) -> None:
        """Answer one message: stream the reply, remember it as far as it came, show its figures."""
        ready = self._ready(self.options.draft)
        prompt, left_out = self.fitting(self.conversation, text)
        if left_out:
            turns = "turn" if left_out == 1 else f"{left_out} turns"
            self.view.note(
                f"(the context of {self.context} tokens is full: the model no longer reads the oldest {turns})"
            )
        tally = self._tally(prompt)
        with interruptible(self.interactive) as interrupted:
            with self.view.reply(tally, self.options) as show:
                self._decode(prompt, *ready, tally, show, interrupted)
            self.last, self.stopped = tally, tally.finish == "stopped"
            if tally.tokens:
                self.conversation.add(text, prompt, tally.tokens)
                self.totals.add(tally.counts)
                self.replies += 1
                self._draws += 1
                self.on_change()
            if tally.counts.drafted:
                tally.step = self._step = plain_step_seconds(self.pair.target, self.options)
            self.view.status(tally.line())

    def run(self, prompt: list[int], draft: bool, title: str) -> Tally:
        """The reply to a prompt that is no turn of the conversation."""
        ready, tally = self._ready(draft), self._tally(prompt, title)
        with interruptible(self.interactive) as interrupted, self.view.working(tally) as show:
            self._decode(prompt, *ready, tally, show, interrupted)
        self.stopped = tally.finish == "stopped"
        return tally

    def _ready(self, draft: bool) -> tuple[Options, Schedule]:
        """What the next reply is decoded with. Raises InputError for a drafter of another vocabulary."""
        options = numbered(self.options if draft else plain(self.options), self._draws)
        options = keeping_system(options, self.pair.tokenizer, self.conversation.system, self.pair.target)
        check_vocabulary(self.pair.target, self.pair.draft if options.needs_model else None)
        return options, self._schedules.of(options)

    def _tally(self, prompt: list[int], title: str = "") -> Tally:
        return Tally(self.context, self.options.max_new_tokens, len(prompt), step=self._step, title=title)

    def _decode(
        self,
        prompt: list[int],
        options: Options,
        schedule: Schedule,
        tally: Tally,
        show: Show,
        interrupted: Callable[[], bool],
    ) -> None:
        """Show a reply, and note it in `tally`, until it ends or Ctrl-C was pressed.

        The prompt is read into both caches piece by piece, so that Ctrl-C does not wait for the end of a long one.
        """
        start = perf_counter()
        tally.finish = "stopped"
        for count in self.pair.target.prefill_steps(prompt[:-1]):
            tally.computed += count
            show("", False)
            if interrupted():
                return
        drafter = drafter_of(options, self.pair.draft)
        for _ in drafter.prefill_steps(prompt) if drafter is not None else ():
            if interrupted():
                return
        if interrupted():
            return
        tally.counts.prefill_seconds = perf_counter() - start
        with closing(pieces(self.pair, prompt, options, tally.counts, schedule)) as said:
            for piece in said:
                tally.first_token = tally.first_token or perf_counter() - start
                tally.off = self._schedules.why_no_drafts(options) or ""
                if isinstance(schedule, AdaptiveSchedule):
                    tally.step = schedule.step_seconds()
                tally.pieces.append(piece)
                show(piece.text, piece.accepted)
                if piece.finish:
                    tally.finish = piece.finish
                elif interrupted():
                    return

    def state(self) -> str:
        """Who drafts, how much and by which rule, in one line."""
        options = self.options
        if not options.draft:
            return "no drafts"
        return f"drafter {options.who}, γ {shown(options.draft_length)}, rule {options.rule_name}"
