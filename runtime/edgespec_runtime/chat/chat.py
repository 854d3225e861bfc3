"""The chat from its first line to its last: what it reads, what shows it, what is kept. The verb: edgespec/verbs/chat.py."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.options import from_mapping
from edgespec.core.texts import draws, harmless
from edgespec_runtime.chat.commands import handle
from edgespec_runtime.chat.saved import LastChat, state_folder
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.chat.terminal import Read, piped
from edgespec_runtime.chat.view import View
from edgespec_runtime.decoding.options import MODEL
from edgespec_runtime.pair.bundle import open_pair
from edgespec_runtime.pair.device_defaults import named_manifest, with_device_defaults


def talk(chat: Chat, read: Read) -> int:
    """Read and answer until the input ends. Returns the exit code: in a pipe 2 where something could not be answered."""
    failed = asked_to_leave = False
    while not chat.leaving:
        try:
            text = read(chat.prefill or "")
        except InputError as error:
            failed = True
            chat.view.say(str(error))
            continue
        except KeyboardInterrupt:
            if not chat.interactive:
                raise
            if asked_to_leave:
                break
            asked_to_leave, chat.prefill = True, None
            chat.view.note("(Ctrl-C again, Ctrl-D or /exit leaves)")
            continue
        if text is None:
            break
        chat.stopped = False
        try:
            handle(chat, text)
        except KeyboardInterrupt:  # between two lines of work: nothing to stop
            if not chat.interactive:
                raise
        except EdgespecError as error:
            failed = True
            chat.view.say(str(error))
        asked_to_leave = chat.stopped  # a Ctrl-C that stopped a reply is the first of the two that leave
    return 2 if failed and not chat.interactive else 0


def _view() -> View:
    """The one for standard output."""
    if not draws(sys.stdout):
        return View()
    from rich.console import Console

    from edgespec_runtime.chat.screen import Screen

    return Screen(Console(markup=False, highlight=False, emoji=False))


def _remember(chat: Chat) -> Path | None:
    """Keep the chat as it goes on, and go on with the last one where that is asked. Returns the state folder.

    None: the folder cannot be made, so the chat is not kept. Raises InputError where a chat to go on with cannot be read.
    """
    options, view = chat.options, chat.view
    if not (chat.interactive or options.continue_):
        return None
    try:
        folder = state_folder()
    except InputError as error:
        if options.continue_:
            raise
        view.say(f"(this chat is not kept: {error})")
        return None
    last = LastChat(chat.pair.manifest, folder)
    if options.continue_:
        view.note(last.resume(chat.conversation))
        if options.system:
            chat.conversation.system = options.system

    told = False

    def keep() -> None:
        nonlocal told
        try:
            last.keep(chat.conversation)
        except (InputError, OSError) as error:
            if not told:
                view.say(f"(this chat could not be kept: {error}; the next turn tries again)")
            told = True

    chat.on_change = keep
    return folder


def run(given: dict[str, Any]) -> int:
    manifest = named_manifest(given)
    options = from_mapping(Options, with_device_defaults(given, manifest))
    interactive = sys.stdin.isatty()
    with_draft = options.draft and options.needs_model
    with closing(open_pair(Path(options.bundle), options, with_draft, manifest)) as pair:
        chat = Chat(pair, options, interactive, _view())
        folder = _remember(chat)
        if interactive:
            _greet(chat)
        if caution := pair.measured_exactness().caution():
            chat.view.note(caution)
        if not interactive:
            return talk(chat, piped)
        from edgespec_runtime.chat.keyboard import Keyboard

        return talk(chat, Keyboard(None if folder is None else folder / "history.jsonl").read)


def _greet(chat: Chat) -> None:
    pair, options = chat.pair, chat.options
    drafter = "no drafter model"
    if pair.draft is not None:
        drafter = f"drafter c = {pair.cost_ratios['parameters']:.2%}"
    if options.draft and options.drafter not in (None, MODEL):
        drafter += f", {options.drafter}"
    name = pair.manifest.target.name
    chat.view.note(f"{harmless(name)}: {pair.backend} {pair.precision}, {drafter}. /help lists the commands.")
    if about := pair.about_context(options.context):
        chat.view.note(about)
    if options.draft and options.colour:
        chat.view.legend()
