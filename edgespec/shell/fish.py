"""The completion script of fish: a line for each verb, flag and argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.shell.grammar import FILE, FOLDER, Flag, Slot, VerbGrammar

_HEAD = r"""# edgespec's completion for fish; made by `edgespec completion fish`

function __edgespec_place --description 'Whether an argument of a verb stands at a place, or behind it where it may be repeated'
    set -l words (commandline -opc)
    set -l verb $argv[1]
    test (count $words) -gt 1 -a "$words[2]" = $verb; or return 1
    set -l place 1
    set -l value no
    for word in $words[3..-1]
        if string match -q -- '--*=*' $word
            set value no
        else if string match -q -- '--*' $word
            set value no
            contains -- $word $argv[4..-1]; or set value yes
        else if test $value = yes
            set value no
        else
            set place (math $place + 1)
        end
    end
    test $value = no; or return 1
    test $place -eq $argv[2]; or test $argv[3] = more -a $place -gt $argv[2]
end

function __edgespec_is --description 'Whether this is the verb'
    set -l words (commandline -opc)
    test (count $words) -gt 1 -a "$words[2]" = $argv[1]
end

complete -c edgespec -f
complete -c edgespec -n __fish_use_subcommand -l help -d 'show help'
complete -c edgespec -n __fish_use_subcommand -l version -d 'show the version'
"""
_PATHS = {FILE: "(__fish_complete_path)", FOLDER: "(__fish_complete_directories)"}


def script(verbs: Sequence[VerbGrammar]) -> str:
    """The script for all verbs."""
    lines = [
        f"complete -c edgespec -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.help)}"
        for verb in verbs
    ]
    for verb in verbs:
        lines += ["", *_lines(verb)]
    return "\n".join([_HEAD, *lines]) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _lines(verb: VerbGrammar) -> Iterator[str]:
    for place, slot in enumerate(verb.places, 1):
        if offered := _offered(slot):
            more = "more" if verb.repeats and place == len(verb.places) else "one"
            where = f"__edgespec_place {verb.name} {place} {more} {verb.switches}"
            yield f"complete -c edgespec -n {_quoted(where)} -a {_quoted(offered)}"
    for flag in verb.flags:
        for name in flag.names:
            yield f"complete -c edgespec -n '__edgespec_is {verb.name}' {_flag(flag, name)}"


def _flag(flag: Flag, name: str) -> str:
    words = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    offered = "" if flag.slot is None else _offered(flag.slot)
    takes = " -x" if flag.slot is not None and not flag.alone else ""
    return f"{words}{takes}{f' -a {_quoted(offered)}' if offered else ''} -d {_quoted(flag.help)}"


def _offered(slot: Slot) -> str:
    words, paths = " ".join(slot.words), _PATHS.get(slot.path, "")
    if slot.many and words:
        return f"(__fish_append , {words})"
    return " ".join(filter(None, [words, paths]))
