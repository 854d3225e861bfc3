"""The answers of verify.json in words: a table, what to do about a changed file, replies side by side. Measures nothing.

What the replies say comes from models and from other people's bundles: control characters never reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgespec_runtime.engines.exactness import FAST

from edgespec.core.table import table
from edgespec.core.texts import harmless
from edgespec_export.answers.verdict import CHANGED, CLOSE, modes_of

HEADERS = (
    *("file", "top-1 [95 %]", "KL [95 %]", "TV [95 %]", "perplexity [95 %] (model)", "near ties"),
    *("same text", "answers"),
)
FLOATS = frozenset({"fp32", "f32", "fp16", "f16", "bf16"})
LONGEST = 160  # characters of a reply that are shown
RED, USUAL = "\x1b[31m", "\x1b[39m"

Check = Mapping[str, Any]


def red(text: str, colour: bool) -> str:
    """The text in red where `colour` is wanted."""
    return f"{RED}{text}{USUAL}" if colour and text else text


def answers_report(found: Mapping[str, Any], *, colour: bool = False, side_by_side: bool = True) -> str:
    """The table, what it means, and the replies; '' where no answers were compared."""
    checks = [check for check in found.get("files", ()) if any(modes_of(check))]
    if not checks:
        return ""
    parts = [answers_table(checks, colour=colour), _about(checks)]
    changed = warnings(checks)
    if changed:
        parts.append("\n".join(red(line, colour) for line in changed))
    if side_by_side:
        parts += [text for check in checks if (text := samples_text(check, colour=colour))]
    return "\n\n".join(parts)


def answers_table(checks: Sequence[Check], *, colour: bool = False, markdown: bool = False) -> str:
    """A row for every file and mode in which answers were compared; changed ones are red."""
    found = [(check, mode, answers) for check in checks for mode, answers in modes_of(check)]

    def painted(row: int, line: str) -> str:
        return red(line, colour and found[row][2]["verdict"] == CHANGED)

    return table(HEADERS, [list(_cells(*one)) for one in found], markdown=markdown, painted=painted)


def warnings(checks: Sequence[Check]) -> list[str]:
    """A sentence for every changed file, with the file that keeps the answers."""
    found = []
    for check in checks:
        shares = {
            mode: answers["top1"][0] for mode, answers in modes_of(check) if answers["verdict"] == CHANGED
        }
        if not shares:
            continue
        mode, share = next(iter(shares.items()))
        other = alternative(checks, check)
        instead = (
            "no file of the bundle keeps the answers: export one with more bits"
            if other is None
            else f"instead: --engine {other['engine']} --precision {other['precision']}, which keeps {_least(other):.1%}"
        )
        found.append(
            f"changed: {name_of(check, mode)} is another model, it keeps {share:.1%} of the most likely tokens; {instead}"
        )
    return found


def alternative(checks: Sequence[Check], changed: Check) -> Check | None:
    """A file whose answers stay in every mode: of the same engine before others, rounded before float, then the closest."""
    keeping = [check for check in checks if _least(check) >= CLOSE]

    def preference(check: Check) -> tuple[bool, bool, float]:
        return check["engine"] == changed["engine"], check["precision"] not in FLOATS, _least(check)

    return max(keeping, key=preference, default=None)


def below(found: Mapping[str, Any], least: float) -> list[str]:
    """The target's files that keep a smaller share of the most likely tokens than `least`, or were not compared, in words."""
    broken = []
    for check in found.get("files", ()):
        if check["role"] != "target":
            continue
        measured = dict(modes_of(check))
        if not measured:
            broken.append(
                f"{name_of(check)}: its answers were not compared; give --models TARGET_FOLDER,DRAFTER_FOLDER, and "
                "--answer-replies of 1 or more"
            )
        broken += [
            f"{name_of(check, mode)}: keeps {answers['top1'][0]:.1%} of the most likely tokens, below {least:g}"
            for mode, answers in measured.items()
            if not answers["top1"][0] >= least
        ]
    return broken


def samples_text(check: Check, *, colour: bool = False) -> str:
    """Greedy replies of the model and of a file, one below the other; '' where none were written."""
    _, answers = next(iter(modes_of(check)))
    samples = answers.get("samples") or []
    if not samples:
        return ""
    same = sum(sample["at"] is None for sample in samples)
    lines = [
        f"{name_of(check)}: {same} of {len(samples)} greedy replies are the model's; »« is the first other token"
    ]
    for sample in samples:
        lines.append(f"  {_line(sample['question'])}")
        if sample["at"] is None:
            lines.append(f"    both   {_line(sample['common'])}")
            continue
        for name, (token, rest) in (("model", sample["reference"]), ("file", sample["file"])):
            common, token = _line(sample["common"], ends=False), _line(token, ends=False)
            room = max(0, LONGEST - len(common) - len(token))
            lines.append(
                f"    {name:5}  {common}{red(f'»{token}«', colour)}{_cut(_line(rest, ends=False), room)}"
            )
    return "\n".join(lines)


def name_of(check: Check, mode: str = "") -> str:
    return f"{check['role']} {check['engine']} {check['precision']}{' in fast mode' if mode == FAST else ''}"


def _about(checks: Sequence[Check]) -> str:
    _, answers = next(modes_of(checks[0]))
    return (
        f"On {answers['replies']} replies of the target, {answers['positions']} tokens; intervals are over replies. Near ties: "
        "the share of tokens where the model's two best logits are closer than the file's usual error of that gap."
    )


def _cells(check: Check, mode: str, answers: Mapping[str, Any]) -> Iterator[str]:
    yield "  in fast mode" if mode == FAST else name_of(check)
    yield "{:.1%} [{:.1%}, {:.1%}]".format(*answers["top1"])
    yield "{:.2g} [{:.2g}, {:.2g}]".format(*answers["kl"])
    yield "{:.2g} [{:.2g}, {:.2g}]".format(*answers["tv"])
    reference = answers["reference_perplexity"]
    yield "{:.3g} [{:.3g}, {:.3g}] ({:.3g})".format(*answers["perplexity"], reference)
    yield f"{answers['near_ties']:.1%} (< {answers['gap_error']:.2g})"
    samples = answers.get("samples") or []
    yield f"{sum(sample['at'] is None for sample in samples)}/{len(samples)}" if samples else "-"
    yield answers["verdict"]


def _least(check: Check) -> float:
    """What a file keeps in the worse of its modes."""
    return min((float(answers["top1"][0]) for _, answers in modes_of(check)), default=0.0)


def _line(text: str, *, ends: bool = True) -> str:
    """A text as one harmless line."""
    line = harmless(text).replace("\n", "⏎").replace("\t", " ")
    return _cut(line.strip(), LONGEST) if ends else line


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"
