"""Plain text, document by document, from files, folders, hub datasets or the standard library. Knows no tokens.

A document is a row of .jsonl ('text'), .parquet ('text') or a hub dataset, or what lies between two <|endoftext|> marks of a .txt
file. Everything is read as a stream: one document at a time is in memory, and a very long one is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from edgespec.core.errors import InputError
from edgespec.recipe.data_sources import HUB, HUB_FORM, TEXT_FILES, parse_hub, source_files
from edgespec.recipe.schema import PYTHON_STDLIB
from edgespec_recipes.data.corpus import stdlib_corpus
from edgespec_recipes.data.sources import Numbered, hub_rows, in_turn, json_rows, parquet_rows, text_stream

SEPARATOR = "<|endoftext|>"
LONGEST = 2**22  # characters; a longer document is cut at a line end into several
_LONGEST_LINE = 16 * LONGEST  # of .jsonl, or a row of .parquet
_CHUNK = 2**20


def text_files(source: str) -> list[Path]:
    """The files a text source names: one file, a folder of them, or `python-stdlib`; none where it is on the hub.

    Raises InputError.
    """
    if source == PYTHON_STDLIB:
        return [stdlib_corpus() / "text.jsonl"]
    return source_files(source, TEXT_FILES)


def listed(source: str | Sequence[str]) -> tuple[str, ...]:
    """One source or several as several."""
    return (source,) if isinstance(source, str) else tuple(source)


def fingerprint(source: str | Sequence[str]) -> list[Any]:
    """What tells one state of a text source from another: every file's name, size and time of change; a hub dataset's name."""
    first, *more = listed(source)
    return [_fingerprint(one) for one in (first, *more)] if more else _fingerprint(first)


def _fingerprint(source: str) -> list[Any]:
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in text_files(source)]
    return [[source], *files] if source.startswith(HUB) else files


def read_documents(source: str | Sequence[str]) -> Iterator[str]:
    """Every document of a text source that is not blank, in the order of its files; of several sources one of each in turn.

    Raises InputError: no such source, a file that cannot be read, a row without text, no document at all; MissingExtra.
    """
    if not isinstance(source, str):
        yield from in_turn(map(read_documents, source))
        return
    empty = True
    for text in _documents(source):
        for piece in _cut(text):
            if piece.strip():
                empty = False
                yield piece
    if empty:
        raise InputError(f"the text {source!r} is empty; give text that fills a block at least")


def _documents(source: str) -> Iterator[str]:
    if source.startswith(HUB):
        field = parse_hub(source).field
        yield from _texts(hub_rows(source), field, f"; name another field with {HUB_FORM}")
        return
    for file in text_files(source):
        if file.name.endswith(".parquet"):
            yield from _texts(parquet_rows(file, _LONGEST_LINE, "text"), "text")
        elif ".jsonl" in file.name:
            yield from _texts(json_rows(file, _LONGEST_LINE), "text")
        else:
            with text_stream(file) as stream:
                for part in _between_marks(stream):
                    yield part.strip("\n")


def _texts(rows: Numbered, field: str, hint: str = "") -> Iterator[str]:
    for where, row in rows:
        if field not in row:
            raise InputError(f"{where} has the keys {', '.join(map(str, row))}; it needs {field!r}{hint}")
        text = row[field]
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError(f"{where} has a {field!r} that is no string: {str(text)[:60]!r}")
        yield text


def _between_marks(stream: TextIO) -> Iterator[str]:
    rest = ""
    while chunk := stream.read(_CHUNK):
        *whole, rest = (rest + chunk).split(SEPARATOR)
        yield from whole
        while len(rest) > LONGEST + len(SEPARATOR):  # the end may be half a mark
            head = next(_cut(rest))
            yield head
            rest = rest[len(head) :]
    yield rest


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most LONGEST characters that end at a line end where there is one; together they are the text."""
    at = 0
    while len(text) - at > LONGEST:
        end = text.rfind("\n", at, at + LONGEST) + 1 or at + LONGEST
        yield text[at:end]
        at = end
    yield text[at:]
