"""Which of the drafter's files goes with each file of the target: the one that promises the most tokens a second, measured here.

A rounded drafter is smaller, and accepted less often. A drafter of a few million weights is hardly faster for it, so its float
file may win beside a rounded target. α is the mean of Σ min(p, q) over one text for all pairs, greedy, as verify measured it
(DistillSpec Eq. 3). Seconds of a drafter step and of the target's passes are measured side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.exported_pair import open_models, trials_of
from edgespec_export.verify.file_check import has_engine

DRAFT_SIDE = "draft_side"  # among the manifest's metrics: the pairs that were measured
LONGEST = 5  # tokens of a pass that is timed: γ = 4 behind it
TIMED = CalibrateOptions(seconds=0.5, contexts=(256,))
# the better of both counts: another program that runs for a while slows only those whose turn it is
ROUNDS = 2


def choose_drafters(
    files: Sequence[ExportedFile],
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
    verification: Mapping[str, Any],
) -> tuple[list[ExportedFile], list[dict[str, Any]]]:
    """The files with the best drafter beside each of the target's, and what was measured; files alone where there is no choice.

    Measured are of a target's file with a drafter's the acceptance rate, `step`: seconds of a drafter step, and `rate`: tokens a
    second at the best γ. `verification`: verify.json's content, whose acceptance says which pairs can be compared.
    """
    if any(file.is_head for file in files):
        return list(files), []  # a head has one file
    rates = _overlaps(verification.get("acceptance", ()))
    drafters = {file.key: file for file in files if file.role == "drafter"}
    beside, found = dict(drafters), list[dict[str, Any]]()
    several: dict[ExportedFile, list[str]] = {}
    for file in files:
        names = [name for *target, name in rates if tuple(target) == file.key]
        if file.role == "target" and has_engine(file) and len(names) > 1 and file.precision in names:
            several[file] = sorted(names, key=lambda name: name != file.precision)  # its own wins a tie
    with progress("time drafters", len(several), "files of the target") as bar:
        for file, names in several.items():
            offered = [(drafters[file.engine, name], rates[*file.key, name]) for name in names]
            rounds = [
                [_measured(file, one, alpha, subset, parameters) for one, alpha in offered]
                for _ in range(ROUNDS)
            ]
            candidates = [max(same, key=itemgetter("rate")) for same in zip(*rounds, strict=True)]
            best = max(range(len(names)), key=lambda place: candidates[place]["rate"])
            found += [{**one, "chosen": place == best} for place, one in enumerate(candidates)]
            if best:  # not its own
                other = offered[best][0]
                beside[file.key] = replace(other, precision=file.precision, stored=other.held)
            bar.update(1)
    return [beside[file.key] if file.role == "drafter" else file for file in files], found


def draft_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was measured; '' for nothing. The rows may be a stranger's: what is no such row is left out."""
    cells = []
    for row in rows:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            alpha, step, rate = (float(row[name]) for name in ("alpha", "step", "rate"))
            numbers = (f"{alpha:.3f}", f"{1e3 * step:.2f}", f"{rate:.1f}")
            names = (f"{row['engine']} {row['precision']}", str(row["drafter"]))
            cells.append((*names, *numbers, "taken" if row["chosen"] is True else ""))
    headers = ("target", "drafter", "α greedy", "ms a step", "best γ tok/s", "")
    return table(headers, cells, left=2) if cells else ""


def _overlaps(acceptance: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], float]:
    """{(engine, target's precision, drafter's): greedy α}; ONNX Runtime and llama.cpp, whose files may be paired freely."""
    found = {}
    for run in acceptance:
        trials = trials_of(run)
        positions = sum(trial.positions for trial in trials)
        if run["temperature"] == 0.0 and run["engine"] != "static" and positions:
            overlap = sum(trial.overlap for trial in trials)
            found[run["engine"], run["target"], run["drafter"]] = overlap / positions
    return found


def _measured(
    target: ExportedFile,
    drafter: ExportedFile,
    alpha: float,
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
) -> dict[str, Any]:
    fast = target.fast_graph is not None  # as it will run, where it is large
    step, _, rate = speed_of(target, drafter, subset, parameters, alpha, TIMED, fast=fast)
    names = {"engine": target.engine, "precision": target.precision, "drafter": drafter.held}
    return {**names, "alpha": alpha, "step": step, "rate": rate}


def speed_of(
    target: ExportedFile,
    drafter: ExportedFile,
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
    alpha: float,
    how: CalibrateOptions,
    *,
    fast: bool,
) -> tuple[float, float, float]:
    """(seconds of a drafter step, tokens a second plainly, and at the best γ as α promises); `fast`: the target's fast mode."""
    with ExitStack() as opened:
        longest = max(how.contexts) + LONGEST
        models = open_models(target, drafter, parameters, subset, opened, longest=longest, fast=fast)
        costs = calibrate(*models, how, LONGEST)
    at = costs.at(costs.contexts[0])
    return at.draft, at.plain_rate, at.token_rate(alpha)
