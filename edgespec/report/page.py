"""The page itself: a head with the first figures, then the sections, through one template that escapes all but our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from edgespec.core import __version__
from edgespec.core.progress import progress
from edgespec.core.table import count
from edgespec.report.acceptance import acceptance_section, replies_section
from edgespec.report.built import built_section
from edgespec.report.curves import curves_section
from edgespec.report.engines import ways_section
from edgespec.report.gather import Run
from edgespec.report.measured import PLAIN, Setting
from edgespec.report.other_engines import others_section
from edgespec.report.parts import Cell, Section, between, rate
from edgespec.report.precision import files_section
from edgespec.report.provenance import provenance_section
from edgespec.report.sources import BENCH
from edgespec.report.speed import category_section, speed_section, time_section

UNNAMED = "a pair whose bundle was not given"
TEMPLATE, STYLE = "page.html.j2", "page.css"
SECTIONS: tuple[Callable[[Sequence[Run]], Section], ...] = (
    speed_section,
    time_section,
    acceptance_section,
    built_section,
    category_section,
    ways_section,
    files_section,
    others_section,
    curves_section,
    replies_section,
    provenance_section,
)


@dataclass(frozen=True)
class Head:
    """One run in short. `facts`: (figure, what it is)."""

    run: int
    title: str
    how: str
    facts: Sequence[tuple[Cell, str]]
    verdict: str


def page(runs: Sequence[Run]) -> str:
    """HTML that needs no other file. Raises InputError for a field of another kind than it should be, MissingExtra."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("edgespec.report")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string((folder / TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        title=_title(runs),
        style=Markup((folder / STYLE).read_text(encoding="utf-8")),  # our own file
        runs=runs,
        heads=[_head(run) for run in runs],
        sections=_sections(runs),
        version=__version__,
        date=time.strftime("%Y-%m-%d"),
    )


def _sections(runs: Sequence[Run]) -> list[Section]:
    found = []
    with progress("report", len(SECTIONS), "parts") as bar:
        for section in SECTIONS:
            found.append(section(runs))
            bar.update(1)
    return found


def _title(runs: Sequence[Run]) -> str:
    """The targets by name, each once."""
    names = list(dict.fromkeys(run.names[0] for run in runs if run.names[0]))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "A pair"


def _head(run: Run) -> Head:
    facts: list[tuple[Cell, str]] = []
    if (bench := run.bench) is not None:
        used, best, plain = bench.used, bench.best, bench.at(PLAIN)
        if used is not None and used.speedup is not None:
            facts.append((between(used.speedup, unit="x"), f"plain decoding's speed, {used.name}"))
        if best is not None and best is not used and best.speedup is not None:
            words = f"plain decoding's speed, {best.name}, the fastest fixed"
            facts.append((between(best.speedup, unit="x"), words))
        if plain is not None and plain.token_rate is not None:
            facts.append((rate(plain.token_rate), "tokens per second, plain"))
        if best is not None and best.tau is not None:
            facts.append((between(best.tau), f"τ, tokens per target pass, {best.name}"))
    elif (setting := _usual(run.settings)) is not None:
        where = f"{setting.where}, γ = {setting.draft_length}, when it was built"
        facts += [
            (between(setting.tau), f"τ, tokens per target pass, {where}"),
            (between(setting.alpha), f"α, {where}"),
        ]
    if run.manifest is not None:
        mine, its = run.manifest.drafter.parameters, run.manifest.target.parameters
        share = Cell(f"{mine / its:.1%}", f"{count(mine)} of {count(its)}")
        facts.append((share, "the drafter's parameters of the target's"))
    target, drafter = run.names
    title = f"{target} with {drafter}" if target and drafter else target or UNNAMED
    return Head(run.number, title, run.how, facts, run.fields(BENCH).text("verdict", 1000))


def _usual(settings: Sequence[Setting]) -> Setting | None:
    """Greedy with the draft length nearest to three."""
    greedy = [one for one in settings if one.temperature == 0] or list(settings)
    return min(greedy, key=lambda one: abs(one.draft_length - 3), default=None)
