"""What may stand where on the command line: verbs, their flags, and the words that a flag or an argument takes.

Read from a verb's parser and from the knobs that the parser is made of. Knows no shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.core.options import base_of, knobs_of

FILE, FOLDER = "file", "folder"
LONGEST_HELP = 72  # columns of a hint: two thirds of a usual terminal
_FREE = """
    arms device gpus host inference.model max_memory message name precision precisions prompt repo revision rule rules system
    system_prompts title url
"""
FREE = frozenset(_FREE.split())
"""Options of text that is no path; a shell that offered files here would mislead."""
FOLDERS = frozenset(
    ("bundle", "build", "out", "data", "models", "model", "drafter", "checkpoint", "tokenizer")
)
"""Options that take a folder; all other text is a file or a folder."""
Known = Mapping[str, Callable[[], Iterable[str]]]


@dataclass(frozen=True)
class Slot:
    """What a flag or an argument takes: these words, a path of this kind ('' for none), one of them or a list with commas."""

    name: str
    words: tuple[str, ...] = ()
    path: str = ""
    many: bool = False


@dataclass(frozen=True)
class Flag:
    """One option under all its names; `slot` is None for a switch. `alone`: it may stand without a value."""

    names: tuple[str, ...]
    help: str
    slot: Slot | None
    alone: bool = False


@dataclass(frozen=True)
class VerbGrammar:
    """A verb's flags and the places of its arguments; the last place may be taken again where `repeats`."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    places: tuple[Slot, ...]
    repeats: bool

    @property
    def slots(self) -> Iterator[tuple[str, Slot, bool]]:
        """(flag or number of the place, what it takes, whether it may stand alone) of all that take something."""
        for flag in self.flags:
            if flag.slot is not None:
                yield from ((name, flag.slot, flag.alone) for name in flag.names)
        yield from ((str(place), slot, False) for place, slot in enumerate(self.places, 1))

    @property
    def switches(self) -> str:
        """The flags that need no value, with spaces."""
        return " ".join(name for flag in self.flags for name in flag.names if flag.slot is None or flag.alone)


def grammar_of(
    name: str, help: str, kind: type[Any], parser: argparse.ArgumentParser, known: Known
) -> VerbGrammar:
    """One verb's. known: option -> the names that it takes, such as those of targets."""
    knobs = dict(knobs_of(kind))
    flags: list[Flag] = []
    places: list[Slot] = []
    repeats = False
    for action in parser._actions:
        about, names = knobs.get(action.dest), tuple(action.option_strings)
        slot = None if about is None or action.nargs == 0 else _slot(action.dest, *about, known)
        if names:
            flags.append(Flag(names, _short(action.help or ""), slot, action.nargs == "?"))
        elif slot is not None:
            places.append(slot)
            repeats = action.nargs == "*"
    return VerbGrammar(name, _short(help), tuple(flags), tuple(places), repeats)


def _slot(dotted: str, hint: Any, knob: Any, known: Known) -> Slot:
    name = dotted.rpartition(".")[2]
    base, many, _ = base_of(hint)
    choices = knob.metadata.get("choices")
    if choices is not None:
        return Slot(name, tuple(str(one) for one in choices if one != ""), many=many)
    names = known.get(name) or knob.metadata["names"]
    words = tuple(word for word in names() if not set(word) & set(" ,'\""))
    takes = base is str and not {name, dotted} & FREE
    kind = (FOLDER if name in FOLDERS else FILE) if takes else ""
    return Slot(name, words, kind, many and not knob.metadata.get("positional"))


def _short(text: str) -> str:
    """A hint in one line: the beginning of a help text, without what a shell would read."""
    text = " ".join(text.replace("%%", "%").split())
    if len(text) > LONGEST_HELP:
        text = text[: LONGEST_HELP - 3].rpartition(" ")[0].rstrip(",;:(") + "..."
    return text
