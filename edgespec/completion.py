"""Print a script that makes your shell complete verbs, options, their values, and the names of targets and ready pairs.

    edgespec completion bash > ~/.local/share/bash-completion/completions/edgespec

At each TAB the script asks this program, so an update needs no new one. docs/shell.md has the line for each shell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from edgespec.cli import VERBS, parser_of
from edgespec.core.options import base_of, from_mapping, knob, knobs_of
from edgespec.core.texts import end_lines_as_unix
from edgespec.shell.offers import FILE, FOLDER, Slot
from edgespec.shell.stubs import STUBS

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


@dataclass(frozen=True)
class Options:
    shell: str = knob(help="the shell: {names}", choices=tuple(STUBS), names=lambda: STUBS, positional=True)


def run(given: dict[str, Any]) -> int:
    text = STUBS[from_mapping(Options, given).shell]
    end_lines_as_unix()
    print(text, end="")
    return 0


def grammar() -> str:
    """shell/grammar.json: a line for each verb, with its flags and the places of its arguments."""
    lines = (f'"{name}": {json.dumps(_verb(name), ensure_ascii=False)}' for name in VERBS)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _verb(name: str) -> dict[str, Any]:
    module, parser = parser_of(name)
    knobs, known = dict(knobs_of(module.Options)), _known(name)
    flags: dict[str, Any] = {}
    places, repeats = [], False
    for action in parser._actions:
        about: dict[str, Any] = {"help": _short(action.help or "")}
        if action.dest in knobs and action.nargs != 0:
            slot = _slot(action.dest, *knobs[action.dest], known)
            about["takes"] = {key: value for key, value in vars(slot).items() if value}
        if not action.option_strings:
            places.append(about["takes"])
            repeats = action.nargs == "*"
        needs = "=" * (action.nargs is None)
        flags |= {flag + needs: about for flag in action.option_strings if flag.startswith("--")}
    return {"help": _short(VERBS[name].help), "places": places, "repeats": repeats, "flags": flags}


def _slot(dotted: str, hint: Any, knob: Any, known: dict[str, Iterable[str]]) -> Slot:
    name = dotted.rpartition(".")[2]
    base, many, _ = base_of(hint)
    many = many and not knob.metadata.get("positional")
    if (choices := knob.metadata.get("choices")) is not None:
        return Slot([str(one) for one in choices if one != ""], "", many)
    names = known[name] if name in known else knob.metadata["names"]()
    words = [word for word in names if not set(word) & set(" ,'\"")]
    path = FOLDER if name in FOLDERS else FILE
    bare = knob.metadata.get("bare") or ("", "")
    return Slot(words, path if base is str and not {name, dotted} & FREE else "", many, bare[1])


def _known(verb: str) -> dict[str, Iterable[str]]:
    """Option -> the names that it takes, where its knob does not say them."""
    from edgespec.recipe.precisions import PRECISIONS
    from edgespec.recipe.shipped import launch_files, shipped_recipes
    from edgespec.recipe.targets import TARGETS
    from edgespec.verbs.ready import ready_folders

    precisions = dict.fromkeys(name for names in PRECISIONS.values() for name in names)
    own: dict[str, dict[str, Iterable[str]]] = {
        "targets": {"name": TARGETS},
        "recipes": {"names": [*shipped_recipes(), *launch_files()]},
        "export": {"target": ()},  # a folder here, no alias
        "other-engines": {"target": ()},
    }
    return {
        "bundle": ready_folders(),
        **dict.fromkeys(("precision", "precisions"), precisions),
        **dict.fromkeys(("target", "teacher", "shape", "synthetic"), TARGETS),
        **own.get(verb, {}),
    }


def _short(text: str) -> str:
    """A hint in one line: the beginning of a help text."""
    return shorten(text.replace("%%", "%"), LONGEST_HELP, placeholder=" ...", break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(grammar())
