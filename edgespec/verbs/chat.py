"""Talk to a bundle: replies stream, and the KV cache lives from turn to turn. /help lists what a chat can do.

Without a bundle, those found on this machine are listed to choose from. In a pipe every line of standard input is a message (or
a command) and only replies go to standard output.
"""

from __future__ import annotations

import sys
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.options import shell_line
from edgespec.core.table import table
from edgespec.verbs.found_bundles import Found, found
from edgespec.verbs.ready import bundle_of


def __getattr__(name: str) -> Any:
    """cli.py reads `Options`. They are the runtime's, which edgespec imports only where it is needed."""
    if name != "Options":
        raise AttributeError(name)
    from edgespec_runtime.chat.settings import Options

    return Options


def run(given: dict[str, Any]) -> int:
    from edgespec_runtime.chat import chat

    if not given.get("bundle"):
        given = {**given, "bundle": bundle_of(choose(found()))}
    return chat.run(given)


def choose(bundles: list[Found]) -> str:
    """The bundle that a person chooses from a list with numbers. Raises InputError for no choice, and where nobody is there."""
    if not sys.stdin.isatty():
        first = next((bundle.name for bundle in bundles if not bundle.missing), "BUNDLE")
        names = ", ".join(bundle.name for bundle in bundles) or "none"
        command = shell_line("edgespec", "chat", first)
        raise InputError(f"no bundle was named; found: {names}. Name one: {command}")
    if not bundles:
        raise InputError(
            "no bundle was found in this folder and its build folders, and there is no ready pair; make one with "
            "edgespec build-drafter, or fetch one with edgespec pull"
        )
    numbered = {str(number): bundle for number, bundle in enumerate(bundles, 1)}
    rows = [(number, bundle.name, bundle.about) for number, bundle in numbered.items()]
    print(table(("", "bundle", "what it is"), rows, left=3), file=sys.stderr)
    by_answer = {bundle.name: bundle for bundle in bundles} | numbered
    while True:
        print(f"Which one? [1-{len(bundles)}, Enter for 1] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.buffer.readline().decode("utf-8", "replace")
        if not answer:  # Ctrl-D
            print(file=sys.stderr)
            raise InputError("no bundle was chosen")
        chosen = by_answer.get(answer.strip() or "1")
        if chosen is not None and not chosen.missing:
            return chosen.name
        print(
            chosen.missing if chosen else f"there is no {answer.strip()[:40]!r}; give a number",
            file=sys.stderr,
        )
