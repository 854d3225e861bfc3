"""What was typed into chats, kept across starts: a file in the state folder with one JSON text a line. For its owner only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from edgespec.core.errors import InputError
from edgespec.core.files import whole_file

MOST_LINES = 1000  # that are kept: more than anyone steps back through
MAX_ENTRY = 16 * 1024  # characters of one that is kept; a longer one is a pasted file
MAX_BYTES = 4 * 1024 * 1024  # of the file that are read


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
