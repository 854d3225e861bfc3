"""From what was given to runs: one run is a pair and what was measured of it, and becomes a column of the page.

A bundle or build begins a run. A JSON file belongs to the latest run that has none of its kind yet and is not of another pair;
where there is no such run it begins one, with the bundle of the run before if that is of the same pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.core.errors import InputError
from edgespec.core.manifest import Manifest
from edgespec.report.fields import Fields, clean
from edgespec.report.parts import letter
from edgespec.report.sources import (
    BENCH,
    BUILD,
    BUNDLE,
    DOCTOR,
    EVALUATION,
    TRADEOFF,
    VERIFY,
    Source,
    open_source,
)

MOST_RUNS = 8  # columns that a page can show side by side, and colours that one can tell apart


@dataclass
class Run:
    """A pair and what is known of it. `number` counts from 0; `sources` are what was given for it, by kind."""

    number: int = 0
    sources: dict[str, Source] = field(default_factory=dict)

    @property
    def letter(self) -> str:
        return letter(self.number)

    @property
    def manifest(self) -> Manifest | None:
        return self.sources[BUNDLE].manifest if BUNDLE in self.sources else None

    @property
    def build(self) -> Source | None:
        return self.sources.get(BUILD)

    def fields(self, kind: str) -> Fields | None:
        """The content of a file of measurements; None where there is none."""
        return self.sources[kind].fields if kind in self.sources else None

    def objects(self, kind: str, key: str, most: int) -> list[Fields]:
        """The objects in a list of such a file; none without the file."""
        found = self.fields(kind)
        return [] if found is None else list(found.objects(key, most))

    @property
    def names(self) -> tuple[str, str]:
        """(target, drafter) as bundle or files call them; '' for what none says."""
        if self.manifest is not None:
            return clean(self.manifest.target.name), clean(self.manifest.drafter.name)
        for kind in (BENCH, DOCTOR, TRADEOFF):
            if kind in self.sources and (found := _names(self.sources[kind])) != ("", ""):
                return found
        if self.build is not None and "target" in self.build.stages:
            target = self.build.stages["target"].object("counts").text("name")
            return target, f"{target}-drafter" if target else ""
        return "", ""

    @property
    def how(self) -> str:
        """Engine and precision of the bench, else the bundle's default; '' for neither."""
        if (bench := self.fields(BENCH)) is not None:
            mode = bench.object("options").text("mode")
            words = [bench.text("engine"), bench.text("precision"), f"{mode} mode" if mode else ""]
            return " ".join(filter(None, words))
        if self.manifest is not None:
            return clean(f"{self.manifest.default['engine']} {self.manifest.default['precision']}")
        return ""

    def takes(self, source: Source) -> bool:
        """Whether a file of measurements can be of this run."""
        return source.kind not in self.sources and self.same_pair(source)

    def same_pair(self, source: Source) -> bool:
        """False where both say which pair they are of, and it is another one."""
        bundle = source.fields.text("bundle") if source.kind == BENCH and source.fields else ""
        if bundle and BUNDLE in self.sources:
            return bundle == self.sources[BUNDLE].sha256
        mine, its = self.names, _names(source)
        return all(not a or not b or a == b for a, b in zip(mine, its, strict=True))


def gather(paths: Sequence[str]) -> list[Run]:
    """The runs of the page, in the order given. Raises InputError or BundleError for a path that is none of what is wanted."""
    runs: list[Run] = []
    for path in paths:
        source = open_source(path)
        if source.kind in (BUNDLE, BUILD):
            _begin(runs, source)
        else:
            _add(runs, source)
    if len(runs) > MOST_RUNS:
        raise InputError(f"{len(runs)} runs were given; at most {MOST_RUNS} fit side by side: give fewer")
    for number, run in enumerate(runs):
        run.number = number
    return runs


def _begin(runs: list[Run], source: Source) -> None:
    """A bundle or build: a run of its own, or that of the files given before it where these are its."""
    found = {one.kind: one for one in source.all_inside()}
    named = Run(sources=found)
    last = runs[-1] if runs else None
    waits = last is not None and not {BUNDLE, BUILD} & set(last.sources)
    if last is not None and waits and all(named.same_pair(own) for own in last.sources.values()):
        last.sources = found | last.sources
        return
    runs.append(named)


def _add(runs: list[Run], source: Source) -> None:
    fitting = [run for run in runs if run.takes(source)]
    # what lies in a bundle was measured when it was made: a file that was given counts more
    inside = [run for run in runs[-1:] if source.kind in (VERIFY, EVALUATION) and BUNDLE in run.sources]
    for run in [*reversed(fitting), *inside]:
        run.sources[source.kind] = source
        return
    shared = {BUNDLE, BUILD, EVALUATION, VERIFY}
    same = [run for run in runs if run.same_pair(source)]
    before = same[-1].sources if same else {}
    runs.append(
        Run(sources={kind: one for kind, one in before.items() if kind in shared} | {source.kind: source})
    )


def _names(source: Source) -> tuple[str, str]:
    if source.fields is None:
        return "", ""
    if source.kind == TRADEOFF:
        target, _, drafter = source.fields.object("about").text("pair").partition(" with ")
        return target, drafter
    if source.kind in (BENCH, DOCTOR):
        return source.fields.text("target"), source.fields.text("drafter")
    return "", ""
