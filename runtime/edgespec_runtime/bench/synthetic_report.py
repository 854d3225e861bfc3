"""What the runs on random weights mean: a row for each acceptance trace, tables, JSON. Pure; times nothing.

One notation: τ tokens a block, γ draft length (a mean where the schedule chose several), c_t a drafter step and v a target pass
in plain steps, both from the same runs. Limit: τ / (γ · c_t + v), what the passes alone would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from edgespec.core import __version__
from edgespec.core.metrics import RawCounts, bootstrap, median
from edgespec.core.table import count, interval, many, table
from edgespec_runtime.bench import report
from edgespec_runtime.bench.report import AUTO, PLAIN, Interval
from edgespec_runtime.chooser.pass_costs import Costs, CostsAt
from edgespec_runtime.engines.exactness import EXACT

Trace = tuple[float, ...]  # acceptance rate at each position of a block; the last one goes on
GB = 1e9
FOUND = ("token_rate", "speedup", "block_efficiency", "acceptance_rate", "draft_cost", "verify_cost", "mbsu")


@dataclass(frozen=True)
class Arm:
    """One way to decode. `draft_length` None: the schedule chooses it from the measured costs."""

    trace: Trace
    draft_length: int | None


@dataclass(frozen=True)
class Run:
    """One reply; `arm` is None for plain decoding. `pass_seconds`: of decoding, spent inside both models' passes."""

    arm: Arm | None
    round: int
    counts: RawCounts
    pass_seconds: float

    @property
    def loop_share(self) -> float:
        """What everything beside the passes adds to them: drawing drafts, the rule, the loop."""
        return self.counts.total_seconds / self.pass_seconds - 1.0


@dataclass(frozen=True)
class Section:
    """All runs of one engine, precision, mode and temperature. `parameters`, `streamed_bytes`: by role."""

    name: str
    engine: str
    precision: str
    mode: str
    temperature: float
    threads: int
    parameters: dict[str, int]
    streamed_bytes: dict[str, int]
    cost_ratios: dict[str, float]
    costs: Costs
    runs: tuple[Run, ...]


class Row(NamedTuple):
    """One arm over all rounds. `found`: what a bench makes of its runs beside the plain ones, each round as a prompt."""

    arm: Arm
    found: report.Summary
    best_draft_length: int  # by the costs measured beforehand ...
    predicted: float  # ... and the speed-up that these promise with it
    loop_share: Interval

    def as_json(self) -> dict[str, Any]:
        """Also `limit`: τ / (γ · c_t + v), all from the runs."""
        return {
            "arm": asdict(self.arm),
            "draft_length": self.found.mean_draft_length,
            **{name: getattr(self.found, name) for name in FOUND},
            "best_draft_length": self.best_draft_length,
            "predicted": self.predicted,
            "loop_share": self.loop_share,
            "limit": self.found.predicted,
        }


def plain_rate(section: Section) -> Interval:
    """Tokens per second of plain decoding."""
    return bootstrap([run.counts.token_rate for run in section.runs if run.arm is None], median)


def plain_loop_share(section: Section) -> Interval:
    """What sampling and the loop add to the target's passes in plain decoding."""
    return bootstrap([run.loop_share for run in section.runs if run.arm is None], median)


def rows_of(section: Section) -> list[Row]:
    """A row for each arm, in the order of the section's runs."""
    arms = dict.fromkeys(run.arm for run in section.runs if run.arm is not None)
    return [_row(section, arm) for arm in arms]


def _row(section: Section, arm: Arm) -> Row:
    own, lengths = [run for run in section.runs if run.arm == arm], {None: PLAIN, arm: AUTO}
    both = [run for run in section.runs if run.arm in lengths]
    runs = [report.Run(run.round, 0, lengths[run.arm], 0, 0.0, (), run.counts) for run in both]
    _, found = report.summarise(runs, section.cost_ratios)
    at = section.costs.at(section.costs.contexts[0])
    if not all(run.counts.drafted for run in own):
        found = replace(found, draft_cost=at.c_t)
    loop_share = bootstrap([run.loop_share for run in own], median)
    return Row(arm, found, *best_of_trace(at, arm.trace), loop_share)


def best_of_trace(at: CostsAt, trace: Trace) -> tuple[int, float]:
    """(γ, its predicted speed-up) for acceptance rates by position; (0, 1.0) where no draft pays.

    τ(γ) = 1 + Σ_j Π_{i ≤ j} α_i: the j-th draft token stays where all up to it do.
    """
    stays = efficiency = 1.0
    speedups = [1.0]
    for length in range(1, at.most + 1):
        stays *= trace[min(length, len(trace)) - 1]
        efficiency += stays
        speedups.append(efficiency / at.block(length))
    best = max(range(at.most + 1), key=speedups.__getitem__)
    return best, speedups[best]


