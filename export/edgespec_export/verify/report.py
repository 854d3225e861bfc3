"""verify.json as tables: the files, their answers, the tokenizers, the acceptance by cause. Knows its form, measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json
from edgespec.core.table import many, table
from edgespec_export.answers.report import answers_report
from edgespec_export.verify.exported_pair_report import about, acceptance_table, broken_bounds
from edgespec_export.verify.tokenizers import tokenizer_table

HEADERS = (
    *("file", "weights", "engine", "block", "leak", "largest", "mean", "KL", "top-1", "perplexity", "flips"),
    *("checked with", ""),
)


def verification_table(path: Path, *, colour: bool = False) -> str:
    """All of a verify.json but the replies. Raises EdgespecError where it lists no file."""
    found = read_json(path)
    if not found.get("files"):
        raise EdgespecError(f"{path} lists no checked file; remove its folder and run the same command again")
    return report_of(found, colour=colour)


def report_of(found: dict[str, Any], *, colour: bool = False, side_by_side: bool = False) -> str:
    """The tables of what `verify_files` returned; parts that were not measured are left out.

    `colour`: changed files in red. `side_by_side`: replies of the model and of each file too.
    """
    stored = found.get("acceptance")
    parts = [
        files_table(found["files"]) if found.get("files") else "",
        "\n".join(found.get("notes", ())),
        answers_report(found, colour=colour, side_by_side=side_by_side),
        tokenizer_table(found["tokenizers"]) if found.get("tokenizers") else "",
        f"{acceptance_table(stored)}\n{about(stored)}" if stored else "",
    ]
    return "\n\n".join(filter(None, parts))


def broken_of(found: dict[str, Any]) -> list[str]:
    """Every broken bound of a verify.json, in words."""
    named = [(f"{check['role']} {check['precision']}", check) for check in found["files"]]
    named += [(f"{check['where']} tokenizer", check) for check in found["tokenizers"]]
    reasons = [f"{name}: {reason}" for name, check in named for reason in check["broken"]]
    return reasons + broken_bounds(found["acceptance"])


def broken_words(broken: list[str]) -> str:
    """How many bounds are broken, and which."""
    return f"{many(len(broken), 'bound')} {'are' if len(broken) > 1 else 'is'} broken: {'; '.join(broken)}"


def files_table(checks: list[dict[str, Any]]) -> str:
    """Relative differences first, then the distance of the logits to the float model; a file's fast mode below its own row."""
    rows = []
    for check in checks:
        mine, theirs = check.get("perplexity"), check.get("torch_perplexity")
        distance = [
            *_numbers(check, "largest", "mean", "kl"),
            "-" if check.get("top1") is None else f"{check['top1']:.1%}",
            "-" if mine is None or theirs is None else f"{mine:.4g} ({theirs:.4g})",
        ]
        name = f"{check['role']} {check['engine']} {check['precision']}"
        modes = [(name, check, distance, "BROKEN" if check["broken"] else "ok")]
        if check.get("fast"):
            modes.append(("  in fast mode", check["fast"], ["-"] * len(distance), ""))
        for label, seen, distances, verdict in modes:
            relative = _numbers(seen, "weights_relative", "engine_relative", "block_relative", "block_leak")
            flips = "-" if seen["block_flips"] is None else f"{seen['block_flips']}/{check['positions']}"
            rows.append([label, *relative, *distances, flips, check["checked_with"], verdict])
    return table(HEADERS, rows)


def _numbers(measured: dict[str, Any], *names: str) -> list[str]:
    values = (measured.get(name) for name in names)
    return ["-" if value is None else f"{value:.1e}" for value in values]
