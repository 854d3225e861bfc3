"""What the raw counts of an evaluation mean: τ, α and MBSU with bootstrap intervals over prompts, comparisons, a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.core.files import read_json
from edgespec.core.metrics import RawCounts, bootstrap, mbsu, predicted_block_efficiency, ratio_of_sums
from edgespec.core.table import interval, table
from edgespec.recipe.sampling import Sampling

SCHEMA = 1


class TeacherForced(NamedTuple):
    """Sums over the positions of a prompt's response, p and q warped alike; at temperature 0 the terms are 1 or 0.

    overlap: Σ min(p, q) (DistillSpec, Eq. 3). top_match, draw_match: Σ p(argmax q) and Σ p·q, what engines keep that match
    samples, for a greedy and for a sampled draft.
    """

    overlap: float
    positions: float
    top_match: float
    draw_match: float


def label_of(setting: dict[str, Any]) -> str:
    return f"{Sampling(setting['temperature'], setting['top_p']).key}-g{setting['draft_length']}"


def setting_of(
    drafter: str,
    sampling: Sampling,
    draft_length: int,
    counts: list[Any],
    teacher_forced: Sequence[TeacherForced],
) -> dict[str, Any]:
    """One setting of evaluation.json: raw counts and teacher-forced sums, an item for each prompt."""
    place = {"drafter": drafter, **asdict(sampling), "draft_length": draft_length}
    return {**place, "counts": counts, "teacher_forced": teacher_forced}


_tau = ratio_of_sums(attrgetter("emitted"), attrgetter("blocks"))


def _share(field: str) -> Callable[[Sequence[Any]], float]:
    """A field of `TeacherForced` for each position."""
    return ratio_of_sums(attrgetter(field), attrgetter("positions"))


def metrics(
    counts: list[RawCounts], rows: list[TeacherForced], draft_length: int, cost_ratio: float, seed: int
) -> dict[str, Any]:
    """[value, low, high] (95 % bootstrap over prompts) of τ, both α and MBSU, and the τ that independent acceptances give.

    The two `alpha_match_*` are the teacher-forced α of engines that keep what a sample of the target equals, for a greedy and a
    sampled draft.
    """
    tau = bootstrap(counts, _tau, seed=seed)
    passed = ratio_of_sums(lambda c: sum(c.accepted), lambda c: sum(c.tested))
    fields = ("overlap", "top_match", "draw_match")
    forced, greedy, sampled = (bootstrap(rows, _share(field), seed=seed) for field in fields)
    return {
        "tau": tau,
        "alpha_empirical": bootstrap(counts, passed, seed=seed),
        "alpha_teacher_forced": forced,
        "alpha_match_greedy": greedy,
        "alpha_match_sampled": sampled,
        "mbsu": tuple(mbsu(value, draft_length, cost_ratio) for value in tau),
        "tau_if_independent": predicted_block_efficiency(forced[0], draft_length),
    }


def summarise(
    settings: list[dict[str, Any]], names: list[str], cost_ratio: float, seed: int
) -> dict[str, Any]:
    """The content of evaluation.json from the raw counts of every setting.

    A comparison is the difference of τ between a drafter and the first one on the same prompts; it `holds` where the whole
    95 % interval is above 0.
    """
    for setting in settings:
        counts = [RawCounts(**raw) for raw in setting["counts"]]
        rows = [TeacherForced(*row) for row in setting["teacher_forced"]]  # they may come from a file
        setting["metrics"] = metrics(counts, rows, setting["draft_length"], cost_ratio, seed)
    baseline, *others = names
    of_baseline = {label_of(setting): setting for setting in settings if setting["drafter"] == baseline}
    comparisons = []
    for name, setting in ((name, s) for name in others for s in settings if s["drafter"] == name):
        both = zip(setting["counts"], of_baseline[label_of(setting)]["counts"], strict=True)
        difference = bootstrap(
            [(RawCounts(**ours), RawCounts(**theirs)) for ours, theirs in both],
            lambda items: _tau([ours for ours, _ in items]) - _tau([theirs for _, theirs in items]),
            seed=seed,
        )
        comparisons.append(
            {
                "claim": f"{name}_beats_{baseline}",
                **{key: setting[key] for key in ("temperature", "top_p", "draft_length")},
                "tau_difference": difference,
                "holds": difference[1] > 0,
            }
        )
    return {
        "schema": SCHEMA,
        "cost_ratio": cost_ratio,
        "prompts": len(settings[0]["counts"]),
        "settings": settings,
        "comparisons": comparisons,
    }


def evaluation_table(file: Path) -> str:
    """evaluation.json as a table: a line for each sampling, γ and drafter with its 95 % intervals.

    The last column is the paired gain in τ over the first drafter.
    """
    result = read_json(file)
    gains = {(c["claim"].split("_beats_")[0], label_of(c)): c for c in result["comparisons"]}
    rows = []
    for setting in sorted(result["settings"], key=lambda s: (s["temperature"], s["draft_length"])):
        drafter, label = setting["drafter"], Sampling(setting["temperature"], setting["top_p"]).label
        gain = gains.get((drafter, label_of(setting)))
        shown = ("tau", "alpha_empirical", "alpha_teacher_forced", "mbsu")
        row = [f"{label}, γ={setting['draft_length']}, {drafter}"]
        row += [interval(*setting["metrics"][name]) for name in shown]
        rows.append([*row, interval(*gain["tau_difference"]) if gain else ""])
    return table(("setting", "τ", "α empirical", "α teacher-forced", "MBSU", "τ gain"), rows)
