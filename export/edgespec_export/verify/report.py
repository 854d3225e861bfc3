"""verify.json as tables: the files, their answers, the tokenizers, the acceptance by cause. Knows its form, measures nothing.

Of acceptance it has raw counts; intervals and bounds are derived here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json
from edgespec.core.metrics import bootstrap, ratio_of_sums
from edgespec.core.table import interval, many, table
from edgespec_export.answers.report import answers_report
from edgespec_export.verify.exported_pair import FLOAT_PAIR, Trial, trials_of
from edgespec_export.verify.tokenizers import tokenizer_table

HEADERS = (
    *("file", "weights", "engine", "block", "leak", "largest", "mean", "KL", "top-1", "perplexity", "flips"),
    *("checked with", ""),
)
Interval = tuple[float, float, float]
Run = Mapping[str, Any]

# Most that α may fall against the float pair, where weights are rounded so little that it should not; an interval that lies
# wholly below breaks the bound. What 4 bits cost is told and not bounded: on a small model it is much.
FEWEST = 10  # prompts below which an interval over them says too little
MOST_LOST = {"fp16": 0.02, "bf16": 0.05, "q8_0": 0.05, "q6_k": 0.05, "int8": 0.05}

TAU = ratio_of_sums(lambda trial: trial.emitted, lambda trial: trial.blocks)
EMPIRICAL = ratio_of_sums(lambda trial: trial.accepted, lambda trial: trial.tested)
TEACHER_FORCED = ratio_of_sums(lambda trial: trial.overlap, lambda trial: trial.positions)


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


def paired(stored: Sequence[Run]) -> Iterator[tuple[Run, list[tuple[Trial, Trial]]]]:
    """Every run of verify.json's `acceptance`, and its trials beside those of the engine's float pair on the same prompts.

    Nothing beside the float pair itself, and where there is none.
    """
    floats = {(run["engine"], run["temperature"]): run for run in stored if run["cause"] == FLOAT_PAIR}
    for run in stored:
        base = floats.get((run["engine"], run["temperature"]), run)
        yield run, [] if base is run else list(zip(trials_of(run), trials_of(base), strict=False))


def change(pairs: Sequence[tuple[Trial, Trial]], statistic: Callable[[Sequence[Trial]], float]) -> Interval:
    """A statistic less the float pair's."""

    def difference(items: Sequence[tuple[Trial, Trial]]) -> float:
        return statistic([mine for mine, _ in items]) - statistic([theirs for _, theirs in items])

    return bootstrap(pairs, difference)


def acceptance_table(stored: Sequence[Run], *, markdown: bool = False) -> str:
    """verify.json's `acceptance` as a table, with 95 % bootstrap intervals over prompts; '' where nothing was run."""
    headers = ("pair", "T", "τ", "α empirical", "α teacher-forced", "α against float", "τ against float", "")
    cells = []
    for run, pairs in paired(stored):
        trials = trials_of(run)
        cells.append(
            (
                f"{run['engine']} {run['precision']}: {run['cause']}",
                f"{run['temperature']:g}",
                interval(*bootstrap(trials, TAU)),
                interval(*bootstrap(trials, EMPIRICAL), 3),
                interval(*bootstrap(trials, TEACHER_FORCED), 3),
                signed(change(pairs, TEACHER_FORCED), 3) if pairs else "",
                signed(change(pairs, TAU), 2) if pairs else "",
                "BROKEN" if _broken(run, pairs) else "",
            )
        )
    return table(headers, cells, markdown=markdown) if cells else ""


def signed(value: Interval, digits: int) -> str:
    """`-0.031 [-0.040, -0.021]` with the sign always shown."""
    return f"{value[0]:+.{digits}f} [{value[1]:+.{digits}f}, {value[2]:+.{digits}f}]"


def about(stored: Sequence[Run]) -> str:
    """The line above the table: what was run."""
    if not stored:
        return ""
    counts = sorted({len(run["trials"]) for run in stored})
    prompts = " to ".join(str(number) for number in dict.fromkeys((counts[0], counts[-1])))
    return (
        f"{prompts} held-out prompts, γ = {stored[0]['draft_length']}; 95 % bootstrap intervals over prompts"
    )


def broken_bounds(stored: Sequence[Run]) -> list[str]:
    """What is to be said of every bound that is broken."""
    return [
        f"{run['engine']} {run['precision']}, {run['cause']}, T = {run['temperature']:g}: {words}"
        for run, pairs in paired(stored)
        if (words := _broken(run, pairs))
    ]


def _broken(run: Run, pairs: Sequence[tuple[Trial, Trial]]) -> str:
    """The bound that a run breaks, in words; '' for none."""
    most = MOST_LOST.get(run["precision"])
    if most is None or not pairs or len(run["trials"]) < FEWEST:
        return ""
    value, _, high = change(pairs, TEACHER_FORCED)
    return f"α is {-value:.2f} below the float pair's, more than {most:g}" if high < -most else ""
