"""What was built and how: both models, the recipe, what was read and written, how long every stage took."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgespec.core.manifest import HEAD, BundleModel, Manifest
from edgespec.core.table import byte_size, count, duration, many
from edgespec.report.fields import Fields, clean
from edgespec.report.gather import BUILD, BUNDLE, STAGES, Run
from edgespec.report.parts import ABSENT, Cell, Section, Table, letter
from edgespec.stages.training_facts import DISTILL, PRETRAIN

MOST_PHASES = 64  # of a training
FACTS = (
    *("target", "its size", "drafter", "its size", "recipe", "pretrained on", "the target wrote"),
    *("distilled on", "runs unless told otherwise", "made for", "bundle"),
)


def built_section(runs: Sequence[Run]) -> Section:
    section = Section("built", "What was built, and how")
    known = [run for run in runs if {BUNDLE, BUILD} & {*run.sources}]
    if not known:
        section.missing.append(("the pair and how it was made", "edgespec report BUNDLE bench.json"))
        return section
    columns = [None, *(run.number for run in known)]
    letters = [letter(run.number) if len(runs) > 1 else "" for run in known]
    rows = [
        [Cell(name), *cells]
        for name, *cells in zip(FACTS, *map(_facts, known), strict=True)
        if any(cell.text != ABSENT for cell in cells)
    ]
    section.parts.append(Table(["", *letters], rows, runs=columns, title="facts"))
    a_build = "edgespec report BUILD, the folder that --out named"
    times = [run.seconds for run in known]
    if names := [name for name in STAGES if any(name in one for one in times)]:
        longest = max(seconds for one in times for seconds in one.values())
        timed = [[Cell(name), *(_time(one.get(name), longest) for one in times)] for name in names]
        whole = [_time(sum(one.values()) if one else None, 0.0) for one in times]
        timed.append([Cell("all", strong=True), *whole])
        headers = ["stage", *(one or "time" for one in letters)]
        section.parts.append(Table(headers, timed, runs=columns, title="times"))
    else:
        section.missing.append(("times of the stages", a_build))
    if not any(run.made.object("training").values for run in known):
        section.missing.append(("tokens written and trained on", a_build))
    return section


def _time(seconds: float | None, longest: float) -> Cell:
    if seconds is None:
        return Cell(ABSENT)
    return Cell(duration(seconds), bar=seconds / longest if longest else None, strong=not longest)


def _facts(run: Run) -> list[Cell]:
    """What is known of each of FACTS."""
    target, drafter = run.names
    models = [Cell(target or ABSENT), Cell(ABSENT), Cell(drafter or ABSENT), Cell(ABSENT)]
    bundle = [Cell(ABSENT)] * 3
    if (manifest := run.manifest) is not None:
        its, mine, default = manifest.target, manifest.drafter, manifest.default
        kind = "a head that reads the target's hidden states" if mine.kind == HEAD else "a model of its own"
        some = ", with some of the target's tokens" if mine.vocabulary is not None else ""
        share = f" ({mine.parameters / its.parameters:.1%})"
        models = [
            Cell(target, clean(its.source)),
            Cell(f"{count(its.parameters)} parameters", _shape(its, manifest)),
            Cell(drafter, kind + some),
            Cell(f"{count(mine.parameters)} parameters{share}", _shape(mine, manifest)),
        ]
        total = byte_size(sum(one.bytes for one in manifest.files.values()))
        bundle = [
            Cell(clean(f"{default['engine']} {default['precision']}"), clean(default["reason"], 300)),
            Cell(clean(manifest.device.get("name") or ABSENT)),
            Cell(f"{len(manifest.files):,} files", total),
        ]
    recipe = re.search(r"--recipe[= ]([\w./-]+)", run.made.text("command", 4000))
    learnt = [_trained(run, PRETRAIN), _written(run), _trained(run, DISTILL)]
    return [*models, Cell(clean(recipe[1]) if recipe else ABSENT), *learnt, *bundle]


def _shape(model: BundleModel, manifest: Manifest) -> str:
    """`30 layers × 576, vocabulary 49,152`, as far as the manifest says."""
    found = Fields(model.shape, str(manifest.folder))
    layers, hidden, vocabulary = (found.whole(name) for name in ("layers", "hidden", "vocab_size"))
    words = f"{many(layers, 'layer')} × {hidden}" if layers and hidden else ""
    return ", ".join(filter(None, [words, f"vocabulary {vocabulary:,}" if vocabulary else ""]))


def _trained(run: Run, stage: str) -> Cell:
    """What the drafter read in a stage, and how far it came; of a bundle that does not keep that, the steps of its recipe."""
    phases = [
        phase
        for phase in run.made.object("training").objects("phases", MOST_PHASES)
        if (phase.text("stage") or DISTILL) == stage
    ]
    if not phases:
        asked = run.made.object("recipe").object(stage).whole("steps") if stage in run.seconds else None
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
    written = run.made.object("training").object("written")
    tokens, replies = written.number("tokens"), written.whole("texts")
    if not tokens:
        asked = (
            run.made.object("recipe").object("generate").whole("prompts")
            if "generate" in run.seconds
            else None
        )
        return Cell(f"{asked:,} replies" if asked else ABSENT)
    return Cell(f"{count(tokens)} tokens", f"{replies:,} replies" if replies else "")
