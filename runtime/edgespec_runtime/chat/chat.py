"""Talk to a bundle: replies stream, and the KV cache lives from turn to turn.

In a pipe every line of standard input is a message (or a command) and only replies go to standard output.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.core.errors import EdgespecError, InputError, did_you_mean
from edgespec.core.metrics import RawCounts
from edgespec.core.options import check, from_mapping, help_of, knob
from edgespec_runtime.chat.conversation import Conversation, keeping_system
from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.chat.terminal import Interrupt, Lines, dim, harmless, has_colour
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.drafters import drafter_of
from edgespec_runtime.decoding.loop import check_vocabulary
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, numbered, plain
from edgespec_runtime.decoding.speed import plain_step_seconds
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.pair.device_defaults import manifest_of, of_reply


@dataclass(frozen=True, kw_only=True)
class Options(DecodingOptions, LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    system: str = knob("", "system prompt")
    draft: bool = knob(True, "speculate with the drafter")
    colour: bool = knob(False, "show the drafter's tokens dimmed")


OPTIONS = Options
_CHANGEABLE = {field.name for field in dataclasses.fields(DecodingOptions)} | {"draft", "colour"}
SETTABLE = {field.name: field for field in dataclasses.fields(Options) if field.name in _CHANGEABLE}
_HINTS = typing.get_type_hints(Options)


@dataclass(frozen=True)
class Command:
    """A line that begins with '/'. `act` takes what follows the name."""

    argument: str
    help: str
    act: Callable[[Chat, str], None]


class Chat:
    """One conversation with a pair of models.

    Attributes:
        computed: prompt tokens the target computed for the last reply; the others were in its cache.
    """

    def __init__(self, pair: Pair, options: Options, interactive: bool) -> None:
        self.pair = pair
        self.options = options
        self.interactive = interactive
        self.conversation = Conversation(pair.tokenizer, options.system)
        self.totals = RawCounts()
        self.replies = 0
        self._draws = 0  # replies since the seed was set: each has a seed of its own
        self.computed = 0
        self.leaving = False
        self._dim_notes = has_colour(sys.stderr)
        self._schedules = Schedules(pair, self.note)

    def note(self, text: str) -> None:
        """One message beside the reply, on standard error."""
        print(dim(text) if self._dim_notes else text, file=sys.stderr, flush=True)

    def handle(self, line: str) -> None:
        """A command or a message. Raises EdgespecError: a wrong value, an engine that failed; the chat is as it was then."""
        line = line.strip()
        if line.startswith("/"):
            name, _, argument = line.partition(" ")
            if name not in COMMANDS:
                raise InputError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}")
            COMMANDS[name].act(self, argument.strip())
        elif line:
            self.reply(line)

    def reply(self, text: str) -> None:
        """Answer one message: stream the reply, remember it, print the stats line."""
        target = self.pair.target
        options = self.options if self.options.draft else plain(self.options)
        options = keeping_system(options, self.pair.tokenizer, self.conversation.system, target)
        draft = self.pair.draft if options.needs_model else None
        check_vocabulary(target, draft)
        context = target.engine.context_length
        schedule = self._schedules.of(options)
        prompt, dropped = self.conversation.fit(text, context - min(options.max_new_tokens, context // 4))
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.note(f"(the context of {context} tokens is full: the oldest {turns} dropped)")
        counts, finish = RawCounts(), "stopped"
        reply: list[int] = []
        start = perf_counter()
        with Interrupt(self.interactive) as interrupt:
            self._prefill(prompt, options, interrupt)
            counts.prefill_seconds = perf_counter() - start
            first_token = 0.0
            if not interrupt.requested:
                one = numbered(options, self._draws)
                try:
                    with closing(pieces(self.pair, prompt, one, counts, schedule)) as said:
                        for piece in said:
                            first_token = first_token or perf_counter() - start
                            reply += piece.tokens
                            self._write(piece.text, drafted=piece.accepted)
                            finish = piece.finish or finish
                            if interrupt.requested:
                                break
                finally:  # also where an engine fails: what it says about it stands on a line of its own
                    if first_token:
                        self._write("\n")
            if reply:
                self.conversation.add(text, prompt, reply)
                self.totals.add(counts)
                self.replies += 1
                self._draws += 1
            self.note(self._stats(counts, finish, first_token))

    def _prefill(self, prompt: list[int], options: Options, interrupt: Interrupt) -> None:
        """Read the prompt into both caches piece by piece, so that Ctrl-C does not wait for the end of a long one."""
        self.computed = 0
        for count in self.pair.target.prefill_steps(prompt[:-1]):
            self.computed += count
            if interrupt.requested:
                return
        drafter = drafter_of(options, self.pair.draft)
        for _ in drafter.prefill_steps(prompt) if drafter is not None else ():
            if interrupt.requested:
                return

    def _write(self, text: str, drafted: bool = False) -> None:
        if sys.stdout.isatty():
            text = harmless(text)
        if drafted and self.options.colour and has_colour(sys.stdout):
            text = dim(text)
        print(text, end="", flush=True)

    def _stats(self, counts: RawCounts, finish: str, first_token: float) -> str:
        """One line on a reply; the speed-up is an estimate from a few plain steps timed where the reply ended."""
        if not counts.emitted:
            return "[stopped before the reply began]"
        parts = [f"{counts.emitted} tokens", f"{counts.token_rate:.1f} tok/s"]
        if counts.drafted:
            parts += [f"τ {counts.block_efficiency:.2f}", f"α {counts.acceptance_rate:.2f}"]
            step = plain_step_seconds(self.pair.target, self.options)
            if step is not None:
                parts.append(f"est. {counts.token_rate * step:.2f}x plain decoding")
        known = len(self.conversation.ids) - counts.emitted
        parts.append(
            f"first token after {first_token:.2f} s ({self.computed} of {known} prompt tokens computed)"
        )
        notes = {
            "stopped": "stopped by Ctrl-C",
            "length": f"cut at max_new_tokens {self.options.max_new_tokens}",
            "context": f"cut: the context of {self.pair.target.engine.context_length} tokens is full",
        }
        return f"[{' · '.join([*parts, notes[finish]] if finish in notes else parts)}]"

    # commands

    def help(self, _: str) -> None:
        usage = {name: f"{name} {command.argument}".rstrip() for name, command in COMMANDS.items()}
        width = max(map(len, usage.values()))
        lines = [f"{usage[name]:<{width}}  {command.help}" for name, command in COMMANDS.items()]
        knobs = [
            f"  {name} = {_shown(getattr(self.options, name))}: {help_of(field)}"
            for name, field in SETTABLE.items()
        ]
        self.note("\n".join([*lines, "knobs:", *knobs, "Ctrl-C stops a reply; twice at the prompt leaves."]))

    def stats(self, _: str) -> None:
        totals, context = self.totals, self.pair.target.engine.context_length
        if not totals.emitted:
            self.note("no replies yet")
            return
        seconds = {
            "drafter": totals.draft_seconds,
            "target": totals.verify_seconds,
            "loop": totals.loop_seconds,
        }
        shares = ", ".join(f"{name} {spent / totals.total_seconds:.0%}" for name, spent in seconds.items())
        lines = [
            f"replies {self.replies}, tokens {totals.emitted}, {totals.token_rate:.1f} tok/s",
            f"time    {shares}",
            f"context {min(len(self.conversation.ids), context)} of {context} tokens",
        ]
        if totals.drafted:
            tests = zip(totals.accepted, totals.tested, strict=True)
            places = ", ".join(f"{accepted / tested:.2f}" for accepted, tested in tests if tested)
            lines.append(
                f"τ {totals.block_efficiency:.2f}, α {totals.acceptance_rate:.2f} (in the block: {places})"
            )
        self.note("\n".join(lines))

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.note("the conversation is empty")

    def system(self, text: str) -> None:
        self.conversation.system = text
        self.note("the system prompt is set" if text else "there is no system prompt now")

    def set(self, argument: str) -> None:
        name, value = (*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), "")[:2]  # a rule has '=' of its own
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise InputError(f"unknown knob {name!r}{did_you_mean(name, SETTABLE)}")
        new = check(value.strip(), _HINTS[name], SETTABLE[name], name)
        options = dataclasses.replace(self.options, **{name: new})
        if options.draft and options.needs_model and self.pair.draft is None:
            raise InputError(
                f"{name} is {_shown(new)}, and the drafter model was not loaded; start the chat without --no-draft "
                "and --drafter lookup"
            )
        self.options = options
        if name == "seed":
            self._draws = 0
        self.note(f"{name} = {_shown(new)}")

    def quit(self, _: str) -> None:
        self.leaving = True


COMMANDS = {
    "/help": Command("", "this list", Chat.help),
    "/stats": Command("", "speed and acceptance since the start", Chat.stats),
    "/reset": Command("", "forget the conversation; the system prompt stays", Chat.reset),
    "/system": Command("TEXT", "set the system prompt; without TEXT remove it", Chat.system),
    "/set": Command("KNOB VALUE", "change a knob", Chat.set),
    "/quit": Command("", "leave", Chat.quit),
}


def _shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def talk(chat: Chat, lines: Lines) -> int:
    """Read and answer until the input ends. Returns the exit code: in a pipe 2 where a line could not be answered."""
    failed = False
    asked_to_leave = False
    while not chat.leaving:
        try:
            line = lines.read("> ")
        except InputError as error:
            failed = True
            chat.note(str(error))
            continue
        except KeyboardInterrupt:
            line = None
        if line is None:
            if asked_to_leave or not lines.interactive:
                break
            asked_to_leave = True
            chat.note("\n(again, or /quit, to leave)")
            continue
        asked_to_leave = False
        try:
            chat.handle(line)
        except KeyboardInterrupt:  # between two lines of work: nothing to stop
            if not lines.interactive:
                raise
        except EdgespecError as error:
            failed = True
            chat.note(str(error))
    return 2 if failed and not lines.interactive else 0


def run(given: dict[str, Any]) -> int:
    manifest = manifest_of(given)
    options = from_mapping(Options, of_reply(given, manifest))
    lines = Lines()
    pair = open_pair(Path(options.bundle), options, options.draft and options.needs_model, manifest)
    try:
        chat = Chat(pair, options, lines.interactive)
        if lines.interactive:
            model = pair.draft is not None
            drafter = f"drafter c = {pair.cost_ratios['parameters']:.2%}" if model else "no drafter model"
            if options.draft and options.drafter != MODEL:
                drafter += f", {options.drafter}"
            chat.note(
                f"{Path(options.bundle).name}: {pair.engine} {pair.precision}, {drafter}. /help tells the commands."
            )
        return talk(chat, lines)
    finally:
        pair.close()
