"""What was built and how: both models, the recipe, what was read and written, how long every stage took."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.core.manifest import HEAD
from edgespec.core.table import count, duration
from edgespec.report.fields import Fields, clean
from edgespec.report.gather import Run
from edgespec.report.parts import ABSENT, Cell, Section, Table
from edgespec.report.sources import STAGES

Fact = tuple[str, Callable[[Run], Cell]]


def built_section(runs: Sequence[Run]) -> Section:
    section = Section("built", "What was built, and how")
    known = [run for run in runs if run.manifest is not None or run.build is not None]
    if not known:
        section.missing.append(("the pair and how it was made", "edgespec report BUNDLE bench.json"))
        return section
    columns: list[int | None] = [None, *(run.number for run in known)]
    rows = []
    for name, tell in FACTS:
        cells = [tell(run) for run in known]
        if any(cell.text != ABSENT for cell in cells):
            rows.append([Cell(name), *cells])
    headers = ["", *(run.letter if len(runs) > 1 else "" for run in known)]
    section.parts.append(Table(headers, rows, runs=columns, title="facts"))
    times = {run.number: seconds_of(run) for run in known}
    names = [name for name in STAGES if any(name in one for one in times.values())]
    if names:
        longest = max(seconds for one in times.values() for seconds in one.values())
        timed = [
            [Cell(name), *(_time(times[run.number].get(name), longest) for run in known)] for name in names
        ]
        whole = [_time(sum(one.values()) if (one := times[run.number]) else None, 0.0) for run in known]
        timed.append([Cell("all", strong=True), *whole])
        section.parts.append(
            Table(["stage", *(name or "time" for name in headers[1:])], timed, runs=columns, title="times")
        )
    else:
        section.missing.append(("times of the stages", "edgespec report BUILD, the folder that --out named"))
    if all(run.build is None for run in known):
        section.missing.append(
            ("tokens written and trained on", "edgespec report BUILD, the folder that --out named")
        )
    return section


def seconds_of(run: Run) -> dict[str, float]:
    """Seconds by stage: a build's own, else those that its bundle keeps."""
    if run.build is not None:
        found = {name: stage.number("seconds") for name, stage in run.build.stages.items()}
    elif run.manifest is not None:
        kept = provenance_of(run)
        found = {name: kept.object("seconds").number(name) for name in kept.keys("seconds")}
    else:
        found = {}
    return {name: seconds for name, seconds in found.items() if seconds is not None and seconds >= 0}


def provenance_of(run: Run) -> Fields:
    """What the manifest says of how the bundle came about; empty without one."""
    assert run.manifest is not None
    return Fields(run.manifest.provenance, str(run.manifest.folder))


def recipe_of(run: Run) -> Fields:
    """The resolved recipe, of the bundle; empty where nobody kept it."""
    return provenance_of(run).object("recipe") if run.manifest is not None else Fields({}, "")


def _time(seconds: float | None, longest: float) -> Cell:
    if seconds is None:
        return Cell(ABSENT)
    return Cell(duration(seconds), bar=seconds / longest if longest else None, strong=not longest)


def _counts(run: Run, stage: str) -> Fields:
    """What a stage of the build counted; empty where there is none."""
    if run.build is None or stage not in run.build.stages:
        return Fields({}, "")
    return run.build.stages[stage].object("counts")


def _target(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(run.names[0] or ABSENT)
    return Cell(clean(run.manifest.target.name), clean(run.manifest.target.source))


def _size(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(ABSENT)
    return Cell(f"{count(run.manifest.target.parameters)} parameters", _shape(run.manifest.target.shape, run))


def _shape(shape: Mapping[str, Any], run: Run) -> str:
    """`30 layers × 576, vocabulary 49,152`, as far as the manifest says."""
    found = Fields(shape, f"{run.manifest.folder if run.manifest else ''}")
    layers, hidden, vocabulary = (found.whole(name) for name in ("layers", "hidden", "vocab_size"))
    words = f"{layers} layer{'s' * (layers != 1)} × {hidden}" if layers and hidden else ""
    return ", ".join(filter(None, [words, f"vocabulary {vocabulary:,}" if vocabulary else ""]))


def _drafter(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(run.names[1] or ABSENT)
    drafter = run.manifest.drafter
    kind = "a head that reads the target's hidden states" if drafter.kind == HEAD else "a model of its own"
    some = ", with some of the target's tokens" if drafter.vocabulary is not None else ""
    return Cell(clean(drafter.name), kind + some)


def _drafter_size(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(ABSENT)
    mine, its = run.manifest.drafter.parameters, run.manifest.target.parameters
    return Cell(f"{count(mine)} parameters ({mine / its:.1%})", _shape(run.manifest.drafter.shape, run))


def _recipe(run: Run) -> Cell:
    """The name after --recipe in the command that built the pair."""
    command = run.build.command if run.build is not None else provenance_of(run).text("command", 4000)
    found = re.search(r"--recipe[= ]([\w./-]+)", command)
    return Cell(clean(found[1]) if found else ABSENT)


def _trained(run: Run, stage: str) -> Cell:
    """What the drafter read in a stage that was run: tokens, else steps. A bundle of two given models has no such stage."""
    if stage not in seconds_of(run):
        return Cell(ABSENT)
    asked, counted = recipe_of(run).object(stage), _counts(run, stage)
    steps, divergence = asked.whole("steps"), asked.text("divergence")
    tokens, loss = counted.number("tokens"), counted.number("loss_last")
    words = f"{count(tokens)} tokens" if tokens else f"{steps:,} steps" if steps else ABSENT
    notes = [f"{steps:,} steps" if tokens and steps else "", f"divergence {divergence}" if divergence else ""]
    notes += ["" if loss is None else f"loss {loss:.2f} at the end"]
    return Cell(words, ", ".join(filter(None, notes)))


def _written(run: Run) -> Cell:
    if "generate" not in seconds_of(run):
        return Cell(ABSENT)
    found, asked = _counts(run, "generate"), recipe_of(run).object("generate").whole("prompts")
    tokens, replies = found.number("response_tokens"), found.whole("responses") or asked
    words = f"{count(tokens)} tokens" if tokens else f"{replies:,} replies" if replies else ABSENT
    return Cell(words, f"{replies:,} replies" if tokens and replies else "")


def _default(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(ABSENT)
    default = run.manifest.default
    return Cell(clean(f"{default['engine']} {default['precision']}"), clean(default["reason"], 300))


def _device(run: Run) -> Cell:
    name = run.manifest.device.get("name") if run.manifest is not None else None
    return Cell(clean(name) if name else ABSENT)


def _pair(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(ABSENT)
    return Cell(
        f"{len(run.manifest.files):,} files", _bytes(sum(one.bytes for one in run.manifest.files.values()))
    )


def _bytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


FACTS: tuple[Fact, ...] = (
    ("target", _target),
    ("its size", _size),
    ("drafter", _drafter),
    ("its size", _drafter_size),
    ("recipe", _recipe),
    ("pretrained on", lambda run: _trained(run, "pretrain")),
    ("the target wrote", _written),
    ("distilled on", lambda run: _trained(run, "distill")),
    ("runs unless told otherwise", _default),
    ("made for", _device),
    ("bundle", _pair),
)
