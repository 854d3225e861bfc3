"""The command line: a table of verbs whose rooms are imported only when used, and the one place that prints errors.

A verb is a module with `Options` (a dataclass of knobs) and `run(given) -> exit code`. Where it needs packages of an extra, its
`require(given)` raises MissingExtra before a ready pair is made. Exit codes: errors.EXIT_CODES.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edgespec.core import __version__
from edgespec.core.errors import (
    DEFECT,
    DONE,
    INTERRUPTED,
    EdgespecError,
    InputError,
    OneProcessError,
    did_you_mean,
    naming_extras,
)
from edgespec.core.no_room import memory_error, write_error
from edgespec.core.options import add_flags, given, usage
from edgespec.core.texts import forgive_streams, harmless
from edgespec.verbs.renamed import refuse as refuse_old_name

if TYPE_CHECKING:
    from edgespec.shell.settings import Settings


@dataclass(frozen=True)
class Verb:
    module: str
    help: str


VERBS = {
    "targets": Verb(
        "edgespec.verbs.targets", "list the targets edgespec knows, or show where made ones are kept"
    ),
    "recipes": Verb(
        "edgespec.verbs.recipes", "list, show, copy or check the recipes that come with edgespec"
    ),
    "plan": Verb(
        "edgespec.verbs.plan",
        "before you train: does a drafter for a target fit, does it pay, how long does it take?",
    ),
    "build-drafter": Verb(
        "edgespec.verbs.build", "make a drafter for a target, export the pair, verify and bundle it"
    ),
    "export": Verb(
        "edgespec.verbs.export", "export two model folders, or a build, for a device: files, checks, bundle"
    ),
    "push": Verb("edgespec.hub.push", "send a bundle to a hub repository (shows it first)"),
    "pull": Verb("edgespec.hub.pull", "fetch a bundle from a hub repository, checked"),
    "study": Verb(
        "edgespec.verbs.study", "compare losses, data, token selection and initialisations, and write docs"
    ),
    "chat": Verb("edgespec.verbs.chat", "talk to a bundle"),
    "generate": Verb("edgespec_runtime.chat.generate", "answer one prompt with a bundle"),
    "serve": Verb(
        "edgespec_runtime.serving.serve", "serve a bundle to programs that speak OpenAI's protocol"
    ),
    "doctor": Verb(
        "edgespec_runtime.doctor.doctor",
        "on this machine, with a bundle: what speculation costs, whether it pays, how to run it",
    ),
    "bench": Verb(
        "edgespec.verbs.bench",
        "measured: plain against speculative decoding, of a bundle or of random weights of a target's shape",
    ),
    "tradeoff": Verb(
        "edgespec_runtime.tradeoff.tradeoff",
        "quality against latency for acceptance rules that give up some quality for speed",
    ),
    "report": Verb(
        "edgespec.verbs.report", "one HTML page of what was built and measured, runs side by side"
    ),
    "export-optimum": Verb(
        "edgespec_export.onnx.optimum_graph",
        "write a model as optimum-onnx's graph (in an environment of its own with the extra optimum)",
    ),
    "verify": Verb(
        "edgespec_export.verify.bundle",
        "check a bundle's files against their models, and measure the exported pair",
    ),
    "other-engines": Verb(
        "edgespec_export.other_engines.check",
        "run a bundle's pair in other engines: the same text, and as much accepted?",
    ),
    "config": Verb("edgespec.config", "where your config file is, and what it and the environment set"),
    "completion": Verb(
        "edgespec.completion", "print what makes your shell complete verbs, options and names"
    ),
}
RESUMES = {"plan", "build-drafter", "export", "push", "pull", "study"}
"""Verbs that go on where they were interrupted."""
WRITTEN = ("json", "plot")
"""Options of verbs that name a file, which is written when all is measured."""
PROCESSES = "edgespec_recipes.parallel.processes"
"""The room that a verb has loaded where several processes of torchrun may run it."""


class _Help(argparse.HelpFormatter):
    """Help whose lines never break inside a name such as match-greedy."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are edgespec's one-line errors."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_intermixed_args(None if args is None else self._with_values(args), namespace)

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """Words in which a flag that may stand alone has its value beside it, so that it takes no argument for one."""
        alone = {
            flag: (str(action.const), Path(str(action.metavar)).suffix)
            for action in self._actions
            if action.nargs == "?"
            for flag in action.option_strings
        }
        waiting, found = [*words], list[str]()
        while waiting:
            word = waiting.pop(0)
            if word in alone:
                bare, suffix = alone[word]
                follows = waiting and (waiting[0] == bare or waiting[0].endswith(suffix))
                word = f"{word}={waiting.pop(0) if follows else bare}"
            found.append(word)
        return found

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        _flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        known = {flag for action in self._actions for flag in action.option_strings}
        strange = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        hint = did_you_mean(strange[0], known) if message.startswith("unrecognized") and strange else ""
        raise InputError(f"{message}{hint if 'did you mean' in hint else ''}; see {self.prog} --help")


