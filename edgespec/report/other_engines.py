"""What other engines should reach with the pair, by the rule each is known by, and what those that were run did reach."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.metrics import predicted_block_efficiency, summed
from edgespec.report.fields import Fields
from edgespec.report.gather import ENGINES, Run
from edgespec.report.measured import Setting
from edgespec.report.parts import Cell, Part, Section, Table, between, number

MOST_ENGINES = 100
MOST_ANSWERS = 4096  # prompts of one engine


def others_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "others",
        "In other engines",
        "Greedy text is the target's own in each of them. Above temperature 0 their rules differ, and so does what they accept "
        "of the same drafter: α was measured in torch for each rule, τ is what it gives with drafts of three tokens if each is "
        "accepted independently.",
    )
    section.beside(
        {run.number: _expected(run) for run in runs},
        "what other engines would reach",
        "edgespec report BUNDLE, of a bundle with an evaluation",
    )
    compared = {run.number: [_compared(run.fields(ENGINES))] for run in runs if ENGINES in run.sources}
    own = [run.manifest is not None and run.manifest.drafter.vocabulary is not None for run in runs]
    if compared or not all(own):  # other-engines refuses a drafter with token numbers of its own
        section.beside(
            compared, "what other engines did reach", "edgespec other-engines BUNDLE --json engines.json"
        )
    return section


def _expected(run: Run) -> list[Part]:
    """α and τ by engine, of the engines that the bundle has files for."""
    if run.manifest is None:
        return []
    from edgespec_export.bundle.card_engines import entries
    from edgespec_export.other_engines.other_engines import DRAFT_LENGTH

    if run.manifest.drafter.vocabulary is not None:
        return [
            "The drafter has a vocabulary of its own, which only edgespec translates: no other engine runs the pair. The "
            "target's files run there without the drafter."
        ]
    shown: dict[str, Setting] = {}
    for one in run.settings:
        shown.setdefault(one.sampling, one)
    known = entries(run.manifest)
    if not shown or not known:
        return []
    rows = []
    for entry in known:
        cells = [Cell(entry.name, entry.rule)]
        for one in shown.values():
            alpha = one.by_rule(entry.rate)
            share = None if alpha is None else min(1.0, max(0.0, alpha[0]))
            tau = None if share is None else predicted_block_efficiency(share, DRAFT_LENGTH)
            cells += [between(alpha), number(tau)]
        rows.append(cells)
    headers = ["", *(words for where in shown for words in (f"α, {where}", "τ"))]
    return [Table(headers, rows)]


def _compared(found: Fields) -> Table:
    """A line for every engine that ran the pair: tokens per pass there and here."""
    cells = []
    for row in found.objects("list", MOST_ENGINES):
        ours = summed([one.object("counts").raw_counts() for one in row.objects("ours", MOST_ANSWERS)])
        passes = sum(one.whole("passes") or 0 for one in row.objects("answers", MOST_ANSWERS))
        cells.append(
            [
                Cell(row.text("name", 60), row.text("files", 60)),
                Cell(row.text("rule", 60)),
                number(ours.emitted / passes if passes and not row.flag("drawn") else None),
                number(ours.block_efficiency if ours.blocks else None),
            ]
        )
    return Table(["", "rule here", "τ there", "τ here"], cells, left=2, title="Measured by other-engines")
