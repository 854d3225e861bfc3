"""What the report is given, told apart and read within bounds: bundles, builds and the JSON files of verbs. Puts it into runs.

One run is a pair and what was measured of it, and becomes a column of the page. A bundle or build begins a run. A JSON file
belongs to the latest run that has none of its kind yet and is not of another pair; where there is no such run it begins one, with
the bundle of the run before if that is of the same pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import MAX_JSON_BYTES, parse_json, read_bounded, sha256_file
from edgespec.core.manifest import MANIFEST, Manifest, check_file, read_manifest
from edgespec.recipe.schema import READ, ROUNDED, SELF_INSTRUCTIONS, SELF_PROMPTS, SELF_TEXT, STATES
from edgespec.report.fields import Fields, clean
from edgespec.report.measured import Bench, Setting, settings_of
from edgespec.stages.stage import STAGE_FILE
from edgespec.stages.training_facts import facts_of

BUNDLE, BUILD = "bundle", "build"
BENCH, DOCTOR, TRADEOFF = "bench", "doctor", "tradeoff"
VERIFY, ENGINES, EVALUATION = "verify", "other-engines", "evaluation"
MOST_COMMAND = 64 * 2**10  # bytes of a file that holds one command
MOST_RUNS = 8  # columns that a page can show side by side, and colours that one can tell apart
STAGES = (
    *("data", "target", "teacher", "plan", "tune", READ, SELF_PROMPTS, SELF_TEXT, SELF_INSTRUCTIONS),
    *("pretrain", "generate", STATES, ROUNDED, "store", "reference", "distill"),
    *("evaluate", "export", "verify", "pack"),
)
"""In the order of a build."""
WANTED = (
    "a bundle's or a build's folder is wanted, or what --json of bench, doctor, tradeoff, verify or other-engines wrote, "
    f"or an {EVALUATION}.json"
)
# The keys that a kind of file has and no other kind has together.
_MARKS = {
    BENCH: ("summaries", "runs", "verdict"),
    TRADEOFF: ("about", "arms", "summaries"),
    DOCTOR: ("chosen", "others", "derived"),
    VERIFY: ("files", "tokenizers", "acceptance"),
    EVALUATION: ("settings", "comparisons", "cost_ratio"),
}
_OTHERS = {
    ("sections", "left_out"): "the bench of random weights (--synthetic)",
    ("schema_version", "pair", "target", "drafter"): f"the {MANIFEST} of a bundle: give its folder",
}


@dataclass(frozen=True)
class Source:
    """One thing that was given or found in one. `sha256`: of a file; of a bundle, that of its manifest.

    `fields`: what a file says; of a bundle its provenance, and of a build the same as far as its stages tell it.
    """

    kind: str
    path: Path
    sha256: str = ""
    fields: Fields = Fields()
    manifest: Manifest | None = None
    in_bundle: bool = False  # it lay in a bundle, and was measured when that was made

    @property
    def names(self) -> tuple[str, str]:
        """(target, drafter) as it calls them; '' for what it does not say."""
        if self.manifest is not None:
            return clean(self.manifest.target.name), clean(self.manifest.drafter.name)
        if self.kind == TRADEOFF:
            target, _, drafter = self.fields.object("about").text("pair").partition(" with ")
            return target, drafter
        target = self.fields.text("target")
        return target, f"{target}-drafter" if self.kind == BUILD and target else self.fields.text("drafter")


Sources = dict[str, Source]


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
    def seconds(self) -> dict[str, float]:
        """By stage."""
        kept = self.made.object("seconds")
        found = {name: kept.number(name) for name in self.made.keys("seconds")}
        return {name: seconds for name, seconds in found.items() if seconds is not None and seconds >= 0}

    @property
    def names(self) -> tuple[str, str]:
        """(target, drafter) as bundle, files or build call them; '' for what none says."""
        surest_first = sorted(self.sources.values(), key=lambda one: (one.kind != BUNDLE, one.kind == BUILD))
        return next(filter(any, (one.names for one in surest_first)), ("", ""))

    @property
    def how(self) -> str:
        """Engine and precision of the bench, else the bundle's default; '' for neither."""
        if (bench := self.bench) is not None:
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
        pairs = zip(self.names, source.names, strict=True)
        return all(not mine or not its or mine == its for mine, its in pairs)


