"""Acceptance by cause as intervals, bounds and a table. Derives everything from the raw counts of exported_pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.metrics import bootstrap, ratio_of_sums
from edgespec.core.table import interval, table
from edgespec_export.verify.exported_pair import FLOAT_PAIR, PairRun, Trial, from_json

Interval = tuple[float, float, float]

# Most that α may fall against the float pair, where weights are rounded so little that it should not; an interval that lies
# wholly below breaks the bound. What 4 bits cost is told and not bounded: on a small model it is much.
FEWEST = 10  # prompts below which an interval over them says too little
MOST_LOST = {"fp16": 0.02, "bf16": 0.05, "q8_0": 0.05, "q6_k": 0.05, "int8": 0.05}

TAU = ratio_of_sums(lambda trial: trial.emitted, lambda trial: trial.blocks)
EMPIRICAL = ratio_of_sums(lambda trial: trial.accepted, lambda trial: trial.tested)
TEACHER_FORCED = ratio_of_sums(lambda trial: trial.overlap, lambda trial: trial.positions)


@dataclass(frozen=True)
class Row:
    """One pair at one temperature, with 95 % bootstrap intervals over prompts.

    `change` and `tau_change`: teacher-forced α and τ less those of the engine's float pair on the same prompts; None for that
    pair itself and where there is none.
    """

    run: PairRun
    tau: Interval
    empirical: Interval
    teacher_forced: Interval
    change: Interval | None
    tau_change: Interval | None

    @property
    def broken(self) -> str:
        """The bound it breaks, in words; '' for none."""
        most = MOST_LOST.get(self.run.precision)
        if most is None or self.change is None or len(self.run.trials) < FEWEST or not self.change[2] < -most:
            return ""
        return f"α is {-self.change[0]:.2f} below the float pair's, more than {most:g}"


def rows_of(runs: Sequence[PairRun]) -> list[Row]:
    """Every run with its intervals, in the order given."""
    floats = {(run.engine, run.temperature): run for run in runs if run.cause == FLOAT_PAIR}
    rows = []
    for run in runs:
        base = floats.get((run.engine, run.temperature))
        tau, empirical, forced = (bootstrap(run.trials, each) for each in (TAU, EMPIRICAL, TEACHER_FORCED))
        change = tau_change = None
        if base is not None and base is not run:
            paired = list(zip(run.trials, base.trials, strict=False))
            change, tau_change = (bootstrap(paired, _difference(each)) for each in (TEACHER_FORCED, TAU))
        rows.append(Row(run, tau, empirical, forced, change, tau_change))
    return rows


def _difference(
    statistic: Callable[[Sequence[Trial]], float],
) -> Callable[[Sequence[tuple[Trial, Trial]]], float]:
    def paired(items: Sequence[tuple[Trial, Trial]]) -> float:
        return statistic([mine for mine, _ in items]) - statistic([theirs for _, theirs in items])

    return paired


def acceptance_table(stored: Sequence[dict[str, Any]], *, markdown: bool = False) -> str:
    """verify.json's `acceptance` as a table; '' where nothing was run."""
    rows = rows_of(from_json(stored))
    if not rows:
        return ""
    headers = ("pair", "T", "τ", "α empirical", "α teacher-forced", "α against float", "τ against float", "")
    cells = [
        (
            f"{row.run.engine} {row.run.precision}: {row.run.cause}",
            f"{row.run.temperature:g}",
            interval(*row.tau),
            interval(*row.empirical, 3),
            interval(*row.teacher_forced, 3),
            "" if row.change is None else signed(row.change, 3),
            "" if row.tau_change is None else signed(row.tau_change, 2),
            "BROKEN" if row.broken else "",
        )
        for row in rows
    ]
    return table(headers, cells, markdown=markdown)


def signed(value: Interval, digits: int) -> str:
    """`-0.031 [-0.040, -0.021]` with the sign always shown."""
    return f"{value[0]:+.{digits}f} [{value[1]:+.{digits}f}, {value[2]:+.{digits}f}]"


def about(stored: Sequence[dict[str, Any]]) -> str:
    """The line above the table: what was run."""
    if not stored:
        return ""
    counts = sorted({len(run["trials"]) for run in stored})
    prompts = " to ".join(str(number) for number in dict.fromkeys((counts[0], counts[-1])))
    return (
        f"{prompts} held-out prompts, γ = {stored[0]['draft_length']}; 95 % bootstrap intervals over prompts"
    )


def broken_bounds(stored: Sequence[dict[str, Any]]) -> list[str]:
    """What is to be said of every bound that is broken."""
    bounded = [run for run in stored if run["cause"] == FLOAT_PAIR or run["precision"] in MOST_LOST]
    return [
        f"{row.run.engine} {row.run.precision}, {row.run.cause}, T = {row.run.temperature:g}: {row.broken}"
        for row in rows_of(from_json(bounded))
        if row.broken
    ]
