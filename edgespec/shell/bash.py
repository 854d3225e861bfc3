"""The completion script of bash, 3.2 (macOS) and later. It needs no bash-completion package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.shell.grammar import VerbGrammar

_SCRIPT = r"""# edgespec's completion for bash; made by `edgespec completion bash`

# Words and paths that begin as `cur` does. $1: 1 where a list with commas is taken; $2: file, folder or nothing; $3: the words.
_edgespec_offer() {
    local IFS=$' \n' head='' part="$cur" nl=$'\n'
    if [[ -n $1 && $cur == *,* ]]; then head="${cur%,*},"; part="${cur##*,}"; fi
    COMPREPLY=($(compgen -W "$3" -P "$head" -- "$part"))
    IFS="$nl"
    case $2 in
    folder) COMPREPLY+=($(compgen -d -P "$head" -- "$part")) ;;
    file) COMPREPLY+=($(compgen -f -P "$head" -- "$part")) ;;
    esac
    if [[ -n $2 ]]; then compopt -o filenames 2>/dev/null; fi
    if [[ -n $1 ]]; then compopt -o nospace 2>/dev/null; fi
    return 0
}

# What stands at a place: a flag's value (VERB --flag) or an argument (VERB 1).
_edgespec_value() {
    case $1 in
@values@
    *) return 1 ;;
    esac
}

_edgespec() {
    local cur="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" before='' place=1 i word flags=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '@verbs@ --help --version' -- "$cur"))
        return
    fi
    case $verb in
@flags@
    esac
    # bash splits --flag=value at the sign
    if [[ $cur == = ]]; then cur=''; before="${COMP_WORDS[COMP_CWORD-1]}"
    elif [[ ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"
    else before="${COMP_WORDS[COMP_CWORD-1]}"
    fi
    # behind a flag that may stand alone comes its value or another flag
    if [[ $before == --* && ($cur != -* || " $switches " != *" $before "*) ]]; then
        if _edgespec_value "$verb $before"; then return; fi
    fi
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        if [[ $word == --* ]]; then
            if [[ ${COMP_WORDS[i+1]} == = ]]; then ((i += 2))
            elif [[ " $switches " != *" $word "* ]]; then ((i++))
            fi
        else ((place++))
        fi
    done
    if ((place > places && repeats)); then place=$places; fi
    _edgespec_value "$verb $place" || COMPREPLY=($(compgen -W "$flags" -- "$cur"))
}

complete -F _edgespec edgespec
"""


def script(verbs: Sequence[VerbGrammar]) -> str:
    """The script for all verbs."""
    return (
        _SCRIPT.replace("@values@", "\n".join(line for verb in verbs for line in _values(verb)))
        .replace("@flags@", "\n".join(map(_flags, verbs)))
        .replace("@verbs@", " ".join(verb.name for verb in verbs))
    )


def _values(verb: VerbGrammar) -> Iterator[str]:
    for name, slot, _ in verb.slots:
        many = "1" if slot.many else "''"
        yield f"    '{verb.name} {name}') _edgespec_offer {many} '{slot.path}' '{' '.join(slot.words)}' ;;"


def _flags(verb: VerbGrammar) -> str:
    flags = " ".join(name for flag in verb.flags for name in flag.names if name.startswith("--"))
    places, repeats = len(verb.places), int(verb.repeats)
    return (
        f"    {verb.name}) local places={places} repeats={repeats} switches='{verb.switches}'\n"
        f"        flags='{flags}' ;;"
    )
