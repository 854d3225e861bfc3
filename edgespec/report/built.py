"""What was built and how: both models, the recipe, what was read and written, how long every stage took."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgespec.core.manifest import HEAD, BundleModel, Manifest
from edgespec.core.table import byte_size, count, duration, many
from edgespec.report.fields import Fields, clean
from edgespec.report.gather import Run
from edgespec.report.parts import ABSENT, Cell, Section, Table
from edgespec.report.sources import STAGES
from edgespec.stages.training_facts import DISTILL, PRETRAIN

MOST_PHASES = 64  # of a training


def built_section(runs: Sequence[Run]) -> Section:
    section = Section("built", "What was built, and how")
    known = [run for run in runs if run.manifest is not None or run.build is not None]
    if not known:
        section.missing.append(("the pair and how it was made", "edgespec report BUNDLE bench.json"))
        return section
    columns = [None, *(run.number for run in known)]
    letters = [run.letter if len(runs) > 1 else "" for run in known]
    rows = []
    for facts in zip(*map(_facts, known), strict=True):  # the same fact of every run
        cells = [cell for _, cell in facts]
        if any(cell.text != ABSENT for cell in cells):
            rows.append([Cell(facts[0][0]), *cells])
    section.parts.append(Table(["", *letters], rows, runs=columns, title="facts"))
    a_build = "edgespec report BUILD, the folder that --out named"
    times = [run.seconds for run in known]
    if names := [name for name in STAGES if any(name in one for one in times)]:
        longest = max(seconds for one in times for seconds in one.values())
        timed = [[Cell(name), *(_time(one.get(name), longest) for one in times)] for name in names]
        whole = [_time(sum(one.values()) if one else None, 0.0) for one in times]
        timed.append([Cell("all", strong=True), *whole])
        headers = ["stage", *(letter or "time" for letter in letters)]
        section.parts.append(Table(headers, timed, runs=columns, title="times"))
    else:
        section.missing.append(("times of the stages", a_build))
    if not any(run.training.values for run in known):
        section.missing.append(("tokens written and trained on", a_build))
    return section


def _time(seconds: float | None, longest: float) -> Cell:
    if seconds is None:
        return Cell(ABSENT)
    return Cell(duration(seconds), bar=seconds / longest if longest else None, strong=not longest)


def _facts(run: Run) -> list[tuple[str, Cell]]:
    """(name, what is known of it), in the same order for every run."""
    target, drafter = (Cell(name or ABSENT) for name in run.names)
    target_size = drafter_size = runs = device = files = Cell(ABSENT)
    if (manifest := run.manifest) is not None:
        its, mine, default = manifest.target, manifest.drafter, manifest.default
        target = Cell(clean(its.name), clean(its.source))
        target_size = Cell(f"{count(its.parameters)} parameters", _shape(its, manifest))
        kind = "a head that reads the target's hidden states" if mine.kind == HEAD else "a model of its own"
        some = ", with some of the target's tokens" if mine.vocabulary is not None else ""
        drafter = Cell(clean(mine.name), kind + some)
        share = mine.parameters / its.parameters
        drafter_size = Cell(f"{count(mine.parameters)} parameters ({share:.1%})", _shape(mine, manifest))
        runs = Cell(clean(f"{default['engine']} {default['precision']}"), clean(default["reason"], 300))
        device = Cell(clean(manifest.device.get("name") or ABSENT))
        total = sum(one.bytes for one in manifest.files.values())
        files = Cell(f"{len(manifest.files):,} files", byte_size(total))
    return [
        ("target", target),
        ("its size", target_size),
        ("drafter", drafter),
        ("its size", drafter_size),
        ("recipe", _recipe(run)),
        ("pretrained on", _trained(run, PRETRAIN)),
        ("the target wrote", _written(run)),
        ("distilled on", _trained(run, DISTILL)),
        ("runs unless told otherwise", runs),
        ("made for", device),
        ("bundle", files),
    ]


def _shape(model: BundleModel, manifest: Manifest) -> str:
    """`30 layers × 576, vocabulary 49,152`, as far as the manifest says."""
    found = Fields(model.shape, str(manifest.folder))
    layers, hidden, vocabulary = (found.whole(name) for name in ("layers", "hidden", "vocab_size"))
    words = f"{many(layers, 'layer')} × {hidden}" if layers and hidden else ""
    return ", ".join(filter(None, [words, f"vocabulary {vocabulary:,}" if vocabulary else ""]))


def _recipe(run: Run) -> Cell:
    """The name after --recipe in the command that built the pair."""
    command = run.build.command if run.build is not None else run.made.text("command", 4000)
    found = re.search(r"--recipe[= ]([\w./-]+)", command)
    return Cell(clean(found[1]) if found else ABSENT)


def _trained(run: Run, stage: str) -> Cell:
    """What the drafter read in a stage, and how far it came; of a bundle that does not keep that, the steps of its recipe."""
    phases = [
        phase
        for phase in run.training.objects("phases", MOST_PHASES)
        if (phase.text("stage") or DISTILL) == stage
    ]
    if not phases:
        asked = run.recipe.object(stage).whole("steps") if stage in run.seconds else None
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
    written = run.training.object("written")
    tokens, replies = written.number("tokens"), written.whole("texts")
    if not tokens:
        asked = run.recipe.object("generate").whole("prompts") if "generate" in run.seconds else None
        return Cell(f"{asked:,} replies" if asked else ABSENT)
    return Cell(f"{count(tokens)} tokens", f"{replies:,} replies" if replies else "")
