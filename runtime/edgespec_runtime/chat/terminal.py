"""What a chat needs of the terminal: colours where they are wanted, lines of input, Ctrl-C as a request. No model, no tokens."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import IO, Any

from edgespec.core.errors import InputError
from edgespec.core.texts import check_text

_LINE = "a line of standard input"
_HARMFUL = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


def has_colour(stream: IO[str]) -> bool:
    """Whether escape codes are wanted there: a terminal, not a dumb one, and NO_COLOR is unset (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[22m" if text else ""


def harmless(text: str) -> str:
    """Text without control characters but newline and tab: a model can write escape codes, and a terminal would obey them."""
    return text.translate(_HARMFUL)


def typed(data: bytes, what: str) -> str:
    """UTF-8 bytes from a pipe as the text that was meant: Windows' byte order mark and line ends make no difference.

    Raises InputError, naming `what`, where they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8: {error}; send it as UTF-8 text") from error


class Lines:
    """Lines of standard input: with prompt, editing and history on a terminal, bare in a pipe."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with suppress(ImportError):  # not on every platform
                import readline  # noqa: F401  (importing it gives `input` its editing and history)

    def read(self, prompt: str) -> str | None:
        """The next line, None at the end of the input. KeyboardInterrupt passes through.

        Raises InputError for a line that is not UTF-8; the lines after it can be read.
        """
        if not self.interactive:
            data = sys.stdin.buffer.readline()
            return typed(data, _LINE).rstrip("\r\n") if data else None
        if not sys.stdout.isatty():  # replies go to a file: the prompt must not
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            line = input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"{_LINE} is not UTF-8: {error}; send it as UTF-8 text") from error
        check_text(line, _LINE)  # in the C locale Python lets odd bytes through
        return line


class Interrupt:
    """While entered, the first Ctrl-C only sets `requested`, so that no cache is left half-written; the third leaves."""

    def __init__(self, enabled: bool) -> None:
        self._pressed = 0
        self._enabled = enabled
        self._before: Any = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pressed += 1
        if self._pressed == 3:  # the engine hangs, or the user is in earnest
            raise SystemExit(130)

    @property
    def requested(self) -> bool:
        return self._pressed > 0

    def __enter__(self) -> Interrupt:
        if self._enabled:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            signal.signal(signal.SIGINT, self._before)
