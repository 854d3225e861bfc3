"""The completion script of zsh: one `_arguments` for each verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.shell.grammar import FILE, FOLDER, Flag, Slot, VerbGrammar

_SCRIPT = r"""#compdef edgespec
# edgespec's completion for zsh; made by `edgespec completion zsh`

_edgespec() {
  local curcontext="$curcontext" state line
  typeset -A opt_args
  _arguments -C '(- *)'{-h,--help}'[show help]' '(- *)--version[show the version]' '1:verb:->verb' '*::rest:->rest'
  case $state in
  verb)
    local -a verbs
    verbs=(
@verbs@
    )
    _describe -t verbs verb verbs
    ;;
  rest)
    curcontext="${curcontext%:*:*}:edgespec-$words[1]:"
    case $words[1] in
@rest@
    esac
    ;;
  esac
}

if [ "$funcstack[1]" = _edgespec ]; then _edgespec "$@"; else compdef _edgespec edgespec; fi
"""
_PATHS = {FILE: "_files", FOLDER: "_files -/"}


def script(verbs: Sequence[VerbGrammar]) -> str:
    """The script for all verbs."""
    names = "\n".join(f"      {_quoted(f'{verb.name}:{verb.help}')}" for verb in verbs)
    between = " \\\n        "
    rest = "\n".join(
        f"    {verb.name})\n      {between.join(['_arguments -s', *_specs(verb)])}\n      ;;"
        for verb in verbs
    )
    return _SCRIPT.replace("@verbs@", names).replace("@rest@", rest)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _specs(verb: VerbGrammar) -> Iterator[str]:
    for flag in verb.flags:
        for name in flag.names:
            yield _quoted(_flag(flag, name))
    for place, slot in enumerate(verb.places, 1):
        where = "*" if verb.repeats and place == len(verb.places) else str(place)
        yield _quoted(f"{where}:{slot.name}:{_action(slot)}")


def _flag(flag: Flag, name: str) -> str:
    others = f"({' '.join(flag.names)})"
    text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    if flag.slot is None:
        return f"{others}{name}[{text}]"
    value = f"{flag.slot.name}:{_action(flag.slot)}"
    return f"{others}{name}[{text}]::{value}" if flag.alone else f"{others}{name}=[{text}]:{value}"


def _action(slot: Slot) -> str:
    """How zsh finds what stands there. A space alone: something, and zsh does not know what."""
    words = " ".join(word.replace(":", "\\:") for word in slot.words)
    paths = _PATHS.get(slot.path, "")
    if slot.many:
        return f"_sequence compadd - {words}" if words else f"_sequence {paths or 'true'}"
    if words:
        return f"{{compadd -- {words}; {paths}}}" if paths else f"({words})"
    return paths or " "
