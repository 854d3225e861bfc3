"""The commands of a chat: one table with their names, arguments and help. A line that begins with '/' is one of them.

Everything else is a message; so is what stands between two lines of three quotes, whatever it begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.table import byte_size, many
from edgespec_runtime.chat import saved
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import SETTABLE, choices_of, listed, parted, shown
from edgespec_runtime.chat.terminal import QUOTES, TEXT_COMMANDS, unquoted
from edgespec_runtime.chat.view import Tally, tau_of
from edgespec_runtime.decoding.loop import rules_for
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, MODEL
from edgespec_runtime.engines.cached_engine import common_length
from edgespec_runtime.rules.table import RULES

PATH = "FILE"  # the argument that is completed with paths


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        names: its names with the slash; the first one is shown.
        argument: what follows, as the help shows it.
        help: what it does, in some words.
        act: does it, given what follows the name.
        more: what may follow, for completion, given what is already there; the words of `argument` where absent.
    """

    names: tuple[str, ...]
    argument: str
    help: str
    act: Callable[[Chat, str], None]
    more: Callable[[str], Sequence[str]] | None = None

    @property
    def usage(self) -> str:
        return f"{self.names[0]} {self.argument}".rstrip()

    def values(self, given: str) -> Sequence[str]:
        """What may follow."""
        if self.more is not None:
            return self.more(given)
        return [word for word in self.argument.split("|") if word.islower()]  # and not a name such as TEXT


def handle(chat: Chat, text: str) -> None:
    """A command or a message. Raises EdgespecError: a wrong value, an engine that failed; the chat is as it was then."""
    edited, chat.prefill = chat.prefill is not None, None
    text = text.strip()
    if text.startswith("/"):
        name, *rest = text.split(maxsplit=1)
        if name not in BY_NAME:
            raise InputError(
                f"unknown command {name!r}{did_you_mean(name, [command.names[0] for command in COMMANDS])}; "
                f"{QUOTES} before and behind a message sends it as it is"
            )
        argument = rest[0] if rest else ""
        BY_NAME[name].act(chat, unquoted(argument) if name in TEXT_COMMANDS else argument)
        return
    text = unquoted(text)
    if text.strip():
        (_again if edited else Chat.reply)(chat, text)


def _help(chat: Chat, _: str) -> None:
    width = max(len(command.usage) for command in COMMANDS)
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS]
    keys = [
        f"{QUOTES} begins a message or a TEXT of several lines, and ends it; Alt-Enter makes a line too.",
        "Ctrl-C stops a reply, and what came of it stays; Ctrl-C at the empty prompt twice, or Ctrl-D, leaves.",
    ]
    chat.view.say("\n".join([*lines, *keys]))


def _system(chat: Chat, text: str) -> None:
    chat.conversation.system = text
    chat.on_change()
    chat.view.note("the system prompt is set" if text else "there is no system prompt now")


def _set(chat: Chat, argument: str) -> None:
    if not argument:
        chat.view.say("\n".join(["the knobs, each changed by /set KNOB VALUE:", *listed(chat.options)]))
        return
    name, value = parted(argument)
    chat.change(**{name: value})
    chat.view.note(f"{name} = {shown(getattr(chat.options, name))}")


def _draft(chat: Chat, argument: str) -> None:
    if argument and argument not in DRAFTS:
        raise InputError(f"/draft is {argument!r}{did_you_mean(argument, DRAFTS)}")
    _who_drafts(chat, **DRAFTS.get(argument, {}))


def _gamma(chat: Chat, argument: str) -> None:
    _who_drafts(chat, **({"draft_length": argument} if argument else {}))


def _rule(chat: Chat, argument: str) -> None:
    if argument:
        _who_drafts(chat, rule=argument)
    else:
        names = ", ".join(rules_for(chat.pair.draft))
        chat.view.say(f"rule {chat.options.rule_name}; there are: auto, {names}")


def _who_drafts(chat: Chat, **knobs: str) -> None:
    """Who drafts now: confirmed where knobs change it, else asked for."""
    if knobs:
        chat.change(**knobs)
    (chat.view.note if knobs else chat.view.say)(chat.state())


def _regenerate(chat: Chat, _: str) -> None:
    last = _last(chat)
    if chat.options.temperature == 0.0:
        chat.view.note("(greedy, so the same words come again; /set temperature 0.7 draws others)")
    _again(chat, last)


def _edit(chat: Chat, text: str) -> None:
    last = _last(chat)
    if text:
        _again(chat, text)
    elif chat.interactive:
        command = last.lstrip().startswith(("/", QUOTES))  # is what Enter would make of it without quotes
        chat.prefill = f"{QUOTES}{last}{QUOTES}" if command else last
    else:
        raise InputError("without a terminal, /edit takes the new message: /edit TEXT")


def _last(chat: Chat) -> str:
    """What the user said last. Raises InputError where that is nothing."""
    if not chat.conversation.messages:
        raise InputError("there is no message yet")
    return chat.conversation.messages[-2]["content"]


def _again(chat: Chat, text: str) -> None:
    """Take the last turn back and answer this instead; where that fails, the turn stays."""
    before, replies = chat.conversation, chat.replies
    chat.conversation = before.copy()
    chat.conversation.undo()
    try:
        chat.reply(text)
    finally:
        if chat.replies == replies:
            chat.conversation = before


