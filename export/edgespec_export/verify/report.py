"""verify.json as tables: the files, their answers, the tokenizers, the acceptance by cause. Knows its form, measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json
from edgespec.core.table import table
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
    return report_of(found, colour=colour, side_by_side=False)


def report_of(found: dict[str, Any], *, colour: bool = False, side_by_side: bool = False) -> str:
    """The tables of what `verify_files` returned; parts that were not measured are left out.

    `colour`: changed files in red. `side_by_side`: replies of the model and of each file too.
    """
    parts = []
    if found.get("files"):
        parts.append(files_table(found["files"]))
    if answers := answers_report(found, colour=colour, side_by_side=side_by_side):
        parts.append(answers)
    if found.get("tokenizers"):
        parts.append(tokenizer_table(found["tokenizers"]))
    if found.get("acceptance"):
        stored = found["acceptance"]
        parts.append(f"{acceptance_table(stored)}\n{about(stored)}")
    return "\n\n".join(parts)


def broken_of(found: dict[str, Any]) -> list[str]:
    """Every broken bound of a verify.json, in words."""
    named = [(f"{check['role']} {check['precision']}", check) for check in found["files"]]
    named += [(f"{check['where']} tokenizer", check) for check in found["tokenizers"]]
    reasons = [f"{name}: {reason}" for name, check in named for reason in check["broken"]]
    return reasons + broken_bounds(found["acceptance"])


def files_table(checks: list[dict[str, Any]]) -> str:
    """Relative differences first, then the distance of the logits to the float model."""
    rows = []
    for check in checks:
        rows.append(list(_cells(check)))
        if check.get("fast"):
            rows.append(list(_fast_cells(check)))
    return table(HEADERS, rows)


def _cells(check: dict[str, Any]) -> Iterator[str]:
    yield f"{check['role']} {check['engine']} {check['precision']}"
    relative = ("weights_relative", "engine_relative", "block_relative", "block_leak")
    yield from (_number(check.get(name)) for name in (*relative, "largest", "mean", "kl"))
    yield _share(check.get("top1"))
    mine, theirs = check.get("perplexity"), check.get("torch_perplexity")
    yield "-" if mine is None or theirs is None else f"{mine:.4g} ({theirs:.4g})"
    yield "-" if check["block_flips"] is None else f"{check['block_flips']}/{check['positions']}"
    yield check["checked_with"]
    yield "BROKEN" if check["broken"] else "ok"


def _fast_cells(check: dict[str, Any]) -> Iterator[str]:
    """The row of a file's fast mode, below its own."""
    fast = check["fast"]
    yield "  in fast mode"
    yield "-"
    yield from (_number(fast.get(name)) for name in ("engine_relative", "block_relative", "block_leak"))
    yield from "-" * 5
    yield f"{fast['block_flips']}/{check['positions']}"
    yield check["checked_with"]
    yield ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
