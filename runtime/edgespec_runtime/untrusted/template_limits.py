"""How much a chat template may do: time, work, sizes. Knows values and nothing of templates; template.py asks it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from jinja2.runtime import Undefined

MAX_SECONDS = 2.0
MAX_OUTPUT = 4_000_000  # characters of one value and of the whole text
MAX_WORK = 64_000_000
MAX_DEPTH = 32
MAX_NUMBER = 1_000_000  # as an argument: a width, a count, an indent
MAX_BITS = 4_096
STEP = 64
ITEM = 16  # a place in a container, against 1 for a character


class TemplateLimit(Exception):
    """A bound was passed; the message says which."""


class Meter:
    """What one rendering has used. Raises TemplateLimit beyond `MAX_WORK`, `MAX_SECONDS` or `MAX_OUTPUT` characters."""

    def __init__(self) -> None:
        self.work = 0
        self.output = 0
        self.until = time.monotonic() + MAX_SECONDS

    def spend(self, work: int) -> None:
        self.work += work + STEP
        if self.work > MAX_WORK:
            raise TemplateLimit(f"it did {self.work} steps' worth of work; at most {MAX_WORK} are done")
        if time.monotonic() > self.until:
            raise TemplateLimit(f"it ran longer than {MAX_SECONDS:g} s")

    def emit(self, characters: int) -> None:
        self.output += characters
        if self.output > MAX_OUTPUT:
            raise TemplateLimit(f"it wrote {self.output} characters; at most {MAX_OUTPUT} are taken")
        self.spend(characters)


def weight(value: Any, *, as_text: bool = False) -> int:
    """Characters and items of a value as if nothing in it were shared.

    Raises TemplateLimit beyond MAX_OUTPUT or MAX_DEPTH, and for what is no text, number, list or mapping: inside of a container,
    and with `as_text` everywhere (a namespace could hold itself twice, unseen).
    """
    total, level, depth = 0, [value], 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, str | bytes):
                total += len(one)
            elif isinstance(one, Mapping):
                total += 2 * ITEM * len(one)
                below.extend(one.keys())
                below.extend(one.values())
            elif isinstance(one, list | tuple | set | frozenset):
                total += ITEM * len(one)
                below.extend(one)
            elif isinstance(one, bool | float | None | Undefined):
                total += ITEM
            elif isinstance(one, int):
                if one.bit_length() > MAX_BITS:
                    raise TemplateLimit(f"it made a number of {one.bit_length()} bits; at most {MAX_BITS}")
                total += ITEM
            elif as_text or depth:
                raise TemplateLimit(f"it used a {type(one).__name__} as text or in a list; only plain values")
            if total > MAX_OUTPUT:
                raise TemplateLimit(f"it made a value of {total} characters and items; at most {MAX_OUTPUT}")
        level, depth = below, depth + 1
        if depth > MAX_DEPTH:
            raise TemplateLimit(f"it made a value nested deeper than {MAX_DEPTH}")
    return total


def check_numbers(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise TemplateLimit(f"it gave a number beyond {MAX_NUMBER} to a method or filter")


def check_bits(left: Any, right: Any, bits: Callable[[int, int], int]) -> None:
    if isinstance(left, int) and isinstance(right, int) and (size := bits(left, right)) > MAX_BITS:
        raise TemplateLimit(f"it computes a number of {size} bits; at most {MAX_BITS}")


def check_format(text: str, values: Any) -> None:
    """A format string can repeat a value, and ask for any width: in digits, or from an argument (*)."""
    size = len(text) + (text.count("%") + text.count("{")) * weight(values, as_text=True)
    if size > MAX_OUTPUT:
        raise TemplateLimit(f"it would format a text of {size} characters; at most {MAX_OUTPUT}")
    if len(text) > 4096 or re.search(r"\d{5}|%[^a-zA-Z%]*\*", text):
        raise TemplateLimit(f"it formats with {text[:80]!r}; at most 4096 characters and widths below 10000")


def check_fields(text: str) -> None:
    """A field of `str.format` may take its width from another one, which could be any."""
    if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text)):
        raise TemplateLimit(f"it formats with {text[:80]!r}; no fields inside of fields")
