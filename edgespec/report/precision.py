"""The files: what each weighs, and how near it stays to the float model; what rounding cost the pair's acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.report.fields import Fields, clean
from edgespec.report.figures import INK, RUNS, drawn, legend
from edgespec.report.gather import VERIFY, Run
from edgespec.report.measured import share
from edgespec.report.parts import Cell, Figure, Section, Table, between, flips, number, of_run, size

MOST_FILES = 128  # two models, 64 variants each, as a manifest allows
MOST_PAIRS = 64  # pairs of files whose acceptance was measured
MOST_TRIALS = 512  # prompts of one pair
MARKS = {"target": "o", "drafter": "s"}
Point = tuple[int, str, str, float, float]  # run, role, precision; MiB, and top-1 in percent


def files_section(runs: Sequence[Run]) -> Section:
    section = Section(
        "files",
        "Files: size against agreement",
        "How often a file's most likely token is that of the float model, on held-out prompts (top-1), and how far its "
        "distributions are from the model's (KL divergence, nats). Flips: positions whose most likely token changes when four "
        "tokens are read at once instead of one by one; 0 means that speculation changes no greedy reply.",
    )
    read = {run.number: _files(run) for run in runs}
    if points := [point for _, own in read.values() for point in own]:
        section.parts.append(_figure(points, len(runs)))
    headers = ["", "size", "top-1", "KL", "perplexity", "flips", ""]
    tables = {run: [Table(headers, rows)] for run, (rows, _) in read.items() if rows}
    section.beside(tables, "agreement of the files", "edgespec verify BUNDLE --json verify.json")
    if tables:
        section.beside(
            {run.number: _pairs(run) for run in runs},
            "what rounding cost the pair's acceptance",
            "edgespec verify BUNDLE --acceptance-prompts 32 --json verify.json",
        )
    return section


def _files(run: Run) -> tuple[list[list[Cell]], list[Point]]:
    """A row for every exported file, and a point for each whose size the bundle says."""
    rows, points = [], []
    for check in run.fields(VERIFY).objects("files", MOST_FILES):
        role, engine, precision = (check.text(key, 40) for key in ("role", "engine", "precision"))
        weight = None
        if run.manifest and role in MARKS and precision in run.manifest.model(role).files.get(engine, {}):
            files = run.manifest.files_of(role, engine, precision)
            weight = sum(one.bytes for one in files.values()) or None
        top1, kl, theirs = (check.number(key) for key in ("top1", "kl", "torch_perplexity"))
        fast, broken = check.object("fast").whole("block_flips"), check.texts("broken", length=400)
        in_fast = "" if fast is None else f"{fast:,} in fast mode"
        rows.append(
            [
                Cell(f"{role} {engine} {precision}", "; ".join(broken)),
                size(weight),
                number(top1, ".1%"),
                Cell("< 0.0001") if kl is not None and kl < 1e-4 else number(kl, ".4f"),
                number(check.number("perplexity"), note="" if theirs is None else f"float {theirs:,.2f}"),
                flips(check.whole("block_flips"), check.whole("positions"), in_fast),
                Cell("bound broken" if broken else "ok"),
            ]
        )
        if weight and top1 is not None:
            points.append((run.number, role, precision, weight / 2**20, 100 * top1))
    return rows, points


def _figure(points: Sequence[Point], runs: int) -> Figure:
    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        for role, mark in MARKS.items():
            for run in sorted({run for run, *_ in points}):
                if own := [at for its, part, _, *at in points if (its, part) == (run, role)]:
                    axes.plot(
                        *zip(*own, strict=True), mark, color=RUNS[run], markersize=6,
                        markerfacecolor=RUNS[run] if role == "target" else "none", label=of_run(role, run, runs),
                    )  # fmt: skip
        for *_, precision, x, y in points:
            axes.annotate(
                clean(precision, 12), (x, y), xytext=(6, -3), textcoords="offset points", color=INK, fontsize=9
            )  # fmt: skip
        sizes = [mebibytes for *_, mebibytes, _ in points]
        worst = max(1.0, 100 - min(percent for *_, percent in points))
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
