"""The completion script of each shell. It asks the program what may stand at the cursor, and shows the answer in its shell's way.

An answer is a line `PATHS TAKEN MORE` and a line `word TAB help` for each word (offers.py). The words of the command line are
passed on as they stand there: none is expanded or run. bash: 3.2 (macOS) and later, without the package bash-completion.
PowerShell: 5.1 and later, which drops empty words and parts quoted ones; its syntax was checked, and no PowerShell ran it.
"""

from __future__ import annotations

_BASH = r"""# edgespec's completion for bash; made by `edgespec completion bash`
_edgespec() {
    local cur="${COMP_WORDS[COMP_CWORD]}" paths='' taken='' more='' sign='' head word IFS=$' \t\n'
    COMPREPLY=()
    # what bash puts in goes behind the sign, though 3.2 does not part --flag=value there
    if [[ $cur == *=* && $COMP_WORDBREAKS == *=* ]]; then sign="${cur%%=*}="; fi
    {
        read -r paths taken more
        head="${cur:0:${taken:-0}}"
        while IFS=$'\t' read -r word _; do
            word="$head${word%=}"
            if [[ $word == "$cur"* ]]; then COMPREPLY+=("${word#"$sign"}"); fi
        done
    } < <("${1/#\~\//$HOME/}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ $paths == file || $paths == directory ]]; then
        while IFS= read -r word; do COMPREPLY+=("${head#"$sign"}$word"); done < <(compgen -A "$paths" -- "${cur:${#head}}")
        compopt -o filenames 2>/dev/null
    fi
    if [[ $more == more ]]; then compopt -o nospace 2>/dev/null; fi
    return 0
}
complete -F _edgespec edgespec
"""
_ZSH = r"""#compdef edgespec
# edgespec's completion for zsh; made by `edgespec completion zsh`
_edgespec() {
  local line word help ret=1
  local -a answer how plain valued suffix
  answer=("${(@f)$("${${(Q)words[1]}/#\~\//$HOME/}" __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
  how=(${=answer[1]})
  compset -p ${how[2]:-0}
  for line in $answer[2,-1]; do
    word=${line%%$'\t'*}
    help=${line#*$'\t'}
    line=${${word%=}//:/\\:}${help:+:$help}
    if [[ $word = *= ]]; then valued+=($line); else plain+=($line); fi
  done
  if [[ $how[3] = more ]]; then suffix=(-qS ,); fi
  _describe word plain $suffix -- valued -qS = && ret=0
  case $how[1] in
    directory) _files -/ && ret=0 ;;
    file) _files && ret=0 ;;
  esac
  return ret
}
if [ "$funcstack[1]" = _edgespec ]; then _edgespec "$@"; else compdef _edgespec edgespec; fi
"""
_FISH = r"""# edgespec's completion for fish; made by `edgespec completion fish`
function __edgespec_offered
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
    type -q -- $program; or return
    set -l answer ($program __complete $words[2..-1] "$word" 2>/dev/null)
    set -l how (string split ' ' -- $answer[1])
    test (count $how) -eq 3; or return
    set -l head (string sub -l $how[2] -- "$word")
    set -l part (string sub -s (math $how[2] + 1) -- "$word")
    string replace -r '=(\t|$)' '$1' -- "$head"$answer[2..-1]
    switch $how[1]
        case directory
            string join \n -- "$head"(__fish_complete_directories "$part")
        case file
            string join \n -- "$head"(__fish_complete_path "$part")
    end
end
complete -c edgespec -f -a '(__edgespec_offered)'
"""
_POWERSHELL = r"""# edgespec's completion for PowerShell; made by `edgespec completion powershell`
Register-ArgumentCompleter -Native -CommandName edgespec -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $program = $commandAst.GetCommandName()
    $before = @($commandAst.CommandElements | Select-Object -Skip 1 |
        Where-Object { $_.Extent.EndOffset -lt $cursorPosition } | ForEach-Object { $_.ToString() })
    $asked = ($before + "$wordToComplete") -replace '[^\w.=,-]|^$', '_'
    $how, $lines = & $program __complete @asked 2>$null
    $paths, $taken, $null = -split $how
    $head, $part = "$wordToComplete".Substring(0, $taken), "$wordToComplete".Substring($taken)
    foreach ($line in $lines) {
        $word, $help = $line -split "`t"
        $word = $head + $word.TrimEnd('=')
        $tip = if ($help) { $help } else { $word }
        if ($word.StartsWith($wordToComplete, 'OrdinalIgnoreCase')) {
            [System.Management.Automation.CompletionResult]::new($word, $word, 'ParameterValue', $tip)
        }
    }
    if ($paths -in 'file', 'directory') {
        [System.Management.Automation.CompletionCompleters]::CompleteFilename($part) |
            Where-Object { $paths -eq 'file' -or $_.ResultType -eq 'ProviderContainer' } | ForEach-Object {
                $path = $head + $_.CompletionText
                [System.Management.Automation.CompletionResult]::new($path, $_.ListItemText, $_.ResultType, $_.ToolTip)
            }
    }
}
"""
STUBS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH, "powershell": _POWERSHELL}
