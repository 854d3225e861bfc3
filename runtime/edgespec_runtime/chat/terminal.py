"""What a chat needs of the operating system: messages from a pipe, Ctrl-C as a request, keys that do not show.

No model, no tokens, and no drawing: screen.py draws, keyboard.py reads what a person types.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from edgespec.core.errors import InputError

QUOTES = '"""'
TEXT_COMMANDS = ("/system", "/compare", "/edit")  # what follows these may stand in quotes, as a message may
MAX_MESSAGE = 16 * 1024 * 1024  # bytes of a message from a pipe: as of generate's prompt
_LINE = "a line of standard input"
_END = 16  # bytes of each end of a line that is too long: enough to see a command and the quotes


def typed(data: bytes, what: str) -> str:
    """UTF-8 bytes from a pipe as the text that was meant: Windows' byte order mark and line ends make no difference.

    Raises InputError, naming `what`, where they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8: {error}; send it as UTF-8 text") from error


def is_open(text: str) -> bool:
    """Whether a message, or the text of a command, began with three quotes and has not ended with them."""
    name, *rest = text.split(maxsplit=1) or [""]
    text = (rest[0] if rest and name in TEXT_COMMANDS else text).strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def unquoted(text: str) -> str:
    """A message without the quotes around it, and without the line ends beside them."""
    if not text.startswith(QUOTES) or is_open(text):
        return text
    return text[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


Read = Callable[[str], str | None]
"""The next message or command, None at the end of the input, given what is there to be edited.

Raises InputError for input that is no text; what follows it can be read. KeyboardInterrupt: Ctrl-C at an empty prompt.
"""


def piped(prefill: str = "") -> str | None:
    """A `Read` of standard input: a line is a message; between two lines of three quotes, several lines are one.

    A message with a line that is refused is read to its end first: what follows is none of it.
    """
    text, wrong = _line()
    if text is not None and is_open(text):
        lines, size, ended = [text], len(text), False
        while not ended:
            line, error = _line()
            if line is None:
                raise wrong or InputError(
                    f'{_LINE} opens a message with """ that does not end; close it with """'
                )
            size += len(line)
            if size > MAX_MESSAGE:
                error = error or InputError(f"a message exceeds {MAX_MESSAGE} bytes; shorten it")
            wrong = wrong or error
            if wrong is None:
                lines.append(line)
            ended = line.rstrip().endswith(QUOTES)
        text = "\n".join(lines)
    if wrong is not None:
        raise wrong
    return text


def _line() -> tuple[str | None, InputError | None]:
    """The next line, None at the end of the input; and why it is refused: then only the ends of its text are true."""
    line = data = sys.stdin.buffer.readline(MAX_MESSAGE + 1)
    if not data:
        return None, None
    if len(data) <= MAX_MESSAGE:
        try:
            return typed(data, _LINE).rstrip("\r\n"), None
        except InputError as error:
            return data.decode("utf-8-sig", "replace"), error
    while not data.endswith(b"\n") and (data := sys.stdin.buffer.readline(MAX_MESSAGE)):
        line = line[:_END] + (line + data)[-_END:]
    return line.decode("utf-8-sig", "replace"), InputError(f"{_LINE} exceeds {MAX_MESSAGE} bytes; shorten it")


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
