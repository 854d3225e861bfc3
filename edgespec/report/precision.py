"""The files: what each weighs, and how near it stays to the float model; what rounding cost the pair's acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.manifest import Manifest
from edgespec.core.metrics import bootstrap, ratio_of_sums
from edgespec.report.fields import Fields, Interval, clean
from edgespec.report.figures import INK, MUTED, RUNS, drawn, legend
from edgespec.report.gather import Run
from edgespec.report.parts import Cell, Figure, Section, Table, between, flips, number, of_run, size
from edgespec.report.sources import VERIFY

MOST_FILES = 128  # two models, 64 variants each, as a manifest allows
MOST_PAIRS = 64  # pairs of files whose acceptance was measured
MOST_TRIALS = 512  # prompts of one pair
MARKS = {"target": "o", "drafter": "s"}


@dataclass(frozen=True)
class FileRow:
    """One exported file. `bytes` None: the bundle is not there to say."""

    role: str
    engine: str
    precision: str
    bytes: int | None
    found: Fields


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
        (run, row, row.bytes, share)
        for run, found in rows.items()
        for row in found
        if row.bytes and (share := row.found.number("top1")) is not None
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


def _rows(run: Run) -> list[FileRow]:
    rows = []
    for check in run.fields(VERIFY).objects("files", MOST_FILES):
        role, engine, precision = (check.text(key, 40) for key in ("role", "engine", "precision"))
        weight = None if run.manifest is None else _bytes_of(run.manifest, role, engine, precision)
        rows.append(FileRow(role, engine, precision, weight, check))
    return rows


def _bytes_of(manifest: Manifest, role: str, engine: str, precision: str) -> int | None:
    if role not in MARKS or precision not in getattr(manifest, role).files.get(engine, {}):
        return None
    return sum(one.bytes for one in manifest.files_of(role, engine, precision).values()) or None


def _table(rows: Sequence[FileRow]) -> Table:
    cells = []
    for row in rows:
        check = row.found
        theirs, fast = check.number("torch_perplexity"), check.object("fast").whole("block_flips")
        fast_flips = "" if fast is None else f"{fast:,} in fast mode"
        broken = check.texts("broken", length=400)
        cells.append(
            [
                Cell(f"{row.role} {row.engine} {row.precision}", "; ".join(broken)),
                size(row.bytes),
                number(check.number("top1"), ".1%"),
                _small(check.number("kl")),
                number(check.number("perplexity"), note="" if theirs is None else f"float {theirs:,.2f}"),
                flips(check.whole("block_flips"), check.whole("positions"), fast_flips),
                Cell("bound broken" if broken else "ok"),
            ]
        )
    return Table(["", "size", "top-1", "KL", "perplexity", "flips", ""], cells)


def _small(value: float | None) -> Cell:
    return Cell("< 0.0001") if value is not None and value < 1e-4 else number(value, ".4f")


def _figure(placed: Sequence[tuple[int, FileRow, int, float]], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        for role, mark in MARKS.items():
            for run in sorted({one[0] for one in placed}):
                own = [one for one in placed if one[0] == run and one[1].role == role]
                if own:
                    axes.plot(
                        [weight / 2**20 for _, _, weight, _ in own],
                        [100 * share for _, _, _, share in own],
                        mark, color=RUNS[run], markersize=6, label=of_run(role, run, runs),
                        markerfacecolor=RUNS[run] if role == "target" else "none",
                    )  # fmt: skip
        for _, row, weight, share in placed:
            axes.annotate(
                clean(row.precision, 12), (weight / 2**20, 100 * share),
                xytext=(6, -3), textcoords="offset points", color=INK, fontsize=9,
            )  # fmt: skip
        sizes = [weight / 2**20 for _, _, weight, _ in placed]
        worst = max(1.0, 100 - min(100 * share for *_, share in placed))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xlim(0.6 * min(sizes), 2.2 * max(sizes))  # room for the names to the right
        axes.set_ylim(100 - 1.15 * worst, 100 + 0.1 * worst)
        axes.set_xlabel("size of the file (MiB)", color=MUTED)
        axes.set_ylabel("same most likely token (%)", color=MUTED)
        legend(axes, 2 if runs == 1 else 4)

    return Figure(drawn("files", draw), "Agreement with the float model against the size of each file.")


def _pairs(run: Run) -> list[Table]:
    """verify's `acceptance`: raw counts of every pair of files; here as intervals over prompts."""
    rows = []
    for pair in run.fields(VERIFY).objects("acceptance", MOST_PAIRS):
        # of each prompt [blocks, emitted, tested, accepted, positions, overlap]
        read = [
            Fields({"trials": one}, pair.where).numbers("trials", 16)
            for one in pair.lists("trials", MOST_TRIALS)
        ]
        trials = [one for one in read if len(one) >= 6]
        temperature = pair.number("temperature")
        if not trials or temperature is None:
            continue
        words = clean(f"{pair.text('engine', 40)} {pair.text('precision', 40)}: {pair.text('cause', 40)}")
        rows.append(
            [
                Cell(words),
                Cell("greedy" if temperature == 0 else f"{temperature:g}"),
                between(_interval(trials, 1, 0)),
                between(_interval(trials, 3, 2)),
                between(_interval(trials, 5, 4)),
            ]
        )
    headers = ["", "T", "τ", "α of the drafts", "α on the target's text"]
    return [Table(headers, rows, title="What rounding cost the pair's acceptance")] if rows else []


def _interval(trials: Sequence[list[float]], above: int, below: int) -> Interval | None:
    counted = [one for one in trials if one[below] > 0]
    if not counted:
        return None
    return bootstrap(counted, ratio_of_sums(lambda one: one[above], lambda one: one[below]))
