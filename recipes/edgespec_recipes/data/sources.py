"""Rows of files and of hub datasets, one after the other: .jsonl, .jsonl.gz, .json, .parquet, hub:NAME.

Every text of a row can be written as UTF-8: a row with half a character (a lone surrogate) is refused here, by file and row.
Nothing is held whole in memory but a .json list, whose size is bounded. Knows nothing of what a row means, and runs no code that
comes with a dataset (datasets 4 and newer cannot).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, TypeVar

from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.files import MAX_JSON_BYTES, parse_json, read_json
from edgespec.core.texts import check_json, check_text
from edgespec.recipe.data_sources import HUB, HUB_FORM, ROW_FILES, parse_hub, source_files

_PART = 2**20  # characters
_BROKEN_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)
_PARQUET_BATCH = 8  # rows; a small file can repeat one huge value in all of them

T = TypeVar("T")
Numbered = Iterator[tuple[str, dict[str, Any]]]
"""Rows with where each is from, for messages: `file:3`, or `hub:NAME row 3`."""


def in_turn(parts: Iterable[Iterable[T]]) -> Iterator[T]:
    """One item of each part in turn, until all are at their end; no item is None."""
    for turn in zip_longest(*parts):
        yield from (item for item in turn if item is not None)


@contextmanager
def text_stream(file: Path) -> Iterator[TextIO]:
    """A UTF-8 file, or a gzip of one, for reading. Raises InputError where it is neither, naming the line that is not UTF-8."""
    try:
        with _opener(file)(file, "rt", encoding="utf-8-sig") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_line_not_utf8(file)} cannot be read as UTF-8 text: {error.reason}; save it as UTF-8"
        ) from error
    except _BROKEN_GZIP as error:
        raise InputError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _opener(file: Path) -> Any:
    return gzip.open if file.suffix == ".gz" else open


def _line_not_utf8(file: Path) -> str:
    """`file:line` of the first line that is not UTF-8: a stream that is decoded in chunks does not know it."""
    number = 1
    with (
        suppress(*_BROKEN_GZIP),  # it may be damaged, too
        _opener(file)(file, "rt", encoding="utf-8", errors="surrogateescape", newline="\n") as stream,
    ):
        while part := stream.read(_PART):  # a line may be longer than memory
            wrong = re.search("[\udc80-\udcff]", part)
            number += part.count("\n", 0, wrong.start() if wrong else None)
            if wrong:
                return f"{file}:{number}"
    return str(file)


def json_rows(file: Path, longest: int) -> Numbered:
    """Every line of a .jsonl file as an object.

    Raises InputError naming the line: no JSON object, over `longest` characters, half a character.
    """
    with text_stream(file) as stream:
        number = 0
        while line := stream.readline(longest + 1):
            number += 1
            where = f"{file}:{number}"
            if len(line) > longest:
                raise InputError(
                    f"{where} is longer than {longest:,} characters; split it into rows below that"
                )
            if not line.strip():
                continue
            row = parse_json(line, where)
            if not isinstance(row, dict):
                hint = "; a file that is one list is named .json" if isinstance(row, list) else ""
                raise InputError(f"{where} is {str(row)[:60]!r}; each line must be a JSON object{hint}")
            check_json(line, row, where)
            yield where, row


def json_list(file: Path) -> Numbered:
    """Every item of a .json file that is one list. Raises InputError: too large, no list, an item that is no object."""
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise InputError(
            f"{file} has {size:,} bytes; above {MAX_JSON_BYTES:,} give .jsonl, one object in a line"
        )
    try:
        rows = read_json(file)
    except InputError as error:
        # json's words for a second value
        hint = (
            "; a file with one object in each line must be named .jsonl" if "Extra data" in str(error) else ""
        )
        raise InputError(f"{error}{hint}") from error
    if not isinstance(rows, list):
        raise InputError(
            f"{file} holds a {type(rows).__name__}; a .json file must be a list of objects (else name it .jsonl)"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"{file}:{number} is {str(row)[:60]!r}; each item must be a JSON object")
        check_text(row, f"{file}:{number}")
        yield f"{file}:{number}", row


def parquet_rows(file: Path, longest: int, column: str | None = None) -> Numbered:
    """Every row of a .parquet file, of one column or all.

    Raises InputError (damaged, no such column, a row that cannot have at most `longest` characters), MissingExtra.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtra("pyarrow", "data", f"reading {file.name}") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column is not None and column not in names:
                raise InputError(f"{file} has the columns {', '.join(names)}; it needs {column!r}")
            for batch in table.iter_batches(_PARQUET_BATCH, columns=[column] if column else None):
                for place in range(len(batch)):
                    number += 1
                    yield f"{file}:{number}", _value(batch.slice(place, 1), longest, f"{file}:{number}")
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is no UTF-8
        raise InputError(
            f"{file} cannot be read as parquet after row {number}: {_one_line(error)}"
        ) from error


def _value(row: Any, longest: int, where: str) -> dict[str, Any]:
    """A record batch of one row as an object. Raises InputError where it is too long or not UTF-8."""
    if row.nbytes > 4 * longest:  # a character has at most four
        raise InputError(
            f"{where} has {row.nbytes:,} bytes; at most {4 * longest:,} are read: split it into rows"
        )
    try:
        [value] = row.to_pylist()
    except UnicodeDecodeError as error:  # Arrow does not look at the bytes it reads
        raise InputError(f"{where} has a text that is not UTF-8: {error.reason}") from error
    except (ArithmeticError, ValueError) as error:  # a date of year 146,000
        raise InputError(
            f"{where} has a value that Python cannot hold: {_one_line(error)}; leave its column out"
        ) from error
    return dict(value)


def hub_rows(source: str) -> Numbered:
    """Every row of a hub dataset (or of a local folder in its form), streamed.

    Raises InputError where it cannot be had, MissingExtra.
    """
    try:
        import datasets
        from huggingface_hub.utils import logging as hub_logging
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "datasets", "data", f"reading {source}") from error
    hub = parse_hub(source)
    datasets.disable_progress_bars()
    hub_logging.set_verbosity_error()  # its retries are no news; what comes of them is
    number = 0
    try:
        # absolute: `text` or `json` alone is to datasets a reader of the files in the current folder
        path = hub.name if hub.folder is None else str(hub.folder.absolute())
        for row in datasets.load_dataset(path, hub.configuration, split=hub.split, streaming=True):
            number += 1
            check_text(row, f"{source} row {number}")
            yield f"{source} row {number}", row
    except InputError:
        raise
    except ConnectionError as error:
        raise InputError(
            f"{source} cannot be reached ({_one_line(error)}); check the name and the network, or give local files"
        ) from error
    # datasets raises of its own, of fsspec's, of the HTTP client's and of every file format's
    except Exception as error:
        after = f" after row {number}" if number else ""
        raise InputError(
            f"{source} cannot be read{after}: {_one_line(error)}; the form is {HUB_FORM}, a NAME with configurations is "
            "OWNER/NAME/CONFIGURATION"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def read_rows(source: str, longest: int) -> Numbered:
    """Every row of one file or hub dataset. Raises InputError, MissingExtra.

    longest: characters of a row of .jsonl or .parquet; other rows have no bound here.
    """
    if source.startswith(HUB):
        yield from hub_rows(source)
        return
    for file in source_files(source, ROW_FILES):
        if file.name.endswith(".parquet"):
            yield from parquet_rows(file, longest)
        elif file.name.endswith(".json"):
            yield from json_list(file)
        else:
            yield from json_rows(file, longest)
