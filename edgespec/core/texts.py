"""Text from outside that does harm: what UTF-8 cannot write, YAML that fills memory, escape codes that a terminal would obey.

UTF-8 cannot write half of a surrogate pair, as JSON's \\ud83d without its other half, or an argument's odd byte. Python reads
such text without a word and fails where it is written or tokenised, which may be hours later.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from itertools import chain
from math import isfinite
from typing import IO, Any

from edgespec.core.errors import InputError

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_UPPER = range(127, 160)  # control characters that JSON does not escape
_HARMFUL = {code: "\ufffd" for code in (*range(32), *_UPPER) if chr(code) not in "\n\t"}
_HARMFUL[ord("\r")] = ""  # Windows ends its lines with it
_AROUND = 20  # characters shown on both sides
MOST_BRACKETS = 500  # of a YAML file that people write by hand
LONGEST_NUMBER = 100  # characters of one there


def unwritable(value: Any, where: str = "") -> str:
    """Where in a JSON value, and in which text, UTF-8 cannot write a character; '' where it can write all of it.

    `where`: the value's own place in a larger one.
    """
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            part = value[max(0, error.start - _AROUND) : error.end + _AROUND]
            return f"{where.lstrip('.') or 'the text'} has {part!r}"
    elif isinstance(value, dict):
        inside = chain((("a key", key) for key in value), ((f"{where}.{key}", value[key]) for key in value))
    elif isinstance(value, list | tuple):
        inside = ((f"{where}[{place}]", one) for place, one in enumerate(value))
    return next(filter(None, (unwritable(one, place) for place, one in inside)), "")


def parse_yaml(data: bytes, where: str) -> Any:
    """YAML that people write by hand, of plain types. Raises InputError naming `where`.

    What would fill memory or take hours is refused: aliases (ten short lines of them can stand for a value of ten thousand
    million items), many brackets (PyYAML takes seconds for a thousand within each other), and long numbers (it reads 1:2:3 in
    base 60, in a time that grows with the square). So is a key that stands twice, of which PyYAML would keep the last one.
    """
    import yaml  # only now: --help does not wait for it

    try:
        text = data.decode("utf-8-sig")
        if (opened := sum(map(text.count, "[{"))) > MOST_BRACKETS:
            raise InputError(f"{where} opens {opened} brackets; at most {MOST_BRACKETS} are read")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{where} has a YAML alias (*name); write the value out")
        loader = yaml.SafeLoader(text)
        if (node := loader.get_single_node()) is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError) as error:  # PyYAML's, of `!!bool maybe`
        raise InputError(
            f"{where} has a tag (!!bool, !!int, ...) before a value of another kind; leave the tag out"
        ) from error
    except RecursionError as error:
        raise InputError(
            f"{where} is nested too deeply; an option is a section, a name and a value"
        ) from error


def _check_nodes(root: Any, where: str) -> None:
    """Raise InputError where a mapping of a YAML document has a key twice, or a number is long."""
    nodes = [root]
    for node in nodes:  # which grows: as deep as the document
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise InputError(
                f"{where} has a number of {len(node.value):,} characters in line {node.start_mark.line + 1}; at most "
                f"{LONGEST_NUMBER} are read"
            )
        if node.id == "sequence":
            nodes += node.value
        if node.id != "mapping":
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            nodes += key, value
            if key.id != "scalar":  # PyYAML refuses it
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise InputError(
                    f"{where} has the key {key.value!r} in line {lines[key.value]} and again in line {line}; give it once"
                )
            lines[key.value] = line


def check_text(value: Any, where: str) -> None:
    """Raise InputError where a text in a JSON value cannot be written as UTF-8. `where`: file and row."""
    if found := unwritable(value):
        raise InputError(
            f"{where}: {found}, which holds half a character (a lone surrogate); write the whole character or remove it"
        )


def check_json(line: str, value: Any, where: str) -> None:
    """`check_text` of what was read from a line of JSON, which holds half a character only where the line escapes one."""
    if _ESCAPED.search(line):
        check_text(value, where)


def printable_json(value: Any, stream: IO[str]) -> str:
    """JSON for a stream: readable where that is UTF-8, escaped where it could not show every character.

    Control characters are escaped everywhere: a terminal would obey those that JSON takes as they are.
    """
    import json  # only now: --help does not wait for it

    value = without_nan(value)
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    text = json.dumps(value, indent=2, ensure_ascii=not encoding.startswith("utf"))
    return text.translate({code: f"\\u{code:04x}" for code in _UPPER})  # they stand in strings alone


def without_nan(value: Any) -> Any:
    """A JSON value with null for what is no number: JSON has no NaN, and most readers refuse one."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    return [without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def forgive_streams() -> None:
    """Let this program print what its output cannot encode: with replacement characters instead of an exception.

    A file or a pipe on Windows gets UTF-8, as everywhere else, unless PYTHONIOENCODING names another encoding. A stream that
    was closed from the start (2>&-) is the null device: Python has None there, and the next file would get its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for the rest of the program)
    chosen = sys.platform != "win32" or "PYTHONIOENCODING" in os.environ
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors=errors, encoding=None if chosen or stream.isatty() else "utf-8")


def end_lines_as_unix() -> None:
    """Standard output ends its lines with a newline alone: bash on Windows takes a carriage return before it for text."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(newline="\n")


def draws(stream: IO[str]) -> bool:
    """Whether escape codes are wanted there: a terminal, not a dumb one, and NO_COLOR is unset (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def obeys(stream: IO[str]) -> bool:
    """`draws`, and the terminal obeys the codes as they are. Windows' old console shows them; rich draws there without them."""
    if not draws(stream):
        return False
    from rich.console import Console  # only now: --help does not wait for it

    return not Console(file=stream).legacy_windows


def harmless(text: str) -> str:
    """Text without control characters but newline and tab: a model can write escape codes, and a terminal would obey them."""
    return text.translate(_HARMFUL)