def _compare(chat: Chat, text: str) -> None:
    """Answer `text` ('': the last message again) plainly and with drafts, side by side. The conversation stays as it is."""
    options = chat.options
    if options.needs_model and chat.pair.draft is None:
        raise InputError("nobody would draft: start the chat without --no-draft, or give /draft lookup")
    conversation = chat.conversation.copy()
    text = text or conversation.undo()
    if not text:
        raise InputError("there is no message yet; say one, or give it: /compare TEXT")
    prompt, _ = chat.fitting(conversation, text)
    runs = []
    for name, draft in (("plain", False), ("speculative", True)):
        run = chat.run(prompt, draft, name)
        if chat.stopped or not run.tokens:
            chat.view.say("the comparison was stopped")
            return
        runs.append(run)
    chat.view.side_by_side(runs, options.colour)
    chat.view.say(_verdict(*runs, seeded=options.temperature == 0.0 or options.seed is not None))


def _verdict(plain: Tally, speculative: Tally, *, seeded: bool) -> str:
    times = f"{speculative.counts.token_rate / plain.counts.token_rate:.2f}x plain"
    if plain.tokens == speculative.tokens:
        said = f"the same {len(plain.tokens)} tokens"
    elif not seeded:
        said = "other words, as of any two draws; /set seed 1 draws the same ones"
    else:
        said = f"the texts part at token {common_length(plain.tokens, speculative.tokens) + 1}"
    return f"{times} · {said} · one run each; edgespec bench measures with intervals"


def _save(chat: Chat, file: str) -> None:
    with _path("/save", file) as path:
        written = saved.save(chat.conversation, chat.pair.manifest.target.name, path)
    words = f"wrote {many(written, 'turn')} to {file}"
    if missing := len(chat.conversation.messages) // 2 - written:
        most = byte_size(saved.MAX_BYTES)
        chat.view.say(f"{words}; the oldest {missing} are not in it: a file has {most} at most")
    else:
        chat.view.note(words)


def _load(chat: Chat, file: str) -> None:
    with _path("/load", file) as path:
        words = saved.load(chat.conversation, path)
    chat.on_change()
    chat.view.note(words)


@contextmanager
def _path(command: str, file: str) -> Iterator[Path]:
    """The file of a command. A name that no file can have, or one below a file, is the user's mistake and ends no chat."""
    if not file:
        raise InputError(f"{command} takes a file: {command} chat.json")
    try:
        yield Path(file).expanduser()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{file[:200]!r} cannot be used: {error}; give the name of a .json file") from error


def _clear(chat: Chat, _: str) -> None:
    chat.conversation.reset()
    chat.on_change()
    chat.view.note("the conversation is empty")


def _stats(chat: Chat, _: str) -> None:
    totals = chat.totals
    if not totals.emitted:
        chat.view.say("no replies yet")
        return
    parts = (
        ("drafter", totals.draft_seconds),
        ("target", totals.verify_seconds),
        ("loop", totals.loop_seconds),
    )
    shares = ", ".join(f"{name} {seconds / totals.total_seconds:.0%}" for name, seconds in parts)
    lines = [
        f"replies {chat.replies}, tokens {totals.emitted}, {totals.token_rate:.1f} tok/s",
        f"time    {shares}",
    ]
    # a chat that was loaded is counted with its next message
    if chat.conversation.ids or not chat.conversation.messages:
        lines.append(f"context {min(len(chat.conversation.ids), chat.context)} of {chat.context} tokens")
    lines.append(f"now     {chat.state()}{'; ' * bool(chat.last.off)}{chat.last.off}")
    if totals.drafted:
        tests = zip(totals.accepted, totals.tested, strict=True)
        places = ", ".join(f"{accepted / tested:.2f}" for accepted, tested in tests if tested)
        lines.append(
            f"{tau_of(totals)}α {totals.acceptance_rate:.2f} (in the block: {places}); "
            f"{sum(totals.accepted)}/{totals.drafted} drafted accepted"
        )
    chat.view.say("\n".join(lines))


def _exit(chat: Chat, _: str) -> None:
    chat.leaving = True


def _knobs(argument: str) -> list[str]:
    name, value = parted(argument)
    if argument == name.strip() and not value:
        return list(SETTABLE)
    return [f"{name} {choice}" for choice in choices_of(name)]


DRAFTS = {
    "on": {"drafter": "auto", "draft": "on"},
    "off": {"draft": "off"},
    **{name: {"drafter": name, "draft": "on"} for name in (MODEL, LOOKUP, HYBRID)},
}
"""What /draft sets."""
COMMANDS = (
    Command(("/help", "/?"), "", "this list", _help),
    Command(("/system",), "TEXT", "set the system prompt; without TEXT remove it", _system),
    Command(
        ("/set",), "KNOB VALUE", "change a knob: temperature 0.7; without KNOB list them all", _set, _knobs
    ),
    Command(
        ("/draft",), "|".join(DRAFTS), "who drafts: the drafter model, nobody, prompt lookup, or both", _draft
    ),
    Command(("/gamma",), "N|auto", "draft tokens in a block, or chosen by what they cost", _gamma),
    Command(
        ("/rule",), "NAME", "acceptance rule; without NAME list them", _rule, lambda given: ["auto", *RULES]
    ),
    Command(
        ("/compare",), "[TEXT]", "the last message, or TEXT, plain and speculative side by side", _compare
    ),
    Command(("/regenerate", "/retry"), "", "answer the last message again", _regenerate),
    Command(("/edit",), "[TEXT]", "change the last message and have it answered again", _edit),
    Command(("/save",), PATH, "write the conversation to a file", _save),
    Command(("/load",), PATH, "go on with the conversation of a file", _load),
    Command(("/clear", "/reset"), "", "forget the conversation; the system prompt stays", _clear),
    Command(("/stats",), "", "speed and acceptance since the start", _stats),
    Command(("/exit", "/quit", "/bye"), "", "leave", _exit),
)
BY_NAME = {name: command for command in COMMANDS for name in command.names}
