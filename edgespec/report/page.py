"""The page itself: a head with the first figures, then the sections, through one template that escapes all but our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files

from edgespec.core import __version__
from edgespec.core.progress import progress
from edgespec.core.table import count
from edgespec.report.acceptance import acceptance_section, replies_section
from edgespec.report.built import built_section
from edgespec.report.curves import curves_section
from edgespec.report.engines import ways_section
from edgespec.report.gather import BENCH, Run
from edgespec.report.other_engines import others_section
from edgespec.report.parts import Cell, Section, between, letter, rate
from edgespec.report.precision import files_section
from edgespec.report.provenance import provenance_section
from edgespec.report.speed import category_section, speed_section, time_section

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


def page(runs: Sequence[Run]) -> str:
    """HTML that needs no other file. Raises InputError for a field of another kind than it should be, MissingExtra."""
    from jinja2 import StrictUndefined, Template
    from markupsafe import Markup

    text, style = (
        (files("edgespec.report") / name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css")
    )
    template: Template = Template(
        text, autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    sections = []
    with progress("report", len(SECTIONS), "parts") as bar:
        for section in SECTIONS:
            sections.append(section(runs))
            bar.update()
    targets = list(dict.fromkeys(run.names[0] for run in runs if run.names[0]))
    more = f" and {len(targets) - 3} more" if len(targets) > 3 else ""
    return template.render(
        title=", ".join(targets[:3]) + more or "A pair",
        style=Markup(style),  # our own file
        runs=runs,
        name_of=letter,
        heads=[
            (run, _title(run), list(_figures(run)), run.fields(BENCH).text("verdict", 1000)) for run in runs
        ],
        sections=sections,
        version=__version__,
        date=time.strftime("%Y-%m-%d"),
    )


def _title(run: Run) -> str:
    target, drafter = run.names
    return f"{target} with {drafter}" if target and drafter else target or "a pair whose bundle was not given"


def _figures(run: Run) -> Iterator[tuple[Cell, str]]:
    """A run in short: every figure with what it is."""
    if (bench := run.bench) is not None:
        best = bench.best
        used = bench.chosen or best  # what chat would do
        if used is not None and used.speedup is not None:
            yield between(used.speedup, unit="x"), f"plain decoding's speed, {used.name}"
        if best is not None and best is not used:
            words = f"plain decoding's speed, {best.name}, the fastest fixed"
            yield between(best.speedup, unit="x"), words
        if (plain := bench.plain.interval("token_rate")) is not None:
            yield rate(plain), "tokens per second, plain"
        if best is not None and best.tau is not None:
            yield between(best.tau), f"τ, tokens per target pass, {best.name}"
    elif run.settings:
        # greedy with the draft length nearest to three
        setting = min(run.settings, key=lambda one: (one.temperature != 0, abs(one.draft_length - 3)))
        where = f"{setting.sampling}, γ = {setting.draft_length}, when it was built"
        yield between(setting.metric("tau")), f"τ, tokens per target pass, {where}"
        yield between(setting.metric("alpha_empirical")), f"α, {where}"
    if run.manifest is not None:
        mine, its = run.manifest.drafter.parameters, run.manifest.target.parameters
        share = Cell(f"{mine / its:.1%}", f"{count(mine)} of {count(its)}")
        yield share, "the drafter's parameters of the target's"
