"""Speed: token rates and gains by draft length, MBSU beside them and why they differ, where the time goes, kinds of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec.core.metrics import summed
from edgespec.core.pictures import bars
from edgespec.report.fields import Fields
from edgespec.report.figures import MUTED, PARTS, RUNS, drawn, legend, lying
from edgespec.report.gather import Run
from edgespec.report.measured import AUTO, PLAIN, Bench, name_of
from edgespec.report.parts import Cell, Figure, Section, Table, Words, between, number, of_run, rate
from edgespec.report.sources import BENCH

MOST_CATEGORIES = 130  # rows: 64 categories and all of them together, plain against two ways of drafting
COMMAND = "edgespec bench BUNDLE --json bench.json"
MOST_TICKS = 20  # draft lengths that are written below a picture
FEW = 3  # runs whose bounds and choices are drawn beside what was measured
LOOP = 0.02  # of a plain step: below that what is left over is noise of the clock


@dataclass(frozen=True)
class Split:
    """`parts`: milliseconds per token of drafting, verifying and the rest. `first_token_seconds`: from an empty cache."""

    name: str
    parts: tuple[float, float, float]
    first_token_seconds: float | None

    @property
    def whole(self) -> float:
        return sum(self.parts)


def speed_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "speed",
        "Speed",
        "Plain decoding and every draft length took turns on the same prompts. A gain is the median over prompts of a prompt's "
        "token rate over its plain one, with a 95 % bootstrap interval. MBSU is the gain there would be if only memory traffic "
        "counted: τ / (cγ + 1), with c the drafter's share of the bytes, or of the parameters.",
    )
    found = {run.number: run.bench for run in runs if run.bench is not None}
    if any(bench.fixed for bench in found.values()):
        section.parts.append(_gains(found, len(runs)))
    columns = {run: [_speed_table(bench), *why(bench)] for run, bench in found.items()}
    section.beside(columns, "measured speed", COMMAND)
    return section


def time_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "time",
        "Where the time goes",
        "Milliseconds of decoding per token that left the loop, without reading the prompt. The rest is sampling, the acceptance "
        "rule, the choice of γ and the loop itself. The time to the first token counts the prompt too, from an empty cache.",
    )
    splits = {run.number: rows for run in runs if run.bench is not None and (rows := _splits(run.bench))}
    most = max((row.whole for rows in splits.values() for row in rows), default=0.0)
    columns = {run: [_split_figure(rows, run, most), _split_table(rows)] for run, rows in splits.items()}
    section.beside(columns, "time split", COMMAND)
    return section


def category_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "kinds", "By kind of question", "Speculation against plain decoding on the questions of a suite."
    )
    columns = {}
    for run in runs:
        by_length: dict[int | None, list[Fields]] = {}
        for row in run.fields(BENCH).objects("categories", MOST_CATEGORIES):
            by_length.setdefault(row.whole("draft_length"), []).append(row)
        columns[run.number] = [_category_table(rows, length or 0) for length, rows in by_length.items()]
    section.beside(
        columns, "figures by kind of question", "edgespec bench BUNDLE --suite built-in --json bench.json"
    )
    return section


def why(bench: Bench) -> list[Words]:
    """One sentence: what MBSU leaves out, in the figures of the fastest fixed draft length. None where one is not known."""
    best = bench.best
    if best is None or best.speedup is None or best.speedup[0] <= 0 or best.tau is None:
        return []
    kind = best.mbsu_kind
    bound, ratio = best.mbsu.get(kind), bench.fields.object("cost_ratios").number(kind)
    if not bound or not ratio or best.draft_cost is None or best.verify_cost is None:
        return []
    length, tau = best.draft_length, best.tau[0]
    made = best.mean_draft_length or length  # fewer than γ where drafts end early
    drafting, memory, cost = made * best.draft_cost, tau / bound, tau / best.speedup[0]
    reads = f"{round((memory - 1.0) / ratio, 1) + 0.0:g}"  # without what was copied; + 0.0: never "-0"
    left = cost - drafting - best.verify_cost
    steps = "one drafter step takes" if f"{made:.2g}" == "1" else f"{made:.2g} drafter steps take"
    rest = f", and sampling and the loop take about {left:.2f}" if left > LOOP else ""
    if left < -LOOP:
        rest = "; these medians add up to more than the whole, so the machine was not steady"
    sentence = (
        f"Why MBSU by {kind} says {bound:.2f}x at {best.name} and the clock {best.speedup[0]:.2f}x: a block yields "
        f"{tau:.2f} tokens in both, and MBSU charges {memory:.2f} plain steps for it (the target's weights read once, the "
        f"drafter's {'once' if reads == '1' else f'{reads} times'}), while here it costs {cost:.2f}: {steps} {drafting:.2f}, "
        f"verifying {made + 1:.2g} tokens in one pass {best.verify_cost:.2f}{rest}."
    )
    return [Words(sentence)]


def _gains(found: dict[int, Bench], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        for place, (run, bench) in enumerate(found.items()):
            colour, named = RUNS[run], partial(of_run, run=run, runs=runs)
            timed = [one for one in bench.fixed if one.speedup is not None]
            shift = 0.08 * (place - (len(found) - 1) / 2)
            lengths = [one.draft_length + shift for one in timed]
            middle, errors = bars([one.speedup for one in timed if one.speedup])
            axes.errorbar(
                lengths, middle, yerr=errors, color=colour, elinewidth=1.0, marker="o", label=named("measured")
            )  # fmt: skip
            if len(found) > FEW:
                continue
            kind = timed[0].mbsu_kind if timed else ""
            pairs = zip(lengths, (one.mbsu.get(kind) for one in timed), strict=True)
            if bound := [(x, y) for x, y in pairs if y is not None]:
                xs, ys = zip(*bound, strict=True)
                axes.plot(
                    xs, ys, color=colour, linestyle="--", linewidth=1.2,
                    marker="_", label=named(f"MBSU by {kind}"),  # one γ alone makes no line
                )  # fmt: skip
            chosen = bench.at(AUTO)
            if chosen is not None and chosen.speedup is not None:
                words = named("γ chosen, measured")
                axes.axhline(chosen.speedup[0], color=colour, linestyle=":", linewidth=1.4, label=words)
        axes.axhline(1.0, color=MUTED, linewidth=1.0)
        axes.set_ylim(bottom=0)
        known = sorted({one.draft_length for bench in found.values() for one in bench.fixed})
        axes.set_xticks(known[:: -(-len(known) // MOST_TICKS)])
        axes.set_xlim(known[0] - 0.5, known[-1] + 0.5)
        axes.set_xlabel("draft length γ", color=MUTED)
        axes.set_ylabel("times plain decoding", color=MUTED)
        legend(axes, 3 if len(found) == 1 else 2, by_run=True)

    bounds = " and by memory traffic alone" if len(found) <= FEW else ""
    return Figure(
        drawn("speed", draw),
        "Gain over plain decoding by draft length.",
        f"Gain over plain decoding, measured by the clock{bounds}. The line at 1 is plain decoding.",
    )


def _speed_table(bench: Bench) -> Table:
    kinds = sorted({kind for one in bench.drafted for kind in one.mbsu})
    rows = []
    for one in bench.speeds:
        cells = [Cell(one.name), rate(one.token_rate)]
        if one.draft_length == PLAIN:
            cells += [Cell("1"), *[Cell("")] * (1 + len(kinds))]
        else:
            cells += [between(one.speedup, strong=one == bench.best), number(one.predicted)]
            cells += [number(one.mbsu.get(kind)) for kind in kinds]
        rows.append(cells)
    return Table(["", "tok/s", "x plain", "predicted", *(f"MBSU by {kind}" for kind in kinds)], rows)


def _splits(bench: Bench) -> list[Split]:
    """Every draft length that emitted tokens."""
    found = []
    for one in bench.speeds:
        counts = summed(bench.counts.get(one.draft_length, []))
        if counts.emitted:
            seconds = counts.draft_seconds, counts.verify_seconds, max(0.0, counts.loop_seconds)
            draft, verify, rest = (1e3 * value / counts.emitted for value in seconds)
            found.append(Split(one.name, (draft, verify, rest), one.first_token_seconds))
    return found


def _split_figure(rows: Sequence[Split], run: int, most: float) -> Figure:
    def draw(axes: Any) -> None:
        names = [row.name for row in rows]
        start = [0.0] * len(rows)
        for place, (words, colour) in enumerate(zip(("draft", "verify", "rest"), PARTS, strict=True)):
            values = [row.parts[place] for row in rows]
            axes.barh(names, values, left=start, color=colour, height=0.62, label=words)
            start = [before + value for before, value in zip(start, values, strict=True)]
        axes.set_xlim(0, 1.02 * most)
        lying(axes, "ms per token", 3)

    height = 74 + 24 * len(rows)
    return Figure(
        drawn(f"time-{run}", draw, height=height),
        "Milliseconds per token of drafting, verifying and the rest, by draft length.",
    )


def _split_table(rows: Sequence[Split]) -> Table:
    digits = 3 if max(row.whole for row in rows) < 1 else 2
    cells = []
    for row in rows:
        shares = [
            Cell(f"{value:,.{digits}f}", f"{value / row.whole:.0%}") if value else Cell("")
            for value in row.parts
        ]
        first = number(None if row.first_token_seconds is None else 1e3 * row.first_token_seconds, ",.1f")
        cells.append([Cell(row.name), *shares, Cell(f"{row.whole:,.{digits}f}"), first])
    return Table(["ms per token", "draft", "verify", "rest", "all", "first token, ms"], cells)


def _category_table(rows: Sequence[Fields], length: int) -> Table:
    cells = []
    for row in rows:
        asked = row.whole("prompts")
        cells.append(
            [
                Cell(
                    row.text("category", 40),
                    "" if asked is None else f"{asked:,} question{'s' * (asked != 1)}",
                ),
                between(row.interval("block_efficiency")),
                number(row.number("acceptance_rate")),
                rate(row.interval("plain_token_rate")),
                rate(row.interval("token_rate")),
                between(row.interval("speedup")),
            ]
        )
    headers = ["", "τ", "α", "plain tok/s", "tok/s", "x plain"]
    return Table(headers, cells, title=name_of(length, "γ chosen block by block"))
