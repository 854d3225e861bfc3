"""What other engines should reach with the pair, by the rule each is known by, and what those that were run did reach."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.manifest import Manifest
from edgespec.core.metrics import predicted_block_efficiency
from edgespec.report.fields import Fields
from edgespec.report.gather import Run
from edgespec.report.measured import Setting, settings_of
from edgespec.report.parts import Cell, Column, Section, Table, Words, between, number
from edgespec.report.sources import ENGINES, EVALUATION

MOST_ENGINES = 40
MOST_ANSWERS = 4096  # prompts of one engine


def others_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "others",
        "In other engines",
        "Greedy text is the target's own in each of them. Above temperature 0 their rules differ, and so does what they accept "
        "of the same drafter: α was measured in torch for each rule, τ is what it gives with drafts of three tokens if each is "
        "accepted independently.",
    )
    expected, measured = [], []
    for run in runs:
        if run.manifest is not None:
            expected += [Column(run.number, [part])] if (part := _expected(run, run.manifest)) else []
        if ENGINES in run.sources:
            measured.append(Column(run.number, [_compared(run.sources[ENGINES].rows)]))
    section.beside(
        expected, "what other engines would reach", "edgespec report BUNDLE, of a bundle with an evaluation"
    )
    section.beside(
        measured, "what other engines did reach", "edgespec other-engines BUNDLE --json engines.json"
    )
    return section


def _expected(run: Run, manifest: Manifest) -> Table | Words | None:
    """α and τ by engine, of the engines that the bundle has files for."""
    from edgespec_export.bundle.card_engines import commands_of, entries
    from edgespec_export.other_engines.other_engines import DRAFT_LENGTH

    if manifest.drafter.vocabulary is not None:
        return Words(
            "The drafter has token numbers of its own, which only edgespec translates: no other engine runs the pair. The "
            "target's files run there alone."
        )
    shown: dict[str, Setting] = {}
    for one in settings_of(run.fields(EVALUATION)):
        shown.setdefault(one.where, one)
    known = entries(commands_of(manifest))
    if not shown or not known:
        return None
    rows = []
    for entry in known:
        cells = [Cell(entry.name, entry.rule)]
        for one in shown.values():
            values = {
                "lossless": one.forced,
                "match_greedy": one.match_greedy,
                "match_sampled": one.match_sampled,
            }
            alpha = values.get(entry.rate)
            tau = (
                None
                if alpha is None
                else predicted_block_efficiency(min(1.0, max(0.0, alpha[0])), DRAFT_LENGTH)
            )
            cells += [between(alpha), number(tau)]
        rows.append(cells)
    headers = ["", *(words for where in shown for words in (f"α, {where}", "τ"))]
    return Table(headers, rows)


def _compared(rows: Sequence[Fields]) -> Table:
    """A line for every engine that ran the pair: tokens per pass there and here."""
    cells = []
    for row in rows[:MOST_ENGINES]:
        ours = [one.object("counts").counts() for one in row.objects("ours", MOST_ANSWERS)]
        passes = sum(one.whole("passes") or 0 for one in row.objects("answers", MOST_ANSWERS))
        emitted, blocks = (sum(getattr(one, name) for one in ours) for name in ("emitted", "blocks"))
        cells.append(
            [
                Cell(row.text("name", 60), row.text("files", 60)),
                Cell(row.text("rule", 60)),
                number(emitted / passes if passes and not row.flag("drawn") else None),
                number(emitted / blocks if blocks else None),
            ]
        )
    return Table(["", "rule here", "τ there", "τ here"], cells, left=2, title="Measured by other-engines")
