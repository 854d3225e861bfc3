"""By engine and precision: what bench measured, and the ways to run the bundle that doctor compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.core.errors import InputError
from edgespec.report.fields import Fields, clean
from edgespec.report.figures import MUTED, RUNS, drawn, lying
from edgespec.report.gather import Run
from edgespec.report.measured import bench_of
from edgespec.report.parts import (
    Cell,
    Column,
    Columns,
    Figure,
    Section,
    Table,
    Words,
    between,
    number,
    of_run,
    rate,
    rate_digits,
)
from edgespec.report.sources import BENCH, DOCTOR

MOST_WAYS = 40  # engines, precisions and modes of one bundle
MOST_CONTEXTS, MOST_PASSES = 16, 65


def ways_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "engines",
        "By engine and precision",
        "v(n) is a pass over n tokens and c a drafter step, both in plain steps. From these costs and the expected α follow the "
        "best γ and its token rate, which are predictions; bench measures them.",
    )
    columns, bars = [], []
    for run in runs:
        parts: list[Any] = []
        found = run.fields(DOCTOR)
        if found is not None:
            ways = [found.object("chosen"), *found.objects("others", MOST_WAYS)]
            alpha = next((one.number("rate") for one in found.objects("acceptances", 16)), None)
            rows = [_way(way, alpha) for way in ways]
            bars += [(run.number, name, plain, best) for name, plain, best, _ in rows]
            headers = ["", "plain tok/s", "v(2)", "v(4)", "c", "flips"]
            headers += ["best γ", "x plain", "tok/s"] if alpha is not None else []
            machine = found.object("device").text("cpu", 80)
            title = (
                "Costs measured by doctor"
                + (f" on {machine}" if machine else "")
                + (f", α = {alpha:.2f} expected" if alpha is not None else "")
            )
            parts.append(Table(headers, [cells for *_, cells in rows], title=title))
            parts += [Words(words) for words in found.object("derived").texts("diagnosis", 8, 1000)]
            parts += [Words(f"Note: {words}.") for words in found.texts("notes", 16, 1000)]
            if limit := found.object("derived").text("limit", 1000):
                parts.append(Words(limit))
        if parts:
            columns.append(Column(run.number, parts))
    if measured := _measured(runs):
        section.parts.append(measured)
    if not columns:
        return section.lacks("other ways to run the bundle", "edgespec doctor BUNDLE --json doctor.json")
    if len(bars) > 1:
        section.parts.insert(0, _figure(bars, len(runs)))
    section.parts.append(Columns(columns))
    return section


def _measured(runs: Sequence[Run]) -> Table | None:
    """A line for every bench: what the clock said of its engine and precision."""
    rows = []
    for run in runs:
        bench = bench_of(run.fields(BENCH))
        if bench is None:
            continue
        plain, best = bench.at(0), bench.best
        name = clean(
            f"{bench.fields.text('engine')} {bench.fields.text('engine_version')} {bench.fields.text('precision')}"
        )
        threads = bench.fields.whole("threads")
        rows.append(
            [
                Cell(of_run(name, run.number, len(runs)), f"{threads} threads" if threads else ""),
                rate(plain.token_rate if plain else None),
                Cell(best.name if best else ""),
                rate(best.token_rate if best else None),
                between(best.speedup if best else None),
                _flips(bench.fields.object("exactness")),
            ]
        )
    if not rows:
        return None
    return Table(
        ["", "plain tok/s", "best fixed γ", "tok/s", "x plain", "flips"], rows, title="Measured by bench"
    )


def _flips(exactness: Fields) -> Cell:
    flips, positions = exactness.whole("flips"), exactness.whole("positions")
    return Cell("–") if flips is None else Cell(f"{flips:,}", f"of {positions:,}" if positions else "")


def _way(way: Fields, alpha: float | None) -> tuple[str, float, float | None, list[Cell]]:
    """(name, plain rate, predicted rate, cells) of one of doctor's ways to run."""
    from edgespec_runtime.chooser.pass_costs import Costs
    from edgespec_runtime.doctor.block_difference import Difference
    from edgespec_runtime.doctor.report import Variant

    costs = way.object("costs")
    difference = way.object("difference")
    contexts = [int(one) for one in costs.numbers("contexts", MOST_CONTEXTS)]
    passes = [
        tuple(Fields({"seconds": row}, costs.where).numbers("seconds", MOST_PASSES))
        for row in costs.lists("verify_seconds", MOST_CONTEXTS)
    ]
    try:
        known = Costs(tuple(contexts), tuple(passes), tuple(costs.numbers("draft_seconds", MOST_CONTEXTS)))
    except InputError as error:
        raise InputError(f"{costs.where}: {error}") from error
    flips = difference.whole("flips") or 0
    variant = Variant(
        way.text("engine", 40),
        way.text("precision", 40),
        way.flag("flash_attention"),
        known,
        Difference(difference.number("largest") or 0.0, flips, difference.whole("positions") or 0),
        way.flag("fast_graph") or False,
    )
    plain = 1.0 / variant.step_seconds
    cells = [
        Cell(variant.name),
        Cell(f"{plain:,.{rate_digits(plain)}f}"),
        number(known.v(2, variant.context)),
        number(known.v(4, variant.context)),
        number(known.c_t(variant.context)),
        _flips(difference),
    ]
    if alpha is None:
        return variant.name, plain, None, cells
    length, gain = variant.best(alpha)
    best = plain * gain
    cells += [Cell(str(length)), number(gain), Cell(f"{best:,.{rate_digits(best)}f}")]
    return variant.name, plain, best, cells


def _figure(bars: Sequence[tuple[int, str, float, float | None]], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        places = range(len(bars))
        names = [clean(of_run(name, run, runs), 40) for run, name, _, _ in bars]
        for place, (run, _, plain, best) in zip(places, bars, strict=True):
            axes.barh(place - 0.19, plain, height=0.34, color=MUTED, label="plain" if not place else None)
            if best is not None:
                words = "best γ, predicted" if not place else None
                axes.barh(place + 0.19, best, height=0.34, color=RUNS[run], label=words)
        axes.set_yticks(list(places), names)
        lying(axes, "tokens per second", 2)

    return Figure(
        drawn("engines", draw, height=84 + 32 * len(bars)),
        "Tokens per second by engine and precision, plain and with the best draft length.",
        "By doctor's costs, at the context of an everyday chat.",
    )
