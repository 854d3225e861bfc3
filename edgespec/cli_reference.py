"""The command line as Markdown, from the parsers themselves: docs/cli.md.

    python -m edgespec.cli_reference > docs/cli.md

A section of options that several verbs have (those of a recipe) is printed once, under the last of them. The parameters of
acceptance rules stand at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from edgespec.cli import VERBS, parser_of
from edgespec.core.errors import EXIT_CODES
from edgespec.core.options import add_flags
from edgespec.shell.environment import VARIABLES
from edgespec.shell.settings import EVERY, EveryVerb

HEAD = (
    "# Command line\n\n"
    "Written by `python -m edgespec.cli_reference > docs/cli.md`, never by hand; a test checks it against the parsers.\n"
    "`edgespec VERB --help` prints the same.\n"
)


def reference() -> str:
    """The page: a table of verbs, a part for each with its usage and options, the acceptance rules."""
    parsers = {name: parser_of(name)[1] for name in VERBS}
    sections = {name: _sections(parser) for name, parser in parsers.items()}
    home = {section: name for name, own in sections.items() for section in own.items()}
    verbs = ((f"[{name}](#{name})", verb.help) for name, verb in VERBS.items())
    parts = [HEAD, _table(("verb", "what it does"), verbs), _of_every_verb()]
    for name, parser in parsers.items():
        own = [action for group in parser._action_groups for action in group._group_actions]
        plain = [action for action in own if "." not in action.dest and action.dest not in {"help", *EVERY}]
        description = " ".join((parser.description or "").split())
        parts += [f"## {name}\n", f"{description}\n", f"    {parser.usage}\n", _options(plain)]
        parts += [
            f"**{title}**\n\n{table}" for title, table in sections[name].items() if home[title, table] == name
        ]
        elsewhere = {home[section] for section in sections[name].items()} - {name}
        parts += [f"And the sections of options under [{verb}](#{verb}).\n" for verb in sorted(elsewhere)]
    return "\n".join([*parts, _of_rules()])


def _of_every_verb() -> str:
    """Options that all verbs have, exit codes, environment variables."""
    every = argparse.ArgumentParser(add_help=False)
    add_flags(every, EveryVerb)
    variables = ((f"`{name}`", one.what) for name, one in VARIABLES.items())
    return "\n".join(
        [
            "**Every verb** has these options, and those of [the config file and the environment](shell.md).\n",
            _options(every._actions),
            _table(("exit code", "meaning"), EXIT_CODES.items(), "---:"),
            _table(("environment variable", "what it is"), variables),
        ]
    )


def _of_rules() -> str:
    """Every acceptance rule and its parameters."""
    from edgespec_runtime.rules.table import RULES

    rows = []
    for name, kind in RULES.items():
        own = argparse.ArgumentParser(add_help=False)
        add_flags(own, kind.parameters)
        parameters = "; ".join(f"`{one.dest}={one.metavar}`: {_help(one)}" for one in own._actions)
        rows.append((f"`{name}`", kind.help, parameters))
    return (
        "## Acceptance rules\n\n"
        "`--rule NAME` takes one of these, with parameters as in `--rule opt:a=0.3` or `--rule lossy:a=0.2,beta=1`.\n\n"
    ) + _table(("rule", "what it does", "parameters"), rows)


def _sections(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Title -> table of each group of dotted options."""
    groups = [group for group in parser._action_groups if any("." in a.dest for a in group._group_actions)]
    return {str(group.title): _options(group._group_actions) for group in groups}


def _options(actions: list[argparse.Action]) -> str:
    rows = []
    for action in actions:
        words = " / ".join(action.option_strings) or str(action.metavar)
        if action.option_strings and action.nargs != 0:
            words += f" [{action.metavar}]" if action.nargs == "?" else f" {action.metavar}"
        rows.append((f"`{words}`", _help(action)))
    return _table(("option", "what it is"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], first: str = "---") -> str:
    """A Markdown table; `first`: how its first column is aligned."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = [first, *["---"] * (len(heads) - 1)]
    return "\n".join(map(line, (heads, rule, *rows))) + "\n"


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


if __name__ == "__main__":
    sys.stdout.write(reference())
