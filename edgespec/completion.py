"""Print a script that makes your shell complete verbs, options, their values, and the names of targets and ready pairs.

    edgespec completion bash > ~/.local/share/bash-completion/completions/edgespec

Made from the parsers, so print it again after an update. docs/shell.md has the line for each shell.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from edgespec.cli import VERBS, parser_of
from edgespec.core.options import from_mapping, knob
from edgespec.shell.grammar import Known, VerbGrammar, grammar_of

SHELLS = ("bash", "zsh", "fish", "powershell")


@dataclass(frozen=True)
class Options:
    shell: str = knob(help="the shell: {names}", choices=SHELLS, names=lambda: SHELLS, positional=True)


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    script = importlib.import_module(f"edgespec.shell.{options.shell}").script
    print(script(grammar()), end="")
    return 0


def grammar() -> list[VerbGrammar]:
    """Every verb's."""
    from edgespec.recipe.precisions import PRECISIONS
    from edgespec.recipe.shipped import launch_files, shipped_recipes
    from edgespec.recipe.targets import TARGETS
    from edgespec.verbs.ready import ready_folders

    def precisions() -> Iterable[str]:
        return dict.fromkeys(name for names in PRECISIONS.values() for name in names)

    def targets() -> Iterable[str]:
        return TARGETS

    known: Known = {
        "bundle": ready_folders,
        **dict.fromkeys(("precision", "precisions"), precisions),
        **dict.fromkeys(("target", "teacher", "shape", "synthetic"), targets),
    }
    own: dict[str, Known] = {
        "targets": {"name": targets},
        "recipes": {"names": lambda: [*shipped_recipes(), *launch_files()]},
        "export": {"target": tuple},  # a folder here, no alias
        "other-engines": {"target": tuple},
    }
    found = []
    for name, verb in VERBS.items():
        module, parser = parser_of(name)
        found.append(grammar_of(name, verb.help, module.Options, parser, {**known, **own.get(name, {})}))
    return found
