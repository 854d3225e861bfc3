"""The files: what each weighs, and how near it stays to the float model; what rounding cost the pair's acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from edgespec.report.fields import Fields, clean
from edgespec.report.figures import INK, RUNS, drawn, legend
from edgespec.report.gather import Run
from edgespec.report.measured import share
from edgespec.report.parts import Cell, Figure, Section, Table, between, flips, number, of_run, size
from edgespec.report.sources import VERIFY

MOST_FILES = 128  # two models, 64 variants each, as a manifest allows
MOST_PAIRS = 64  # pairs of files whose acceptance was measured
MOST_TRIALS = 512  # prompts of one pair
MARKS = {"target": "o", "drafter": "s"}


class Row(NamedTuple):
    """One exported file. `bytes` None: the bundle is not there to say; `check`: what verify found of it."""

    role: str
    engine: str
    precision: str
    bytes: int | None
    check: Fields


def files_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "files",
        "Files: size against agreement",
        "How often a file's most likely token is that of the float model, on held-out prompts (top-1), and how far its "
        "distributions are from the model's (KL divergence, nats). Flips: positions whose most likely token changes when four "
        "tokens are read at once instead of one by one; 0 means that speculation changes no greedy reply.",
    )
    rows = {run.number: found for run in runs if (found := _rows(run))}
    placed = [
        (run, row, row.bytes / 2**20, 100 * top1)
        for run, found in rows.items()
        for row in found
        if row.bytes and (top1 := row.check.number("top1")) is not None
    ]
    if placed:
        section.parts.append(_figure(placed, len(runs)))
    tables = {run: [_table(found)] for run, found in rows.items()}
    section.beside(tables, "agreement of the files", "edgespec verify BUNDLE --json verify.json")
    if rows:
        section.beside(
            {run.number: _pairs(run) for run in runs},
            "what rounding cost the pair's acceptance",
            "edgespec verify BUNDLE --acceptance-prompts 32 --json verify.json",
        )
    return section


def _rows(run: Run) -> list[Row]:
    rows = []
    for check in run.fields(VERIFY).objects("files", MOST_FILES):
        role, engine, precision = (check.text(key, 40) for key in ("role", "engine", "precision"))
        weight = None
        if run.manifest and role in MARKS and precision in run.manifest.model(role).files.get(engine, {}):
            files = run.manifest.files_of(role, engine, precision)
            weight = sum(one.bytes for one in files.values()) or None
        rows.append(Row(role, engine, precision, weight, check))
    return rows


def _table(rows: Sequence[Row]) -> Table:
    cells = []
    for role, engine, precision, weight, check in rows:
        kl, theirs = check.number("kl"), check.number("torch_perplexity")
        fast = check.object("fast").whole("block_flips")
        broken = check.texts("broken", length=400)
        cells.append(
            [
                Cell(f"{role} {engine} {precision}", "; ".join(broken)),
                size(weight),
                number(check.number("top1"), ".1%"),
                Cell("< 0.0001") if kl is not None and kl < 1e-4 else number(kl, ".4f"),
                number(check.number("perplexity"), note="" if theirs is None else f"float {theirs:,.2f}"),
                flips(
                    check.whole("block_flips"),
                    check.whole("positions"),
                    "" if fast is None else f"{fast:,} in fast mode",
                ),
                Cell("bound broken" if broken else "ok"),
            ]
        )
    return Table(["", "size", "top-1", "KL", "perplexity", "flips", ""], cells)


def _figure(placed: Sequence[tuple[int, Row, float, float]], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        for role, mark in MARKS.items():
            for run in sorted({one[0] for one in placed}):
                if own := [(x, y) for its, row, x, y in placed if its == run and row.role == role]:
                    axes.plot(
                        *zip(*own, strict=True), mark, color=RUNS[run], markersize=6,
                        markerfacecolor=RUNS[run] if role == "target" else "none", label=of_run(role, run, runs),
                    )  # fmt: skip
        for _, row, *point in placed:
            axes.annotate(
                clean(row.precision, 12), point, xytext=(6, -3), textcoords="offset points", color=INK, fontsize=9
            )  # fmt: skip
        sizes = [weight for _, _, weight, _ in placed]
        worst = max(1.0, 100 - min(percent for *_, percent in placed))
        axes.set(xscale="log", xlabel="size of the file (MiB)", ylabel="same most likely token (%)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xlim(0.6 * min(sizes), 2.2 * max(sizes))  # room for the names to the right
        axes.set_ylim(100 - 1.15 * worst, 100 + 0.1 * worst)
        legend(axes, 2 if runs == 1 else 4)

    return Figure(drawn("files", draw), "Agreement with the float model against the size of each file.")


def _pairs(run: Run) -> list[Table]:
    """verify's `acceptance`: raw counts of every pair of files; here as intervals over prompts."""
    rows = []
    for pair in run.fields(VERIFY).objects("acceptance", MOST_PAIRS):
        read = [Fields({"trials": one}, pair.where) for one in pair.lists("trials", MOST_TRIALS)]
        trials = [counts[:6] for one in read if len(counts := one.numbers("trials", 16)) >= 6]
        temperature = pair.number("temperature")
        if not trials or temperature is None:
            continue
        # each of them by prompt
        blocks, emitted, tested, accepted, positions, overlap = zip(*trials, strict=True)
        words = clean(f"{pair.text('engine', 40)} {pair.text('precision', 40)}: {pair.text('cause', 40)}")
        ratios = ((emitted, blocks), (accepted, tested), (overlap, positions))
        rows.append(
            [
                Cell(words),
                Cell("greedy" if temperature == 0 else f"{temperature:g}"),
                *(between(share(list(zip(part, whole, strict=True)))) for part, whole in ratios),
            ]
        )
    headers = ["", "T", "τ", "α of the drafts", "α on the target's text"]
    return [Table(headers, rows, title="What rounding cost the pair's acceptance")] if rows else []
