"""What a chat needs of the operating system: messages from a pipe, Ctrl-C as a request, keys that do not show.

No model, no tokens, and no drawing: screen.py draws, keyboard.py reads what a person types.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from edgespec.core.errors import InputError

QUOTES = '"""'
MAX_MESSAGE = 16 * 1024 * 1024  # bytes of a message from a pipe: as of generate's prompt
_LINE = "a line of standard input"


def typed(data: bytes, what: str) -> str:
    """UTF-8 bytes from a pipe as the text that was meant: Windows' byte order mark and line ends make no difference.

    Raises InputError, naming `what`, where they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8: {error}; send it as UTF-8 text") from error


def is_open(text: str) -> bool:
    """Whether a message began with three quotes and has not ended with them."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def unquoted(text: str) -> str:
    """A message without the quotes around it, and without the line ends beside them."""
    if not text.startswith(QUOTES) or is_open(text):
        return text
    return text[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


class Source(Protocol):
    def read(self, prefill: str = "") -> str | None:
        """The next message or command, None at the end of the input. `prefill`: what is there to be edited.

        Raises InputError for input that is no text; what follows it can be read. KeyboardInterrupt: Ctrl-C at an empty prompt.
        """


class Pipe:
    """Lines of standard input, one message each; between two lines of three quotes, several lines are one."""

    def read(self, prefill: str = "") -> str | None:
        text = self._line()
        if text is None or not is_open(text):
            return text
        lines, size = [text], len(text)
        while len(lines) == 1 or not lines[-1].rstrip().endswith(QUOTES):
            line = self._line()
            if line is None:
                raise InputError(f'{_LINE} opens a message with """ that does not end; close it with """')
            size += len(line)
            if size > MAX_MESSAGE:
                raise InputError(f"a message exceeds {MAX_MESSAGE} bytes; shorten it")
            lines.append(line)
        return "\n".join(lines)

    @staticmethod
    def _line() -> str | None:
        data = sys.stdin.buffer.readline(MAX_MESSAGE + 1)
        if len(data) > MAX_MESSAGE:
            while not data.endswith(b"\n") and (data := sys.stdin.buffer.readline(MAX_MESSAGE)):
                pass
            raise InputError(f"{_LINE} exceeds {MAX_MESSAGE} bytes; shorten it")
        return typed(data, _LINE).rstrip("\r\n") if data else None


@contextmanager
def interruptible(enabled: bool) -> Iterator[Callable[[], bool]]:
    """Ctrl-C is only noted, so that no cache is left half-written; the third one leaves. Yields whether it was pressed."""
    pressed = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed == 3:  # the engine hangs, or the user is in earnest
            raise SystemExit(130)

    before = signal.signal(signal.SIGINT, note) if enabled else None
    try:
        yield lambda: pressed > 0
    finally:
        if enabled:
            signal.signal(signal.SIGINT, before)


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Keys that are pressed meanwhile do not show on the terminal; they are read by whoever reads next. Ctrl-C works as ever."""
    try:
        import termios

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):  # not on every platform, and no terminal in a test
        yield
        return
    except termios.error:
        yield
        return
    without = [*before]
    without[3] &= ~termios.ECHO
    termios.tcsetattr(number, termios.TCSANOW, without)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
