"""By engine and precision: what bench measured, and the ways to run the bundle that doctor compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.core.errors import InputError
from edgespec.core.table import many
from edgespec.report.fields import Fields, clean
from edgespec.report.figures import MUTED, RUNS, drawn, lying
from edgespec.report.gather import DOCTOR, Run
from edgespec.report.parts import Cell, Figure, Part, Section, Table, between, flips, number, of_run, rate

if TYPE_CHECKING:
    from edgespec_runtime.doctor.report import Variant

MOST_WAYS = 40  # engines, precisions and modes of one bundle
MOST_CONTEXTS, MOST_PASSES = 16, 65


def ways_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "engines",
        "By engine and precision",
        "v(n) is a pass over n tokens and c a drafter step, both in plain steps. From these costs and the expected α follow the "
        "best γ and its token rate, which are predictions; bench measures them.",
    )
    doctored = {run.number: run.fields(DOCTOR) for run in runs if DOCTOR in run.sources}
    ways = {  # of each the chosen one first
        run: [_way(one) for one in (found.object("chosen"), *found.objects("others", MOST_WAYS))]
        for run, found in doctored.items()
    }
    bars = [(run, way, _alpha(doctored[run])) for run, found in ways.items() for way in found]
    if len(bars) > 1:
        section.parts.append(_figure(bars, len(runs)))
    section.parts += _measured(runs)
    columns = {run: [_costs(found, ways[run]), *_notes(found)] for run, found in doctored.items()}
    section.beside(columns, "other ways to run the bundle", "edgespec doctor BUNDLE --json doctor.json")
    return section


def _way(way: Fields) -> Variant:
    from edgespec_runtime.chooser.pass_costs import Costs
    from edgespec_runtime.doctor.block_difference import Difference
    from edgespec_runtime.doctor.report import Variant

    costs, difference = way.object("costs"), way.object("difference")
    passes = [
        tuple(Fields({"seconds": row}, costs.where).numbers("seconds", MOST_PASSES))
        for row in costs.lists("verify_seconds", MOST_CONTEXTS)
    ]
    contexts, drafts = (costs.numbers(key, MOST_CONTEXTS) for key in ("contexts", "draft_seconds"))
    try:
        known = Costs(tuple(map(int, contexts)), tuple(passes), tuple(drafts))
    except InputError as error:
        raise InputError(f"{costs.where}: {error}") from error
    return Variant(
        way.text("engine", 40),
        way.text("precision", 40),
        way.flag("flash_attention"),
        known,
        Difference(0.0, difference.whole("flips") or 0, difference.whole("positions") or 0),
        way.flag("fast_graph") or False,
    )


def _alpha(doctor: Fields) -> float | None:
    """The acceptance rate that doctor expects first."""
    return next((one.share("rate") for one in doctor.objects("acceptances", 16)), None)


def _costs(doctor: Fields, ways: Sequence[Variant]) -> Table:
    alpha, machine = _alpha(doctor), doctor.object("device").text("cpu", 80)
    headers, rows = ["", "plain tok/s", "v(2)", "v(4)", "c", "flips"], []
    for way in ways:
        at, found = way.at, way.difference
        cells = [Cell(way.name), rate(at.plain_rate), *map(number, (at.v(2), at.v(4), at.c_t))]
        cells.append(flips(found.flips, found.positions))
        if alpha is not None:
            length, gain = at.best(alpha)
            cells += [Cell(str(length)), number(gain), rate(at.plain_rate * gain)]
        rows.append(cells)
    title = "Costs measured by doctor" + (f" on {machine}" if machine else "")
    if alpha is not None:
        headers += ["best γ", "x plain", "tok/s"]
        title += f", α = {alpha:.2f} expected"
    return Table(headers, rows, title=title)


def _notes(doctor: Fields) -> list[Part]:
    derived = doctor.object("derived")
    notes = [f"Note: {words}." for words in doctor.texts("notes", 16, 1000)]
    return [*filter(None, [*derived.texts("diagnosis", 8, 1000), *notes, derived.text("limit", 1000)])]


def _measured(runs: Sequence[Run]) -> list[Table]:
    """A line for every bench: what the clock said of its engine and precision. It repeats the bundle's count of flips."""
    rows = []
    for run in runs:
        if (bench := run.bench) is None:
            continue
        best = bench.best
        words = " ".join(bench.text(key) for key in ("engine", "engine_version", "precision"))
        threads, exactness = bench.whole("threads"), bench.object("exactness")
        rows.append(
            [
                Cell(of_run(clean(words), run.number, len(runs)), many(threads, "thread") if threads else ""),
                rate(bench.plain.interval("token_rate")),
                Cell(best.name if best else ""),
                rate(best.interval("token_rate") if best else None),
                between(best.speedup if best else None),
                flips(exactness.whole("flips"), exactness.whole("positions")),
            ]
        )
    headers = ["", "plain tok/s", "best fixed γ", "tok/s", "x plain", "flips when packed"]
    return [Table(headers, rows, title="Measured by bench")] if rows else []


def _figure(ways: Sequence[tuple[int, Variant, float | None]], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        for place, (run, way, alpha) in enumerate(ways):
            plain, best = ("plain", "best γ, predicted") if not place else (None, None)
            axes.barh(place - 0.19, way.at.plain_rate, height=0.34, color=MUTED, label=plain)
            if alpha is not None:
                axes.barh(place + 0.19, way.at.token_rate(alpha), height=0.34, color=RUNS[run], label=best)
        names = [clean(of_run(way.name, run, runs), 40) for run, way, _ in ways]
        axes.set_yticks(range(len(ways)), names)
        lying(axes, "tokens per second", 2)

    return Figure(
        drawn("engines", draw, height=84 + 32 * len(ways)),
        "Tokens per second by engine and precision, plain and with the best draft length.",
        "By doctor's costs, at the context of an everyday chat.",
    )