def gather(paths: Sequence[str]) -> list[Run]:
    """The runs of the page, in the order given. Raises InputError or BundleError for a path that is none of what is wanted."""
    runs: list[Run] = []
    for path in paths:
        found = _open(path)
        if {BUNDLE, BUILD} & {*found}:
            _begin(runs, found)
        else:
            _add(runs, *found.values())
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


def _open(name: str) -> Sources:
    """What a path holds, by kind: itself, then what lies in it. Raises InputError or BundleError: what it is, what is wanted."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _bundle(path)
        if stages := [stage for stage in STAGES if (path / stage / STAGE_FILE).is_file()]:
            return _build(path, stages)
        raise InputError(f"{path} is a folder without a {MANIFEST} or finished stages of a build; {WANTED}")
    if not path.exists():
        raise InputError(f"{path} is missing; {WANTED}")
    return _measurements(path)


def _measurements(path: Path) -> Sources:
    """A file of measurements, by its keys; the list that other-engines writes stands under "list"."""
    value, digest = _read(path)
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        if all({"name", "rule", "answers", "ours"} <= set(one) for one in value):
            return {ENGINES: Source(ENGINES, path, digest, Fields({"list": value}, str(path)))}
    elif isinstance(value, dict):
        for kind, keys in _MARKS.items():
            if set(keys) <= set(value):
                return {kind: Source(kind, path, digest, Fields(value, str(path)))}
    raise InputError(f"{path} is {_what(value)}; {WANTED}")


def _what(value: Any) -> str:
    """A JSON value that is no file of the report's, in words."""
    if not isinstance(value, dict):
        return f"JSON of the kind {type(value).__name__}"
    for keys, words in _OTHERS.items():
        if set(keys) <= set(value):
            return words
    names = ", ".join(repr(key[:40]) for key in list(value)[:6])
    return f"a JSON object with the keys {names or 'none'}"


def _bundle(path: Path) -> Sources:
    """The manifest, and its evaluation and verification where their bytes are those that it lists."""
    manifest = read_manifest(path)
    made = Fields(manifest.provenance, str(path))
    found = {BUNDLE: Source(BUNDLE, path, sha256_file(path / MANIFEST), made, manifest)}
    for kind in (EVALUATION, VERIFY):
        if (entry := manifest.files.get(name := f"{kind}.json")) is not None:
            found |= _inside(check_file(path.resolve(), name, entry), kind, in_bundle=True)
    return found


def _build(path: Path, names: list[str]) -> Sources:
    """What its stages say, and the bundle or, before there is one, what was evaluated and verified."""
    stages = {name: _object(path / name / STAGE_FILE)[0] for name in names}
    found: Sources = {}
    if (path / BUNDLE / MANIFEST).exists():
        found = _bundle(path / BUNDLE)
    else:
        for stage, kind in (("evaluate", EVALUATION), ("verify", VERIFY)):
            if (file := path / stage / f"{kind}.json").is_file():
                found |= _inside(file, kind)
    recipe = found[BUNDLE].fields.object("recipe") if BUNDLE in found else Fields()
    command = path / "command.txt"
    words = read_bounded(command, limit=MOST_COMMAND) if command.is_file() else b""
    told = {
        "command": words.decode("utf-8", "replace").strip(),
        "seconds": {name: stage.number("seconds") for name, stage in stages.items()},
        "target": stages.get("target", Fields()).object("counts").text("name"),
        "training": facts_of({name: stage.values for name, stage in stages.items()}, recipe.whole("seed")),
    }
    known = Fields({key: value for key, value in told.items() if value}, str(path))
    return {BUILD: Source(BUILD, path, fields=known), **found}


def _inside(path: Path, kind: str, *, in_bundle: bool = False) -> Sources:
    """A file of a bundle or build; none where it is empty, which says that nothing was measured."""
    found, digest = _object(path)
    return {kind: Source(kind, path, digest, found, in_bundle=in_bundle)} if found.values else {}


def _object(path: Path) -> tuple[Fields, str]:
    value, digest = _read(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}; a JSON object is wanted: build it again")
    return Fields(value, str(path)), digest


def _read(path: Path) -> tuple[Any, str]:
    """A JSON file's value and SHA-256."""
    data = read_bounded(path, limit=MAX_JSON_BYTES)
    return parse_json(data, path), hashlib.sha256(data).hexdigest()
