"""What a bundle runs unless told otherwise: of the files whose answers stay, the fastest one with its drafter, timed here.

Small targets run as floats and are not timed. A file is timed in both modes: the exact one, whose blocks have the
logits of single steps, and the fast one. Fast is the default where exact kernels slow plain decoding below EXACT_SHARE of it.
Files within a tenth of the fastest count as fast as it, and the one that drafts speed up most is taken: text that repeats itself
gains more than α promises. A device's own precision goes before speed, because the device is another machine. A changed file is
the default only where the bundle has no other, and the reason then says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from edgespec_runtime.chooser.calibrate import CalibrateOptions
from edgespec_runtime.chooser.expected_acceptance import expected_rate
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.manifest import Manifest
from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec.recipe.schema import ExportOptions
from edgespec_export.answers.report import red
from edgespec_export.answers.verdict import CHANGED, CLOSE, kept_of, verdict_of
from edgespec_export.bundle.draft_side import DRAFT_SIDE, ROUNDS, draft_table, speed_of
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.file_check import has_engine
from edgespec_export.verify.files import MOST_EXACT, exactness

# of the fast mode's plain token rate: with less, exactness costs more than speculation brings
EXACT_SHARE = 0.9
# of the fastest file's rate: with more, a file counts as equally fast, since two timings of one file differ by a tenth
AS_FAST = 0.9
TIMED_FILES = "timed"  # among the manifest's metrics: the files among which the default was chosen
ANOTHER_MODEL = "changed: another model"
TIMED = CalibrateOptions(seconds=1.5, contexts=(256,))


@dataclass(frozen=True)
class Timed:
    """One file of the target with its drafter: tokens a second plainly and with the best draft length, as α promises.

    `kept`: share of the model's most likely tokens, in this mode.
    """

    engine: str
    precision: str
    mode: str
    kept: float
    plain: float
    best: float

    @property
    def key(self) -> tuple[str, str]:
        return self.engine, self.precision

    def row(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {**asdict(self), "answers": verdict_of(self.kept)}


class Preferred(NamedTuple):
    """A file that is to be the default unless it is changed, by engine and precision, and whose wish that is, in words."""

    key: tuple[str, str]
    by: str


def choose_default(
    files: Sequence[ExportedFile],
    subset: Vocabulary | None,
    parameters: Mapping[str, int],
    verification: Mapping[str, Any],
    metrics: Mapping[str, Any],
    preferred: Preferred | None = None,
) -> tuple[dict[str, str], list[Timed]]:
    """The default and what was timed, now. `metrics`: what was measured of acceptance; `verification`: verify.json's content."""
    drafters = {file.key: file for file in files if file.role == "drafter"}
    pairs = [
        (file, drafters[file.key])
        for file in files
        if file.role == "target" and file.key in drafters and has_engine(file)
    ]
    alpha = expected_rate(metrics, 0.0)
    with progress("time files", ROUNDS * len(pairs), "files") as bar:
        rounds: list[list[Timed]] = [[] for _ in range(ROUNDS)]
        for found in rounds:
            for target, drafter in pairs:
                for mode, share in (_kept(target.key, verification) or {EXACT: 0.0}).items():
                    fast = mode == FAST
                    _, plain, best = speed_of(target, drafter, subset, parameters, alpha, TIMED, fast=fast)
                    found.append(Timed(*target.key, mode, share, plain, best))
                bar.update(1)
    timed = [max(same, key=lambda one: one.best) for same in zip(*rounds, strict=True)]
    return pick(timed, preferred), timed


def pick(timed: Sequence[Timed], preferred: Preferred | None = None) -> dict[str, str]:
    """The default from what was timed; every file is among it in its exact mode at least.

    {engine, precision, reason, fast: what runs in fast mode unless told otherwise, as engine/precision ...}
    """
    modes = {one.key: _usual(timed, one) for one in timed}
    wished = None if preferred is None else modes.get(preferred.key)
    if preferred is not None and wished is not None and wished.kept >= CLOSE:
        chosen, reason = wished, f"{preferred.by}; {_rates(wished)} where the bundle was made"
    else:
        bound = min(CLOSE, max(one.kept for one in modes.values()))  # else those that keep most
        good = [one for one in modes.values() if one.kept >= bound]
        fastest = max(good, key=lambda one: one.best)
        near = [one for one in good if one.best >= AS_FAST * fastest.best]
        chosen = max(near, key=lambda one: (one.best / one.plain, one.best))
        rank = (
            "the fastest"
            if chosen is fastest
            else "gains most from drafts, and is within a tenth of the fastest"
        )
        reason = f"{rank} of {len(modes)} where the bundle was made: {_rates(chosen)}"
    left = [(one.precision, one.kept) for one in modes.values() if one is not chosen]
    reason += f"; {keeps(chosen.kept)}{_left_out(left)}"
    fast = " ".join(f"{engine}/{precision}" for (engine, precision), one in modes.items() if one.mode == FAST)
    return {"engine": chosen.engine, "precision": chosen.precision, "reason": reason, "fast": fast}


