"""A person at the terminal who writes messages: editing, several lines, completion of commands and paths, and a history that is
kept across starts in a file for its owner only, with one JSON text a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output

from edgespec.core.errors import InputError
from edgespec.core.files import whole_file
from edgespec.core.texts import check_text
from edgespec_runtime.chat.commands import BY_NAME, COMMANDS, PATH
from edgespec_runtime.chat.terminal import is_open

MOST_LINES = 1000  # that are kept: more than anyone steps back through
MAX_ENTRY = 16 * 1024  # characters of one that is kept; a longer one is a pasted file
MAX_BYTES = 4 * 1024 * 1024  # of the file that are read


class Keyboard:
    """A person at the terminal.

    Args:
        history: the file of what was typed earlier; None keeps it as long as the chat lasts.
        input, output: the terminal's; standard error where standard output is none, since replies go there.
    """

    def __init__(
        self, history: Path | None, input: Input | None = None, output: Output | None = None
    ) -> None:
        if output is None and not sys.stdout.isatty():
            output = create_output(stdout=sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "" if wrapped else "| ",
            history=InMemoryHistory() if history is None else ChatHistory(history),
            completer=Commands(),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            key_bindings=_keys(),
            enable_suspend=True,
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
    in_message = has_focus(DEFAULT_BUFFER)  # and not in the field of a search, which has keys of its own

    @keys.add("enter", filter=in_message)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # takes the completion, and no more
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_message)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=in_message)
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

    _paths = PathCompleter(expanduser=True)

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


class ChatHistory(History):
    """History of the prompt, newest last in `path`. Where the file cannot be used, it lasts as long as the chat."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """Newest first. A file that has grown beyond the bounds is written anew, shorter."""
        lines, whole = self._read()
        if len(lines) > MOST_LINES or not whole:
            lines = lines[-MOST_LINES:]
            self._rewrite(lines)
        return list(reversed(lines))

    def store_string(self, string: str) -> None:
        if len(string) > MAX_ENTRY:
            return
        line = json.dumps(string) + "\n"  # escapes: also what UTF-8 cannot write is kept as it was typed
        with suppress(OSError), open(self._path, "ab", buffering=0, opener=_owners) as stream:
            stream.write(line.encode())

    def _read(self) -> tuple[list[str], bool]:
        """(the lines that are texts, whether that is all there was)."""
        try:
            if not self._path.is_file():
                return [], True
            with open(self._path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, size - MAX_BYTES))
                data = stream.read(MAX_BYTES)
        except OSError:
            return [], True
        lines = []
        for line in data.splitlines():
            with suppress(ValueError, RecursionError):  # cut off, or not ours
                text = json.loads(line)
                if isinstance(text, str) and len(text) <= MAX_ENTRY:
                    lines.append(text)
        return lines, size <= MAX_BYTES

    def _rewrite(self, lines: list[str]) -> None:
        with (
            suppress(InputError, OSError),  # a full disk, a forbidden folder
            whole_file(self._path) as temporary,
            open(temporary, "x", encoding="utf-8", opener=_owners) as stream,
        ):
            stream.writelines(json.dumps(line) + "\n" for line in lines)


def _owners(path: str, flags: int) -> int:
    """Opens a file that is its owner's alone where it is new."""
    return os.open(path, flags, 0o600)
