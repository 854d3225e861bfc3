"""Where everything comes from: commands, machines, versions, the recipe, and the hashes of what was read and of the files."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from edgespec.core.manifest import Manifest
from edgespec.report.fields import Fields, clean
from edgespec.report.gather import BENCH, BUILD, BUNDLE, DOCTOR, TRADEOFF, Run
from edgespec.report.parts import ABSENT, Cell, Code, Part, Section, Table, size

MOST_COMMAND = 4000  # characters of a command that are shown
MOST_RECIPE = 20_000
MOST_FILES = 300  # files of a bundle that are listed


def provenance_section(runs: Sequence[Run]) -> Section:
    section = Section("provenance", "Where this comes from")
    section.parts.append({run.number: _told(run) for run in runs})
    return section


def _told(run: Run) -> list[Part]:
    about = [[Cell(name), Cell(value)] for name, value in _facts(run) if value]
    parts: list[Part] = [Table(["", ""], about, left=2, title="about")]
    parts += map(Code, _commands(run))
    read = [[Cell(kind), Cell(path, run.sources[kind].sha256)] for kind, path in _paths(run).items()]
    parts.append(Table(["read for this page", "path, and SHA-256"], read, left=2, title="read"))
    if run.manifest is not None:
        parts.append(_files(run.manifest))
        if recipe := dict(run.made.object("recipe").values):
            text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
            parts.append(Code(clean(text, MOST_RECIPE, lines=True), "The recipe with every value"))
    return parts


def _facts(run: Run) -> list[tuple[str, str]]:
    """'' for what nobody says."""
    made, bench, paths = run.made, run.fields(BENCH), _paths(run)
    study, doctor = run.fields(TRADEOFF).object("about"), run.fields(DOCTOR).object("device")
    threads, seed, versions = bench.whole("threads"), made.whole("seed"), made.object("versions")
    used = (f"{clean(name, 40)} {versions.text(name, 40)}" for name in made.keys("versions", 20))
    return [
        ("bundle", paths.get(BUNDLE, "")),
        ("its manifest's SHA-256", run.sources[BUNDLE].sha256 if BUNDLE in run.sources else ""),
        ("build", paths.get(BUILD, "")),
        ("tokenizer's SHA-256", clean(run.manifest.pair["tokenizer_sha256"]) if run.manifest else ""),
        ("made with", ", ".join(used)),
        ("seed", "" if seed is None else str(seed)),
        ("machine", bench.text("device") or study.text("device") or doctor.text("cpu")),
        ("threads", str(threads) if threads else ""),
        ("date", bench.text("date", 20)),
        ("sampling", _sampling(bench.object("options"))),
    ]


def _paths(run: Run) -> dict[str, str]:
    return {kind: clean(str(one.path), 400) for kind, one in run.sources.items()}


def _sampling(options: Fields) -> str:
    temperature, tokens = options.number("temperature"), options.whole("max_new_tokens")
    rule = options.text("rule", 60)
    words = [
        "" if temperature is None else "greedy" if temperature == 0 else f"temperature {temperature:g}",
        f"up to {tokens:,} tokens" if tokens else "",
        f"rule {rule}" if rule else "",
    ]
    return ", ".join(filter(None, words))


def _commands(run: Run) -> list[str]:
    """Every command that a file tells, once."""
    told = [*map(run.fields, (BUILD, BUNDLE, BENCH)), run.fields(TRADEOFF).object("about")]
    return [*filter(None, dict.fromkeys(one.text("command", MOST_COMMAND, lines=True) for one in told))]


def _files(manifest: Manifest) -> Table:
    entries = list(manifest.files.items())
    rows = [[Cell(clean(name, 300), entry.sha256), size(entry.bytes)] for name, entry in entries[:MOST_FILES]]
    if len(entries) > MOST_FILES:
        rows.append([Cell(f"and {len(entries) - MOST_FILES:,} more in manifest.json"), Cell(ABSENT)])
    return Table(["file of the bundle, and its SHA-256", "size"], rows, title="hashes")
