"""Speed: token rates and gains by draft length, MBSU beside them and why they differ, where the time goes, kinds of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.core.metrics import summed
from edgespec.core.pictures import bars
from edgespec.report.fields import Fields
from edgespec.report.figures import MUTED, PARTS, RUNS, drawn, legend, lying
from edgespec.report.gather import BENCH, Run
from edgespec.report.measured import PLAIN, Bench, Speed, name_of
from edgespec.report.parts import Cell, Figure, Part, Section, Table, between, number, of_run, rate

MOST_CATEGORIES = 130  # rows: 64 categories and all of them together, plain against two ways of drafting
COMMAND = "edgespec bench BUNDLE --json bench.json"
MOST_TICKS = 20  # draft lengths that are written below a picture
FEW = 3  # runs whose bounds and choices are drawn beside what was measured
LOOP = 0.02  # of a plain step: below that what is left over is noise of the clock


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
    section.beside({run: _speeds(bench) for run, bench in found.items()}, "measured speed", COMMAND)
    return section


def time_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "time",
        "Where the time goes",
        "Milliseconds of decoding per token that left the loop, without reading the prompt. The rest is sampling, the acceptance "
        "rule, the choice of γ and the loop itself. The time to the first token counts the prompt too, from an empty cache.",
    )
    splits = {run.number: rows for run in runs if run.bench is not None and (rows := _splits(run.bench))}
    most = max((sum(parts) for rows in splits.values() for _, parts in rows), default=0.0)
    section.beside({run: _split(rows, run, most) for run, rows in splits.items()}, "time split", COMMAND)
    return section


def category_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "kinds", "By kind of question", "Speculation against plain decoding on the questions of a suite."
    )
    section.beside(
        {run.number: _categories(run.fields(BENCH)) for run in runs},
        "figures by kind of question",
        "edgespec bench BUNDLE --suite built-in --json bench.json",
    )
    return section


def why(bench: Bench) -> str:
    """One sentence: what MBSU leaves out, in the figures of the fastest fixed draft length. '' where one is not known."""
    best = bench.best
    if best is None or best.speedup is None or best.speedup[0] <= 0 or best.tau is None:
        return ""
    kind, drafter, verify = best.mbsu_kind, best.number("draft_cost"), best.number("verify_cost")
    bound, ratio = best.mbsu.get(kind), bench.object("cost_ratios").number(kind)
    if not bound or not ratio or drafter is None or verify is None:
        return ""
    tau = best.tau[0]
    made = best.number("mean_draft_length") or best.draft_length  # fewer than γ where drafts end early
    steps_made = made + (best.number("behind") or 0.0)
    drafting, memory, cost = steps_made * drafter, tau / bound, tau / best.speedup[0]
    reads = f"{round((memory - 1.0) / ratio, 1) + 0.0:g}"  # without what was copied; + 0.0: never "-0"
    left = cost - drafting - verify
    steps = "one drafter step takes" if f"{steps_made:.2g}" == "1" else f"{steps_made:.2g} drafter steps take"
    rest = f", and sampling and the loop take about {left:.2f}" if left > LOOP else ""
    if left < -LOOP:
        rest = "; these medians add up to more than the whole, so the machine was not steady"
    return (
        f"Why MBSU by {kind} says {bound:.2f}x at {best.name} and the clock {best.speedup[0]:.2f}x: a block yields "
        f"{tau:.2f} tokens in both, and MBSU charges {memory:.2f} plain steps for it (the target's weights read once, the "
        f"drafter's {'once' if reads == '1' else f'{reads} times'}), while here it costs {cost:.2f}: {steps} {drafting:.2f}, "
        f"verifying {made + 1:.2g} tokens in one pass {verify:.2f}{rest}."
    )


def _gains(found: dict[int, Bench], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        for place, (run, bench) in enumerate(found.items()):
            colour, named = RUNS[run], partial(of_run, run=run, runs=runs)
            timed = [(one, gain) for one in bench.fixed if (gain := one.speedup) is not None]
            shift = 0.08 * (place - (len(found) - 1) / 2)
            lengths = [one.draft_length + shift for one, _ in timed]
            middle, errors = bars([gain for _, gain in timed])
            axes.errorbar(
                lengths, middle, yerr=errors, color=colour, elinewidth=1.0, marker="o", label=named("measured")
            )  # fmt: skip
            if len(found) > FEW:
                continue
            kind = timed[0][0].mbsu_kind if timed else ""
            pairs = zip(lengths, (one.mbsu.get(kind) for one, _ in timed), strict=True)
            if bound := [(x, y) for x, y in pairs if y is not None]:
                axes.plot(
                    *zip(*bound, strict=True), color=colour, linestyle="--", linewidth=1.2,
                    marker="_", label=named(f"MBSU by {kind}"),  # one γ alone makes no line
                )  # fmt: skip
            if bench.chosen is not None and bench.chosen.speedup is not None:
                words = named("γ chosen, measured")
                axes.axhline(bench.chosen.speedup[0], color=colour, linestyle=":", linewidth=1.4, label=words)
        axes.axhline(1.0, color=MUTED, linewidth=1.0)
        axes.set_ylim(bottom=0)
        known = sorted({one.draft_length for bench in found.values() for one in bench.fixed})
        axes.set_xticks(known[:: -(-len(known) // MOST_TICKS)])
        axes.set(
            xlim=(known[0] - 0.5, known[-1] + 0.5), xlabel="draft length γ", ylabel="times plain decoding"
        )
        legend(axes, 3 if len(found) == 1 else 2, by_run=True)

    bounds = " and by memory traffic alone" if len(found) <= FEW else ""
    return Figure(
        drawn("speed", draw),
        "Gain over plain decoding by draft length.",
        f"Gain over plain decoding, measured by the clock{bounds}. The line at 1 is plain decoding.",
    )


def _speeds(bench: Bench) -> list[Part]:
    """A table of every draft length, and why MBSU and the clock differ."""
    kinds = sorted({kind for one in bench.drafted for kind in one.mbsu})
    rows = []
    for one in bench.speeds:
        if one is bench.plain:
            cells = [Cell("1"), *[Cell("")] * (1 + len(kinds))]
        else:
            cells = [between(one.speedup, strong=one is bench.best), number(one.number("predicted"))]
            cells += [number(one.mbsu.get(kind)) for kind in kinds]
        rows.append([Cell(one.name), rate(one.interval("token_rate")), *cells])
    headers = ["", "tok/s", "x plain", "predicted", *(f"MBSU by {kind}" for kind in kinds)]
    table = Table(headers, rows)
    return [table, said] if (said := why(bench)) else [table]


def _splits(bench: Bench) -> list[tuple[Speed, list[float]]]:
    """Every draft length that emitted tokens: milliseconds per token of drafting, verifying and the rest."""
    found = []
    for one in bench.speeds:
        counts = summed(bench.counts.get(one.draft_length, []))
        if counts.emitted:
            seconds = counts.draft_seconds, counts.verify_seconds, max(0.0, counts.loop_seconds)
            found.append((one, [1e3 * value / counts.emitted for value in seconds]))
    return found


def _split(rows: Sequence[tuple[Speed, list[float]]], run: int, most: float) -> list[Part]:
    """The splits of a run as a picture and a table; `most`: of all runs, so that their pictures have one scale."""

    def draw(axes: Any) -> None:
        start = [0.0] * len(rows)
        for place, (words, colour) in enumerate(zip(("draft", "verify", "rest"), PARTS, strict=True)):
            values = [parts[place] for _, parts in rows]
            axes.barh(
                [one.name for one, _ in rows], values, left=start, color=colour, height=0.62, label=words
            )
            start = [before + value for before, value in zip(start, values, strict=True)]
        axes.set_xlim(0, 1.02 * most)
        lying(axes, "ms per token", 3)

    figure = Figure(
        drawn(f"time-{run}", draw, height=74 + 24 * len(rows)),
        "Milliseconds per token of drafting, verifying and the rest, by draft length.",
    )
    digits = 3 if max(sum(parts) for _, parts in rows) < 1 else 2
    cells = []
    for one, parts in rows:
        first, whole = one.number("first_token_seconds"), sum(parts)
        shares = [Cell(f"{part:,.{digits}f}", f"{part / whole:.0%}") if part else Cell("") for part in parts]
        milliseconds = number(None if first is None else 1e3 * first, ",.1f")
        cells.append([Cell(one.name), *shares, Cell(f"{whole:,.{digits}f}"), milliseconds])
    headers = ["ms per token", "draft", "verify", "rest", "all", "first token, ms"]
    return [figure, Table(headers, cells)]


def _categories(bench: Fields) -> list[Table]:
    """A table for each way of drafting. Of few questions no interval is shown, as in the table that bench prints."""
    from edgespec_runtime.bench.report import LEAST_PROMPTS

    tables: dict[int, list[list[Cell]]] = {}
    for row in bench.objects("categories", MOST_CATEGORIES):
        asked = row.whole("prompts")
        words = "" if asked is None else f"{asked:,} question{'s' * (asked != 1)}"
        cells = [
            between(row.interval("block_efficiency")),
            number(row.number("acceptance_rate")),
            rate(row.interval("plain_token_rate")),
            rate(row.interval("token_rate")),
            between(row.interval("speedup")),
        ]
        if asked is not None and asked < LEAST_PROMPTS:
            cells = [replace(cell, note="") for cell in cells]
        named = Cell(row.text("category", 40), words)
        tables.setdefault(row.whole("draft_length") or PLAIN, []).append([named, *cells])
    headers, chosen = ["", "τ", "α", "plain tok/s", "tok/s", "x plain"], "γ chosen block by block"
    return [Table(headers, rows, title=name_of(length, chosen)) for length, rows in tables.items()]
