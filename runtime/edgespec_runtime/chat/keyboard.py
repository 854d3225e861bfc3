"""A person at the terminal who writes messages: editing, history, several lines, completion of commands and paths."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output

from edgespec.core.texts import check_text
from edgespec_runtime.chat.commands import BY_NAME, COMMANDS, PATH
from edgespec_runtime.chat.terminal import is_open


class Keyboard:
    """A person at the terminal.

    Args:
        history: what was typed earlier.
        input, output: the terminal's; standard error where standard output is none, since replies go there.
    """

    def __init__(self, history: History, input: Input | None = None, output: Output | None = None) -> None:
        if output is None and not sys.stdout.isatty():
            output = create_output(stdout=sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "" if wrapped else "| ",
            history=history,
            completer=Commands(),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            key_bindings=_keys(),
            input=input,
            output=output,
            reserve_space_for_menu=6,
        )

    def read(self, prefill: str = "") -> str | None:
        try:
            text = self._session.prompt(default=prefill)
        except EOFError:
            return None
        check_text(text, "what was typed")  # prompt_toolkit lets odd bytes through
        return text


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # takes the completion, and no more
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        """What was typed is thrown away; where nothing was, the chat decides."""
        if event.current_buffer.text:
            event.current_buffer.reset()
            event.app.exit(result="")
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


class Commands(Completer):
    """Names of commands, what may follow them, and paths."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if not before.startswith("/") or "\n" in before:
            return
        name, blank, argument = before.partition(" ")
        if not blank:
            for command in COMMANDS:
                if command.names[0].startswith(name):
                    yield Completion(command.names[0], -len(name), display_meta=command.help)
            return
        given = BY_NAME.get(name)
        if given is not None and given.argument == PATH:
            yield from self._paths.get_completions(Document(argument, len(argument)), complete_event)
        elif given is not None:
            for value in given.values(argument):
                if value.startswith(argument):
                    yield Completion(value, -len(argument))
