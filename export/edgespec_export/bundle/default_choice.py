"""What a bundle runs unless told otherwise: of the files whose answers stay, the fastest one with its drafter, timed here.

Small targets run as floats and are not timed (write.py). A file is timed in both modes: the exact one, whose blocks have the
logits of single steps, and the fast one. Fast is the default where exact kernels slow plain decoding below EXACT_SHARE of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.expected_acceptance import expected_rate
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.progress import progress
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.exported_pair import open_models
from edgespec_export.verify.file_check import has_engine

CLOSE = 0.92  # share of the most likely tokens that a file must keep: with fewer it is another model
EXACT_SHARE = (
    0.9  # of the fast mode's plain token rate: with less, exactness costs more than speculation brings
)
LONGEST = 5  # tokens of a pass that is timed: γ = 4 behind it
TIMED = CalibrateOptions(seconds=3.0, contexts=(256,))


@dataclass(frozen=True)
class Timed:
    """One file of the target with its drafter: tokens a second plainly and with the best draft length, as α promises."""

    engine: str
    precision: str
    mode: str
    kept: float
    plain: float
    best: float


def choose_default(
    files: Sequence[ExportedFile],
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
    verification: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> dict[str, str]:
    """{engine, precision, reason, fast: the files that run in fast mode unless told otherwise, as engine/precision}.

    `metrics`: what was measured of acceptance; `verification`: verify.json's content.
    """
    return pick(
        [one for each in _pairs(files) for one in _timed(*each, subset, parameters, verification, metrics)]
    )


def pick(timed: Sequence[Timed]) -> dict[str, str]:
    """`choose_default`'s answer from what was timed; every file is among it in its exact mode at least."""
    modes = {(one.engine, one.precision): _usual(timed, one) for one in timed}
    chosen = max(_faithful(list(modes.values())), key=lambda one: one.best)
    reason = (
        f"the fastest of {len(modes)} where the bundle was made: {chosen.best:.0f} tokens a second, {chosen.plain:.0f} plainly; "
        f"keeps {chosen.kept:.0%} of the most likely tokens"
    )
    fast = " ".join(f"{engine}/{precision}" for (engine, precision), one in modes.items() if one.mode == FAST)
    return {"engine": chosen.engine, "precision": chosen.precision, "reason": reason, "fast": fast}


def _usual(timed: Sequence[Timed], file: Timed) -> Timed:
    """A file in the mode that it is to run in: the exact one, unless it slows plain decoding."""
    own = {one.mode: one for one in timed if (one.engine, one.precision) == (file.engine, file.precision)}
    exact, fast = own[EXACT], own.get(FAST)
    return exact if fast is None or exact.plain >= EXACT_SHARE * fast.plain else fast


def _pairs(files: Sequence[ExportedFile]) -> list[tuple[ExportedFile, ExportedFile]]:
    drafters = {(file.engine, file.precision): file for file in files if file.role == "drafter"}
    return [
        (file, drafters[file.engine, file.precision])
        for file in files
        if file.role == "target" and (file.engine, file.precision) in drafters and has_engine(file)
    ]


def _faithful(timed: Sequence[Timed]) -> Sequence[Timed]:
    """Those whose answers are close to the float model's, else those that keep most."""
    bound = min(CLOSE, max(one.kept for one in timed))
    return [one for one in timed if one.kept >= bound]


def _timed(
    target: ExportedFile,
    drafter: ExportedFile,
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
    verification: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> list[Timed]:
    """The file in each of its modes."""
    kept = _kept(target, verification)
    found = []
    with progress(f"time {target.engine} {target.precision}", len(kept), "mode") as bar:
        for mode, share in kept.items():
            opened: list[Engine] = []
            try:
                models = open_models(target, drafter, parameters, subset, opened, fast=mode == FAST)
                costs = calibrate(*models, TIMED, LONGEST)
            finally:
                for model in opened:
                    model.close()
            alpha, passes, step = expected_rate(metrics, 0.0), costs.verify_seconds[0], costs.draft_seconds[0]
            rates = [
                sum(alpha**position for position in range(length + 1)) / (length * step + seconds)
                for length, seconds in enumerate(passes)
            ]
            found.append(Timed(target.engine, target.precision, mode, share, rates[0], max(rates)))
            bar.update(1)
    return found


def _kept(target: ExportedFile, verification: Mapping[str, Any]) -> dict[str, float]:
    """{mode: share of argmaxes that are the float model's}, of each mode that was verified; a block's flips count against it."""
    for check in verification["files"]:
        if (check["role"], check["engine"], check["precision"]) == (
            "target",
            target.engine,
            target.precision,
        ):
            top1, fast = check["top1"] or 0.0, check.get("fast")
            found = {EXACT: top1}
            if fast and fast["block_flips"] is not None:
                found[FAST] = top1 - fast["block_flips"] / check["positions"]
            return found
    return {EXACT: 0.0}
