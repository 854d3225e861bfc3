"""The completion script of PowerShell, 5.1 and later. Its syntax was checked with a parser; no PowerShell ran it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.shell.grammar import VerbGrammar

_SCRIPT = r"""# edgespec's completion for PowerShell; made by `edgespec completion powershell`

Register-ArgumentCompleter -Native -CommandName edgespec -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)

    $verbs = [ordered]@{
@verbs@
    }
    # a verb's flags, with their help
    $flags = @{
@flags@
    }
    # VERB --flag or VERB 1: whether a list with commas is taken; file, folder or nothing; the words
    $values = @{
@values@
    }
    $repeats = @(@repeats@)

    $offer = {
        param($texts, $tips, $head)
        foreach ($text in $texts) {
            $whole = $head + $text
            if ($whole -like "$wordToComplete*") {
                $tip = if ($tips -and $tips[$text]) { $tips[$text] } else { $text }
                [System.Management.Automation.CompletionResult]::new($whole, $text, 'ParameterValue', $tip)
            }
        }
    }
    $give = {
        param($slot, $head, $part)
        if ($slot.Many -and $part.Contains(',')) { $head += $part.Substring(0, $part.LastIndexOf(',') + 1) }
        & $offer $slot.Words $null $head
        if ($slot.Path) {
            [System.Management.Automation.CompletionCompleters]::CompleteFilename($part) |
                Where-Object { $slot.Path -eq 'file' -or $_.ResultType -eq 'ProviderContainer' }
        }
    }

    $before = @($commandAst.CommandElements | Where-Object { $_.Extent.EndOffset -lt $cursorPosition } |
        ForEach-Object { $_.ToString() })
    if ($before.Count -lt 2) {
        & $offer $verbs.Keys $verbs ''
        return
    }
    $verb = $before[1]
    if (-not $verbs.Contains($verb)) { return }
    if ($wordToComplete -match '^(--[^=]+)=(.*)$') {
        $slot = $values["$verb $($Matches[1])"]
        if ($slot) { & $give $slot "$($Matches[1])=" $Matches[2] }
        return
    }
    $last = $before[-1]
    if ($last -like '--*' -and $values["$verb $last"]) {
        & $give $values["$verb $last"] '' $wordToComplete
        if (-not $values["$verb $last"].Alone) { return }
    }
    if ($wordToComplete -like '-*') {
        & $offer $flags[$verb].Keys $flags[$verb] ''
        return
    }
    $place = 1
    for ($i = 2; $i -lt $before.Count; $i++) {
        $word = $before[$i]
        $slot = $values["$verb $word"]
        if ($word -notlike '--*') { $place++ }
        elseif ($slot -and -not $slot.Alone) { $i++ }
    }
    while ($repeats -contains $verb -and $place -gt 1 -and -not $values["$verb $place"]) { $place-- }
    if ($values["$verb $place"]) { & $give $values["$verb $place"] '' $wordToComplete }
    else { & $offer $flags[$verb].Keys $flags[$verb] '' }
}
"""


def script(verbs: Sequence[VerbGrammar]) -> str:
    """The script for all verbs."""
    names = (f"        {_quoted(verb.name)} = {_quoted(verb.help)}" for verb in verbs)
    return (
        _SCRIPT.replace("@verbs@", "\n".join(names))
        .replace("@flags@", "\n".join(line for verb in verbs for line in _flags(verb)))
        .replace("@values@", "\n".join(line for verb in verbs for line in _values(verb)))
        .replace("@repeats@", ", ".join(_quoted(verb.name) for verb in verbs if verb.repeats))
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _flags(verb: VerbGrammar) -> Iterator[str]:
    yield f"        {_quoted(verb.name)} = [ordered]@{{"
    for flag in verb.flags:
        for name in flag.names:
            yield f"            {_quoted(name)} = {_quoted(flag.help)}"
    yield "        }"


def _values(verb: VerbGrammar) -> Iterator[str]:
    for name, slot, alone in verb.slots:
        words = ", ".join(map(_quoted, slot.words))
        many, stands_alone = (f"${str(value).lower()}" for value in (slot.many, alone))
        yield (
            f"        {_quoted(f'{verb.name} {name}')} = @{{ Many = {many}; Path = {_quoted(slot.path)}; "
            f"Alone = {stands_alone}; Words = @({words}) }}"
        )
