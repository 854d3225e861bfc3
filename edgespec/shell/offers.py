"""What may stand at the cursor of a command line. Knows no shell, and the verbs from grammar.json alone.

That file is made of the parsers, which take up to a second to import: python -m edgespec.completion > edgespec/shell/grammar.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.core.texts import end_lines_as_unix

GRAMMAR = Path(__file__).with_name("grammar.json")
FILE, FOLDER = "file", "directory"


@dataclass(frozen=True)
class Slot:
    """What a flag or an argument takes: one of these words, a path of this kind ('' for none), or a list of them with commas.

    ends: how a word must end to be the value of a flag that may stand alone.
    """

    words: Sequence[str] = ()
    path: str = ""
    many: bool = False
    ends: str = ""

    def offer(self, begun: str, typed: str) -> Offer:
        """What may stand where a value has begun. typed: the shell's word, in which a flag may stand before the value."""
        *chosen, part = begun.split(",") if self.many else [begun]
        left = {word: "" for word in self.words if word not in chosen}
        return Offer(left, self.path, max(0, len(typed) - len(part)), self.many)


@dataclass(frozen=True)
class Offer:
    """What may stand for a word: these words and paths, behind its first `taken` characters.

    words: word -> help; a flag that takes a value ends with =. paths: FILE, FOLDER or ''. more: a list with commas may go on.
    """

    words: dict[str, str]
    paths: str = ""
    taken: int = 0
    more: bool = False


def answer(words: Sequence[str]) -> int:
    """Print what may stand for the last word, nothing for a broken question: an error would show in the line being typed."""
    try:
        offer = offered(words)
    except Exception:
        return 1
    end_lines_as_unix()
    print(offer.paths or "none", offer.taken, "more" if offer.more else "one")
    for word, help in offer.words.items():
        print(word, help, sep="\t")
    return 0


def offered(words: Sequence[str]) -> Offer:
    """What may stand for the last of the words behind `edgespec`, the one at the cursor. Raises KeyError for an unknown verb."""
    grammar: dict[str, Any] = json.loads(GRAMMAR.read_text(encoding="utf-8"))
    if len(words) < 2:
        verbs = {name: verb["help"] for name, verb in grammar.items()}
        return Offer({**verbs, "--help": "show help", "--version": "show the version"})
    # bash parts words at = and :
    verb, *before, last = re.sub(r"\0([=:])(\0|$)", r"\1", "\0".join(words)).split("\0")
    flags, places = grammar[verb]["flags"], [Slot(**one) for one in grammar[verb]["places"]]
    slots = {name.rstrip("="): Slot(**one["takes"]) for name, one in flags.items() if "takes" in one}
    flag, sign, begun = last.partition("=")
    if sign and flag.startswith("--"):
        return slots[flag].offer(begun, words[-1])
    waiting: Slot | None = None
    place = 0
    for word in before:
        if waiting and word.endswith(waiting.ends):
            waiting = None
        else:
            waiting = slots.get(word)
            place += not word.startswith("--")
    if waiting and not waiting.ends:
        return waiting.offer(last, words[-1])
    if grammar[verb]["repeats"]:
        place = min(place, len(places) - 1)
    if last.startswith("-") or place >= len(places):
        offer = Offer({name: one["help"] for name, one in flags.items()})
    else:
        offer = places[place].offer(last, words[-1])
    return replace(offer, paths=waiting.path) if waiting and not last.startswith("-") else offer
