"""What a verb says: its result on standard output, as tables or as JSON, and notes on standard error.

`--json` prints JSON instead of the tables; `--json FILE.json` writes it to that file beside them. `--quiet` turns notes and
progress off. Results and errors stay.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from edgespec.core.files import write_json, write_text, writing
from edgespec.core.free_space import folder_at
from edgespec.core.options import knob, shell_line
from edgespec.core.texts import harmless, printable_json, without_nan

STANDARD_OUTPUT = "-"


@dataclass
class _Now:
    """How the running verb was asked to speak."""

    quiet: bool = False
    out: TextIO | None = None  # where JSON goes while the tables are not wanted


_now = _Now()


def json_knob() -> Any:
    """The `--json` of every verb that prints a table: '' (tables), '-' (JSON instead) or a file (both)."""
    return knob(
        "", "print JSON instead of tables; with a FILE.json, write it there and print the tables too",
        bare=(STANDARD_OUTPUT, ".json"),
    )  # fmt: skip


@contextmanager
def verb_output(json: str = "", *, quiet: bool = False) -> Iterator[None]:
    """A verb runs in this: what it prints is dropped where JSON takes its place, and notes are where they are not wanted."""
    global _now
    before = _now
    wanted = json == STANDARD_OUTPUT
    _now = _Now(quiet, sys.stdout if wanted else None)
    try:
        with ExitStack() as opened:
            if wanted:
                nowhere = opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
                opened.enter_context(redirect_stdout(nowhere))
            yield
    finally:
        _now = before


def check_place(name: str) -> None:
    """Raise InputError where no file `name` can be written: asked before what goes there is measured. It writes nothing.

    '' and '-' are no files.
    """
    if name in ("", STANDARD_OUTPUT):
        return
    place = Path(name).expanduser()
    with writing(place):
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a file is wanted")
        folder = next(filter(Path.exists, place.parents), folder_at(place))
        with TemporaryFile(dir=folder):  # the folders below it are made with the file
            pass


def write_result(json: str, found: Any, form: Callable[[Any], str] | None = None) -> None:
    """The verb's result as JSON, to where `json` says. `form` makes the text of a file, for a verb that has a form of its own."""
    if json == STANDARD_OUTPUT:
        out = _now.out or sys.stdout
        print(printable_json(found, out), file=out, flush=True)
    elif json:
        file, plain = Path(json).expanduser(), without_nan(found)
        if form is None:
            write_json(file, plain)
        else:
            write_text(file, form(plain))
        note(f"wrote {json}")


@contextmanager
def print_as_notes() -> Iterator[None]:
    """What is printed inside is no result of this verb: it goes where notes go."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere if is_quiet() else sys.stderr),
    ):
        yield


def is_quiet() -> bool:
    """Whether neither notes nor progress are wanted; of several processes only the first one speaks."""
    return _now.quiet or os.environ.get("RANK", "0") != "0"


def step(text: str) -> None:
    """A long verb begins a stage: a line among its tables, or where notes go when JSON replaces these."""
    if not is_quiet():
        print(harmless(text), file=sys.stderr if _now.out else sys.stdout, flush=True)


def next_step(*command: object) -> None:
    """The command that goes on from a verb's result, below it."""
    print(f"Next: {shell_line(*command)}", flush=True)


def note(text: str) -> None:
    """Tell the person who waits something that is no result."""
    if not is_quiet():
        print(harmless(text), file=sys.stderr, flush=True)
