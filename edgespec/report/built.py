"""What was built and how: both models, the recipe, what was read and written, how long every stage took."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from edgespec.core.manifest import HEAD, BundleModel, Manifest
from edgespec.core.table import count, duration
from edgespec.report.fields import Fields, clean
from edgespec.report.gather import Run
from edgespec.report.parts import ABSENT, Cell, Section, Table
from edgespec.report.sources import STAGES
from edgespec.stages.training_facts import DISTILL, PRETRAIN, facts_of

MOST_PHASES = 64  # of a training
Fact = tuple[str, Callable[[Run], Cell]]


def built_section(runs: Sequence[Run]) -> Section:
    section = Section("built", "What was built, and how")
    known = [run for run in runs if run.manifest is not None or run.build is not None]
    if not known:
        return section.lacks("the pair and how it was made", "edgespec report BUNDLE bench.json")
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
    a_build = "edgespec report BUILD, the folder that --out named"
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
        section.lacks("times of the stages", a_build)
    if not any(training_of(run).values for run in known):
        section.lacks("tokens written and trained on", a_build)
    return section


def seconds_of(run: Run) -> dict[str, float]:
    """Seconds by stage: a build's own, else those that its bundle keeps."""
    if run.build is not None:
        found = {name: stage.number("seconds") for name, stage in run.build.stages.items()}
    else:
        kept = provenance_of(run)
        found = {name: kept.object("seconds").number(name) for name in kept.keys("seconds")}
    return {name: seconds for name, seconds in found.items() if seconds is not None and seconds >= 0}


def provenance_of(run: Run) -> Fields:
    """What the manifest says of how the bundle came about; empty without one."""
    if run.manifest is None:
        return Fields({}, "")
    return Fields(run.manifest.provenance, str(run.manifest.folder))


def recipe_of(run: Run) -> Fields:
    """The resolved recipe, of the bundle; empty where nobody kept it."""
    return provenance_of(run).object("recipe")


def _time(seconds: float | None, longest: float) -> Cell:
    if seconds is None:
        return Cell(ABSENT)
    return Cell(duration(seconds), bar=seconds / longest if longest else None, strong=not longest)


def training_of(run: Run) -> Fields:
    """What the drafter was trained on, as a build's stages say or its bundle keeps; empty where nobody knows."""
    if run.build is not None:
        stages = {name: stage.values for name, stage in run.build.stages.items()}
        if found := facts_of(stages, recipe_of(run).whole("seed")):
            return Fields(found, str(run.build.path))
    return provenance_of(run).object("training")


def _target(run: Run) -> Cell:
    if run.manifest is None:
        return Cell(run.names[0] or ABSENT)
    return Cell(clean(run.manifest.target.name), clean(run.manifest.target.source))


def _of_bundle(tell: Callable[[Manifest], Cell]) -> Callable[[Run], Cell]:
    """What a run's manifest says; absent without one."""
    return lambda run: Cell(ABSENT) if run.manifest is None else tell(run.manifest)


def _size(manifest: Manifest) -> Cell:
    return Cell(f"{count(manifest.target.parameters)} parameters", _shape(manifest.target, manifest))


def _shape(model: BundleModel, manifest: Manifest) -> str:
    """`30 layers × 576, vocabulary 49,152`, as far as the manifest says."""
    found = Fields(model.shape, str(manifest.folder))
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


def _drafter_size(manifest: Manifest) -> Cell:
    mine, its = manifest.drafter.parameters, manifest.target.parameters
    return Cell(f"{count(mine)} parameters ({mine / its:.1%})", _shape(manifest.drafter, manifest))


def _recipe(run: Run) -> Cell:
    """The name after --recipe in the command that built the pair."""
    command = run.build.command if run.build is not None else provenance_of(run).text("command", 4000)
    found = re.search(r"--recipe[= ]([\w./-]+)", command)
    return Cell(clean(found[1]) if found else ABSENT)


def _trained(run: Run, stage: str) -> Cell:
    """What the drafter read in a stage, and how far it came; of a bundle that does not keep that, the steps of its recipe."""
    phases = [
        phase
        for phase in training_of(run).objects("phases", MOST_PHASES)
        if (phase.text("stage") or DISTILL) == stage
    ]
    if not phases:
        asked = recipe_of(run).object(stage).whole("steps") if stage in seconds_of(run) else None
        return Cell(f"{asked:,} steps" if asked else ABSENT)
    tokens, steps, seconds = (
        sum(phase.number(key) or 0.0 for phase in phases) for key in ("tokens", "steps", "seconds")
    )
    last = phases[-1]
    parts = f" in {len(phases)} parts" if len(phases) > 1 else ""
    seeds = sorted({seed for phase in phases if (seed := phase.whole("seed")) is not None})
    ends = [("loss", last.number("loss_last")), ("α", last.number("alpha_last"))]
    end = " and ".join(f"{name} {value:.2f}" for name, value in ends if value is not None)
    read, taken = f"{count(tokens)} tokens" if tokens else "", f"{steps:,.0f} steps{parts}" if steps else ""
    notes = [
        taken if read else "",
        duration(seconds) if seconds else "",
        f"divergence {divergence}" if (divergence := last.text("divergence")) else "",
        f"{end} at the end" if end else "",
        f"seed {', '.join(map(str, seeds))}" if seeds else "",
    ]
    return Cell(read or taken or ABSENT, ", ".join(filter(None, notes)))


def _written(run: Run) -> Cell:
    written = training_of(run).object("written")
    tokens, replies = written.number("tokens"), written.whole("texts")
    if not tokens:
        asked = recipe_of(run).object("generate").whole("prompts") if "generate" in seconds_of(run) else None
        return Cell(f"{asked:,} replies" if asked else ABSENT)
    return Cell(f"{count(tokens)} tokens", f"{replies:,} replies" if replies else "")


def _default(manifest: Manifest) -> Cell:
    default = manifest.default
    return Cell(clean(f"{default['engine']} {default['precision']}"), clean(default["reason"], 300))


def _device(manifest: Manifest) -> Cell:
    name = manifest.device.get("name")
    return Cell(clean(name) if name else ABSENT)


def _pair(manifest: Manifest) -> Cell:
    total = sum(one.bytes for one in manifest.files.values())
    return Cell(f"{len(manifest.files):,} files", f"{total / 2**20:,.1f} MiB")


FACTS: tuple[Fact, ...] = (
    ("target", _target),
    ("its size", _of_bundle(_size)),
    ("drafter", _drafter),
    ("its size", _of_bundle(_drafter_size)),
    ("recipe", _recipe),
    ("pretrained on", lambda run: _trained(run, PRETRAIN)),
    ("the target wrote", _written),
    ("distilled on", lambda run: _trained(run, DISTILL)),
    ("runs unless told otherwise", _of_bundle(_default)),
    ("made for", _of_bundle(_device)),
    ("bundle", _of_bundle(_pair)),
)