def _overview() -> argparse.ArgumentParser:
    width, columns = max(map(len, VERBS)), max(40, shutil.get_terminal_size().columns - 2)

    def filled(text: str, indent: int = 0) -> str:
        return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_on_hyphens=False)

    verbs = "\n".join(filled(f"  {name:<{width}}  {verb.help}", width + 4) for name, verb in VERBS.items())
    more = filled("edgespec VERB --help lists a verb's options and the names they take.")
    parser = _Parser(
        prog="edgespec",
        usage="edgespec [--version] VERB ...",
        description=filled(
            "Gives a chat LLM a tiny, well-aligned drafter and runs the pair fast on laptops and devices."
        ),
        epilog=f"verbs:\n{verbs}\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"edgespec {__version__}")
    parser.add_argument("verb", nargs="?", metavar="VERB", help="what to do")
    return parser


def parser_of(name: str) -> tuple[Any, argparse.ArgumentParser]:
    """A verb's module and its parser. Raises InputError for an unknown verb."""
    if name not in VERBS:
        raise InputError(f"unknown verb {name!r}{did_you_mean(name, VERBS)}")
    from edgespec.shell.settings import EveryVerb

    verb = VERBS[name]
    module: Any = importlib.import_module(verb.module)
    parser = _Parser(
        prog=f"edgespec {name}",
        usage=f"edgespec {name} {usage(module.Options)}",
        description=(module.__doc__ or verb.help).split("\n\n")[0],
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add_flags(parser, module.Options)
    add_flags(parser, EveryVerb)
    return module, parser


def settings(name: str, module: Any, flags: dict[str, Any]) -> Settings:
    """What a verb is to do: flags over the environment over the config file. Raises InputError."""
    from dataclasses import fields

    from edgespec.shell.settings import settings_of

    recipe: tuple[str, ...] = ()
    if "recipe" in {one.name for one in fields(module.Options)}:
        from edgespec.recipe.schema import Recipe

        recipe = tuple(one.name for one in fields(Recipe))
    return settings_of(name, module.Options, flags, verbs=VERBS, recipe=recipe)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["__complete"]:  # the question of the scripts that `completion` prints
        from edgespec.shell.offers import answer

        return answer(arguments[1:])
    if not arguments or arguments[0].startswith("-"):
        overview = _overview()
        overview.parse_args(arguments)
        overview.print_help()
        return DONE
    from edgespec.core.output import check_place, verb_output
    from edgespec.shell.environment import share_processors

    refuse_old_name(arguments)
    name, *rest = arguments
    if name in RESUMES:
        share_processors()  # its hours of torch are spent beside other programs
    module, parser = parser_of(name)
    chosen = settings(name, module, given(parser.parse_intermixed_args(rest)))
    with verb_output(chosen.values.get("json", ""), quiet=chosen.every.quiet):
        try:
            for option in WRITTEN:
                check_place(chosen.values.get(option, ""))
            if require := getattr(module, "require", None):
                require(chosen.values)
            code: int = module.run(_with_bundle(chosen.values))
        except InputError as error:
            if where := chosen.origins_named_in(str(error)) + _of_home(error):
                raise type(error)(f"{error}{where}") from error
            raise
    return code


def _of_home(error: InputError) -> str:
    """What moves the cache folder, for a message that a file in it cannot be written."""
    from edgespec.shell.environment import HOME, cache_folder

    if not isinstance(error, OneProcessError) or HOME in str(error):
        return ""
    try:
        in_it = str(cache_folder()) in str(error)
    except InputError:  # no home is known, so it is in no folder of the home
        return ""
    return f" ({HOME} can name another place)" if in_it else ""


def _with_bundle(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a folder for the name of a ready pair."""
    bundle = options.get("bundle")
    if not bundle or os.path.exists(bundle):
        return options
    from edgespec.verbs.ready import bundle_of

    return {**options, "bundle": bundle_of(bundle)}


def _defect() -> int:
    """The error that is being handled is edgespec's own: all of it is printed."""
    import traceback

    print(harmless(traceback.format_exc()), end="", file=sys.stderr)
    print(f"edgespec: this is an error of edgespec {__version__} itself; please report it", file=sys.stderr)
    return DEFECT


def _flush() -> None:
    """Write out what was printed; Python would do it when it ends, where nobody could catch the error. Raises OSError."""
    try:
        print(end="", flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def _reader_left(error: Exception) -> bool:
    """Whether the reader of a pipe left. Windows says EINVAL then, as for other errors: only there writing fails again."""
    if sys.platform == "win32" and getattr(error, "errno", None) == errno.EINVAL:
        try:
            _flush()
        except OSError:
            return True
    return isinstance(error, BrokenPipeError)


def _current_folder() -> str:
    """'' where it was removed: then no relative path leads anywhere."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code; every expected error becomes one line on stderr."""
    forgive_streams()
    code = _code_of(sys.argv[1:] if argv is None else argv)
    try:
        _flush()
    except OSError:  # it was said, or the reader of a pipe left; Python would try once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code and (processes := sys.modules.get(PROCESSES)):
        processes.fail(code)
    return code


def _code_of(arguments: list[str]) -> int:
    try:
        with naming_extras("this command"):
            code = _run(arguments)
        _flush()
        return code
    except EdgespecError as error:
        met_by_all = isinstance(error, InputError) and not isinstance(error, OneProcessError)
        if not (met_by_all and os.environ.get("RANK", "0") != "0"):
            print(f"edgespec: {harmless(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        goes_on = not RESUMES.isdisjoint(arguments[:1])
        hint = "; run the same command again to go on from here" if goes_on else ""
        print(f"\nedgespec: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if _reader_left(error):
            return DONE
        here = _current_folder()
        message = memory_error(error) or write_error(here or os.curdir, error, within=True)
        if isinstance(error, FileNotFoundError) and not here:
            message = InputError(
                "the current folder is gone; go to one that is there, then run the same command again"
            )
        if str(error).startswith("Could not determine home directory"):  # pathlib's, also of '~name'
            message = InputError(
                "a home directory is not known here: write paths without '~', and set EDGESPEC_HOME and EDGESPEC_CONFIG"
            )
        if message is None:
            return _defect()
        print(f"edgespec: {harmless(str(message))}", file=sys.stderr)
        return message.exit_code
