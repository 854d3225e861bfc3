"""From what was given to runs: one run is a pair and what was measured of it, and becomes a column of the page.

A bundle or build begins a run. A JSON file belongs to the latest run that has none of its kind yet and is not of another pair;
where there is no such run it begins one, with the bundle of the run before if that is of the same pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from edgespec.core.errors import InputError
from edgespec.core.manifest import Manifest
from edgespec.report.fields import Fields, clean
from edgespec.report.measured import Bench, Setting, settings_of
from edgespec.report.sources import (
    BENCH,
    BUILD,
    BUNDLE,
    DOCTOR,
    EVALUATION,
    TRADEOFF,
    VERIFY,
    Source,
    Sources,
    open_sources,
)

MOST_RUNS = 8  # columns that a page can show side by side, and colours that one can tell apart


@dataclass
class Run:
    """A pair and what is known of it. `number` counts from 0; `sources` are what was given for it, by kind."""

    number: int = 0
    sources: Sources = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest | None:
        return self.sources[BUNDLE].manifest if BUNDLE in self.sources else None

    def fields(self, kind: str) -> Fields:
        """The content of a file of measurements; empty where there is none."""
        return self.sources[kind].fields if kind in self.sources else Fields()

    @cached_property
    def bench(self) -> Bench | None:
        found = self.fields(BENCH)
        return Bench(found.values, found.where) if BENCH in self.sources else None

    @cached_property
    def settings(self) -> list[Setting]:
        """Of the evaluation; none without one."""
        return settings_of(self.fields(EVALUATION))

    @property
    def made(self) -> Fields:
        """How the pair came about: the bundle's provenance, and before it what a build says of itself."""
        build, bundle = self.fields(BUILD), self.fields(BUNDLE)
        return Fields({**bundle.values, **build.values}, bundle.where or build.where)

    @property
    def recipe(self) -> Fields:
        """The resolved recipe, of the bundle; empty where nobody kept it."""
        return self.made.object("recipe")

    @property
    def seconds(self) -> dict[str, float]:
        """By stage."""
        kept = self.made.object("seconds")
        found = {name: kept.number(name) for name in self.made.keys("seconds")}
        return {name: seconds for name, seconds in found.items() if seconds is not None and seconds >= 0}

    @property
    def names(self) -> tuple[str, str]:
        """(target, drafter) as bundle, files or build call them; '' for what none says."""
        given = (
            self.sources[kind] for kind in (BUNDLE, BENCH, DOCTOR, TRADEOFF, BUILD) if kind in self.sources
        )
        return next(filter(any, map(_names, given)), ("", ""))

    @property
    def how(self) -> str:
        """Engine and precision of the bench, else the bundle's default; '' for neither."""
        if BENCH in self.sources:
            bench = self.fields(BENCH)
            mode = bench.object("options").text("mode")
            words = [bench.text("engine"), bench.text("precision"), f"{mode} mode" if mode else ""]
            return " ".join(filter(None, words))
        if self.manifest is not None:
            return clean(f"{self.manifest.default['engine']} {self.manifest.default['precision']}")
        return ""

    def same_pair(self, source: Source) -> bool:
        """False where both say which pair they are of, and it is another one."""
        bundle = source.fields.text("bundle") if source.kind == BENCH else ""
        if bundle and BUNDLE in self.sources:
            return bundle == self.sources[BUNDLE].sha256
        mine, its = self.names, _names(source)
        return all(not a or not b or a == b for a, b in zip(mine, its, strict=True))


def gather(paths: Sequence[str]) -> list[Run]:
    """The runs of the page, in the order given. Raises InputError or BundleError for a path that is none of what is wanted."""
    runs: list[Run] = []
    for path in paths:
        found = open_sources(path)
        if {BUNDLE, BUILD} & {*found}:
            _begin(runs, found)
        else:
            for source in found.values():
                _add(runs, source)
    if len(runs) > MOST_RUNS:
        raise InputError(f"{len(runs)} runs were given; at most {MOST_RUNS} fit side by side: give fewer")
    for number, run in enumerate(runs):
        run.number = number
    return runs


def _begin(runs: list[Run], found: Sources) -> None:
    """A bundle or build: a run of its own, or that of the files given before it where these are its."""
    named = Run(sources=found)
    last = runs[-1].sources if runs else {}
    if last and not {BUNDLE, BUILD} & {*last} and all(named.same_pair(own) for own in last.values()):
        runs[-1].sources = found | last
    else:
        runs.append(named)


def _add(runs: list[Run], source: Source) -> None:
    same = [run for run in runs if run.same_pair(source)]
    # a file that was given counts more than what lay in the bundle
    inside = [run for run in runs[-1:] if (own := run.sources.get(source.kind)) and own.in_bundle]
    if homes := [*(run for run in same if source.kind not in run.sources), *inside]:
        homes[-1].sources[source.kind] = source
        return
    before = same[-1].sources if same else {}
    shared = {kind: before[kind] for kind in before if kind in (BUNDLE, BUILD, EVALUATION, VERIFY)}
    runs.append(Run(sources={**shared, source.kind: source}))


def _names(source: Source) -> tuple[str, str]:
    """(target, drafter) as it calls them."""
    if source.manifest is not None:
        return clean(source.manifest.target.name), clean(source.manifest.drafter.name)
    if source.kind == TRADEOFF:
        target, _, drafter = source.fields.object("about").text("pair").partition(" with ")
        return target, drafter
    target = source.fields.text("target")
    return target, f"{target}-drafter" if source.kind == BUILD and target else source.fields.text("drafter")