def untimed_default(
    options: ExportOptions,
    small: bool,
    preferred: Preferred | None,
    runs: Sequence[ExportedFile],
    both: Mapping[str, list[str]],
    verification: Mapping[str, Any],
) -> dict[str, str] | None:
    """What chat runs unless told otherwise, where no clock is needed or none can run: static graphs, the least rounded ONNX file
    (else q8_0) of a `small` target, a device's own choice for it. None: the files must be timed.
    """
    engine = None if preferred is None else preferred.key[0]
    static = engine == "static" or (engine is None and not (options.onnx or options.gguf))
    if not small and not static and any(map(has_engine, runs)):
        return None
    onnx, gguf = both.get("onnxruntime", []), both.get("llama.cpp", [])
    if preferred is not None:
        others = [(preferred.key[0], name) for name in both.get(preferred.key[0], [])]
        offered, reason = list(dict.fromkeys([preferred.key, *others])), preferred.by
    elif static:
        offered, reason = [("static", name) for name in options.npu], "the bundle has static graphs only"
    elif small and "fp32" in onnx:
        reason = "the target is small enough to run unrounded"
        return {"engine": "onnxruntime", "precision": "fp32", "reason": reason}
    else:
        offered = [("onnxruntime", name) for name in sorted(onnx, key=exactness)]
        offered += [("llama.cpp", name) for name in sorted(gguf, key=lambda name: name != "q8_0")]
        if not onnx:
            reason = "the bundle has GGUF files only"
        elif offered[0][1] in MOST_EXACT:
            reason = "the target is small enough to run in floats"
        else:
            reason = "the bundle has no float weights for ONNX Runtime"
    return first_faithful(offered, verification, reason)


def first_faithful(
    offered: Sequence[tuple[str, str]], verification: Mapping[str, Any], reason: str
) -> dict[str, str]:
    """The default where nothing is timed: the first (engine, precision) offered, unless it is changed and another one is not.

    A file that was not verified counts as good: there is nothing to judge it by.
    """
    kept = {key: _kept(key, verification).get(EXACT) for key in offered}
    known = {key: share for key, share in kept.items() if share is not None}
    good = (key for key in offered if known.get(key, 1.0) >= CLOSE)
    chosen = next(good, None) or max(known, key=known.__getitem__)
    if chosen != offered[0]:
        reason = f"not the first choice ({reason})"
    if chosen in known:
        reason += f"; {chosen[1]} {keeps(known[chosen])}"
    reason += _left_out([(key[1], share) for key, share in known.items() if key != chosen])
    return {"engine": chosen[0], "precision": chosen[1], "reason": reason}


def keeps(share: float) -> str:
    """`keeps 98.1% of the most likely tokens (same answers)`."""
    word = verdict_of(share)
    return f"keeps {share:.1%} of the most likely tokens ({ANOTHER_MODEL if word == CHANGED else word})"


def choice_table(rows: Sequence[Mapping[str, Any]], *, markdown: bool = False) -> str:
    """What was timed as a table; '' for none. The rows may be a stranger's: what is no such row is left out."""
    cells = []
    for row in rows:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            speeds = (f"{float(row['plain']):.1f}", f"{float(row['best']):.1f}")
            names = (f"{row['engine']} {row['precision']}", str(row["mode"]))
            cells.append((*names, *speeds, f"{float(row['kept']):.1%}", str(row["answers"])))
    headers = ("file", "mode", "plain tok/s", "best γ tok/s", "top-1", "answers")
    return table(headers, cells, markdown=markdown, left=2) if cells else ""


def default_report(manifest: Manifest, *, colour: bool = False) -> str:
    """The files that were timed and the default with its reason, in red where it is a changed model."""
    default = manifest.default
    text = f"default: {default['engine']} {default['precision']}: {default['reason']}"
    metrics = manifest.metrics
    tables = (draft_table(metrics.get(DRAFT_SIDE, [])), choice_table(metrics.get(TIMED_FILES, [])))
    told = [found for found in tables if found] + [red(text, colour and f"({ANOTHER_MODEL})" in text)]
    return "\n\n".join(told)


def _rates(one: Timed) -> str:
    return f"{one.best:.0f} tokens a second, {one.plain:.0f} plainly"


def _left_out(others: Sequence[tuple[str, float]]) -> str:
    """`others`: precisions that were not chosen, with the share that each keeps."""
    left = [f"{precision} {kept:.1%}" for precision, kept in others if not kept >= CLOSE]
    return f"; changed and left out: {', '.join(left)}" if left else ""


def _usual(timed: Sequence[Timed], file: Timed) -> Timed:
    """A file in the mode that it is to run in: the exact one, unless it slows plain decoding and fast keeps the answers too."""
    own = {one.mode: one for one in timed if one.key == file.key}
    exact, fast = own[EXACT], own.get(FAST)
    if fast is None or exact.plain >= EXACT_SHARE * fast.plain:
        return exact
    return exact if fast.kept < CLOSE <= exact.kept else fast


def _kept(key: tuple[str, str], verification: Mapping[str, Any]) -> dict[str, float]:
    """`kept_of` the target's file; {} where it was not verified."""
    for check in verification.get("files", ()):
        if (check["role"], check["engine"], check["precision"]) == ("target", *key):
            return kept_of(check)
    return {}
