"""By engine and precision: what bench measured, and the ways to run the bundle that doctor compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.table import many
from edgespec.report.fields import Fields, clean
from edgespec.report.figures import MUTED, RUNS, drawn, lying
from edgespec.report.gather import Run
from edgespec.report.measured import PLAIN
from edgespec.report.parts import Cell, Figure, Section, Table, Words, between, flips, number, of_run, rate
from edgespec.report.sources import DOCTOR

MOST_WAYS = 40  # engines, precisions and modes of one bundle
MOST_CONTEXTS, MOST_PASSES = 16, 65


@dataclass(frozen=True)
class Way:
    """One of doctor's ways to run: its plain and its predicted token rate (None without an α), and a table's cells."""

    name: str
    plain: float
    best: float | None
    cells: Sequence[Cell]


def ways_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "engines",
        "By engine and precision",
        "v(n) is a pass over n tokens and c a drafter step, both in plain steps. From these costs and the expected α follow the "
        "best γ and its token rate, which are predictions; bench measures them.",
    )
    doctored = {run.number: run.fields(DOCTOR) for run in runs if DOCTOR in run.sources}
    ways = {run: _ways(found) for run, found in doctored.items()}
    bars = [(run, way) for run, found in ways.items() for way in found]
    if len(bars) > 1:
        section.parts.append(_figure(bars, len(runs)))
    section.parts += _measured(runs)
    columns = {run: [_costs(found, ways[run]), *_notes(found)] for run, found in doctored.items()}
    section.beside(columns, "other ways to run the bundle", "edgespec doctor BUNDLE --json doctor.json")
    return section


def _ways(doctor: Fields) -> list[Way]:
    """The ways to run that doctor compared, the chosen one first."""
    alpha = _alpha(doctor)
    return [_way(one, alpha) for one in (doctor.object("chosen"), *doctor.objects("others", MOST_WAYS))]


def _alpha(doctor: Fields) -> float | None:
    """The acceptance rate that doctor expects first."""
    return next((one.share("rate") for one in doctor.objects("acceptances", 16)), None)


def _costs(doctor: Fields, ways: Sequence[Way]) -> Table:
    alpha, machine = _alpha(doctor), doctor.object("device").text("cpu", 80)
    headers = ["", "plain tok/s", "v(2)", "v(4)", "c", "flips"]
    headers += ["best γ", "x plain", "tok/s"] if alpha is not None else []
    where = f" on {machine}" if machine else ""
    expected = f", α = {alpha:.2f} expected" if alpha is not None else ""
    title = f"Costs measured by doctor{where}{expected}"
    return Table(headers, [way.cells for way in ways], title=title)


def _notes(doctor: Fields) -> list[Words]:
    derived = doctor.object("derived")
    notes = [f"Note: {words}." for words in doctor.texts("notes", 16, 1000)]
    found = [*derived.texts("diagnosis", 8, 1000), *notes, derived.text("limit", 1000)]
    return [Words(words) for words in found if words]


def _measured(runs: Sequence[Run]) -> list[Table]:
    """A line for every bench: what the clock said of its engine and precision."""
    rows = []
    for run in runs:
        if (bench := run.bench) is None:
            continue
        plain, best, fields = bench.at(PLAIN), bench.best, bench.fields
        words = " ".join(fields.text(key) for key in ("engine", "engine_version", "precision"))
        threads, exactness = fields.whole("threads"), fields.object("exactness")
        rows.append(
            [
                Cell(of_run(clean(words), run.number, len(runs)), many(threads, "thread") if threads else ""),
                rate(plain.token_rate if plain else None),
                Cell(best.name if best else ""),
                rate(best.token_rate if best else None),
                between(best.speedup if best else None),
                flips(exactness.whole("flips"), exactness.whole("positions")),
            ]
        )
    headers = ["", "plain tok/s", "best fixed γ", "tok/s", "x plain", "flips"]
    return [Table(headers, rows, title="Measured by bench")] if rows else []


def _way(way: Fields, alpha: float | None) -> Way:
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
    changed, positions = difference.whole("flips"), difference.whole("positions")
    variant = Variant(
        way.text("engine", 40),
        way.text("precision", 40),
        way.flag("flash_attention"),
        known,
        Difference(difference.number("largest") or 0.0, changed or 0, positions or 0),
        way.flag("fast_graph") or False,
    )
    at = variant.at
    plain = at.plain_rate
    cells = [
        Cell(variant.name),
        rate(plain),
        number(at.v(2)),
        number(at.v(4)),
        number(at.c_t),
        flips(changed, positions),
    ]
    if alpha is None:
        return Way(variant.name, plain, None, cells)
    length, gain = at.best(alpha)
    cells += [Cell(str(length)), number(gain), rate(plain * gain)]
    return Way(variant.name, plain, plain * gain, cells)


def _figure(ways: Sequence[tuple[int, Way]], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        names = [clean(of_run(way.name, run, runs), 40) for run, way in ways]
        for place, (run, way) in enumerate(ways):
            axes.barh(place - 0.19, way.plain, height=0.34, color=MUTED, label="plain" if not place else None)
            if way.best is not None:
                words = "best γ, predicted" if not place else None
                axes.barh(place + 0.19, way.best, height=0.34, color=RUNS[run], label=words)
        axes.set_yticks(range(len(ways)), names)
        lying(axes, "tokens per second", 2)

    return Figure(
        drawn("engines", draw, height=84 + 32 * len(ways)),
        "Tokens per second by engine and precision, plain and with the best draft length.",
        "By doctor's costs, at the context of an everyday chat.",
    )