def text(section: Section, *, markdown: bool = False) -> str:
    """What ran, the speed table, the cost table, and from which α on speculation pays."""
    rows, plain = rows_of(section), plain_rate(section)
    sizes = section.parameters
    step = section.streamed_bytes["target"]
    rounds = 1 + max(run.round for run in section.runs)
    how = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    how += f", {section.mode} mode" if section.mode != EXACT else ""
    ratios = ", ".join(f"{value:.2%} by {name}" for name, value in section.cost_ratios.items())
    return "\n".join(
        [
            f"{section.name}'s shape ({count(sizes['target'])}, random weights) with its drafter's ({count(sizes['drafter'])}), "
            f"{section.engine} {section.precision}, {many(section.threads, 'thread')}, {how}",
            f"c = {ratios}; {rounds} rounds; medians over rounds, 95 % bootstrap intervals",
            f"Plain: {interval(*plain)} tok/s; {step / GB:.3g} GB of weights a token, {plain[0] * step / GB:.1f} GB/s. "
            "Loop: what all else adds to the passes of both models.",
            "",
            _speed_table(section, rows, plain, markdown),
            "",
            _cost_table(rows, markdown),
            "",
            _passes(section.costs),
            _verdict(section.costs),
        ]
    )


def _name(arm: Arm) -> str:
    chosen = "" if arm.draft_length is None else f", γ = {arm.draft_length}"
    return "α = " + " ".join(f"{rate:g}" for rate in arm.trace) + chosen


def _speed_table(section: Section, rows: Sequence[Row], plain: Interval, markdown: bool) -> str:
    names = list(section.cost_ratios)
    own = _percent(plain_loop_share(section))
    lines = [("plain", "", interval(*plain), "1", "", "", own, *("" for _ in names))]
    lines += [
        (
            _name(row.arm),
            f"{row.found.mean_draft_length:.1f}",
            interval(*row.found.token_rate),
            interval(*row.found.speedup),
            f"{row.found.predicted:.2f}",
            f"{row.found.speedup[0] / row.found.predicted:.2f}",
            _percent(row.loop_share),
            *(f"{row.found.mbsu[name]:.2f}" for name in names),
        )
        for row in rows
    ]
    headers = ("", "γ", "tok/s [95 %]", "x plain [95 %]", "limit", "of limit", "loop [95 %]")
    return table((*headers, *(f"MBSU by {name}" for name in names)), lines, markdown=markdown)


def _percent(share: Interval) -> str:
    value, low, high = (f"{100 * one:.1f}" for one in share)
    return f"{value} % [{low}, {high}]"


def _cost_table(rows: Sequence[Row], markdown: bool) -> str:
    lines = [
        (
            _name(row.arm),
            interval(*row.found.block_efficiency),
            "" if math.isnan(row.found.acceptance_rate) else f"{row.found.acceptance_rate:.3f}",
            f"{row.found.draft_cost:.3f}",
            f"{row.found.verify_cost:.2f}",
            f"{row.best_draft_length}",
            f"{row.predicted:.2f}",
        )
        for row in rows
    ]
    headers = ("", "τ [95 %]", "α seen", "c_t", "v", "best γ by costs", "x plain by costs")
    return table(headers, lines, markdown=markdown)


def _passes(costs: Costs) -> str:
    at = costs.at(costs.contexts[0])
    passes = ", ".join(f"v({n}) {at.v(n):.2f}" for n in range(2, costs.longest + 1))
    return f"Costs measured beforehand, in plain steps: c_t {at.c_t:.3f}, {passes}."


def _verdict(costs: Costs) -> str:
    """The lowest α at which some draft length pays."""
    least = costs.at(costs.contexts[0]).least(range(1, costs.longest))
    if least is None:
        return "By these costs no acceptance rate makes speculation pay here."
    return f"By these costs speculation pays from α = {least[0]:.2f} on (γ = {least[1]} there)."


def as_json(sections: Sequence[Section], left_out: dict[str, str]) -> dict[str, Any]:
    """Everything: raw counts of every run first, what is derived from them after."""
    return {
        "edgespec": __version__,
        "sections": [
            {
                **asdict(section),
                "plain_token_rate": plain_rate(section),
                "plain_loop_share": plain_loop_share(section),
                "rows": [row.as_json() for row in rows_of(section)],
            }
            for section in sections
        ],
        "left_out": left_out,
    }
