"""What the answers of a trade-off study mean: a summary of every arm, tables, a document. Pure; runs and times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from operator import sub
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts, bootstrap, median, ratio_of_sums, summed
from edgespec.core.table import interval, many, table
from edgespec_runtime.bench.report import Interval, Run
from edgespec_runtime.decoding.speed import dump
from edgespec_runtime.rules.sampling import Warp
from edgespec_runtime.tradeoff.arms import ENDS, LARGE, SMALL, Arm

SCHEMA = 1
QUIET = 0.9  # share of the processors that a run must have had for its times to be its own
EXACT_MATCH, ROUGE_2, AGREEMENT = "exact-match", "rouge-2", "agreement"
METRICS = (EXACT_MATCH, ROUGE_2, AGREEMENT)


@dataclass(frozen=True, kw_only=True)
class Trial(Run):
    """One prompt answered once by one arm; `scores` by metric."""

    arm: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Study:
    """`about`: title, command, date, device, pair, engine, precision, threads, free_share, block_against_single_steps,
    options. free_share: of the threads' processor time, before or after the runs, what other programs left."""

    about: dict[str, Any]
    arms: tuple[Arm, ...]
    trials: tuple[Trial, ...]

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.about["options"]["metric"]))

    @property
    def temperature(self) -> float:
        return float(self.about["options"]["temperature"])

    def label(self, metric: str) -> str:
        """The metric in a heading; agreement is measured in another way where replies are sampled."""
        return "log p (nats)" if metric == AGREEMENT and self.temperature > 0 else metric


@dataclass(frozen=True)
class Summary:
    """One arm over all prompts, each interval from resampled prompts.

    Attributes:
        quality: mean score by metric. behind: it minus AR-large's, paired by prompt.
        latency: decoding seconds per emitted token / those of AR-large on the same prompts; prefill is apart in both.
        passes: target passes per emitted token, the cost that no machine changes; 0 for the drafter alone.
        rejection_rate: rejected / tested draft tokens; None where the target tests none.
        reply_tokens: mean length of a reply.
    """

    arm: Arm
    quality: dict[str, Interval]
    behind: dict[str, Interval]
    latency: Interval
    passes: float
    rejection_rate: float | None
    reply_tokens: float


def summarise(study: Study) -> list[Summary]:
    """A summary of every arm, in the order of the study. Every arm must have answered every prompt."""
    found: dict[str, dict[int, list[Trial]]] = {arm.name: {} for arm in study.arms}
    for trial in study.trials:
        found[trial.arm].setdefault(trial.prompt, []).append(trial)
    answers = {name: [own[prompt] for prompt in sorted(own)] for name, own in found.items()}
    return [_summary(arm, answers[arm.name], answers[LARGE.name], study.metrics) for arm in study.arms]


ByPrompt = Sequence[Sequence[Trial]]
"""One arm's trials: of each prompt its repeats."""


def _summary(arm: Arm, own: ByPrompt, large: ByPrompt, metrics: Sequence[str]) -> Summary:
    counts, plain = [_counts(trials) for trials in own], [_counts(trials) for trials in large]
    total = summed(counts)
    scores = {name: _scores(own, name) for name in metrics}
    behind = {name: list(map(sub, scores[name], _scores(large, name))) for name in metrics}
    return Summary(
        arm=arm,
        quality={name: bootstrap(values, _mean) for name, values in scores.items()},
        behind={name: bootstrap(values, _mean) for name, values in behind.items()},
        latency=bootstrap(list(zip(counts, plain, strict=True)), _relative_latency),
        passes=0.0 if arm == SMALL else total.blocks / total.emitted,
        rejection_rate=1 - total.acceptance_rate if arm.tests_drafts and sum(total.tested) > 0 else None,
        reply_tokens=total.emitted / sum(map(len, own)),
    )


def _counts(trials: Sequence[Trial]) -> RawCounts:
    """The counts of a prompt's repeats together. Its seconds are those of all tokens at the median pace of the repeats, so that a
    hiccup of the machine in one of them is no property of the rule."""
    counts = summed(trial.counts for trial in trials)
    pace = median([trial.counts.total_seconds / trial.counts.emitted for trial in trials])
    return replace(counts, total_seconds=pace * counts.emitted)


def _scores(answers: ByPrompt, metric: str) -> list[float]:
    """The mean score of each prompt."""
    return [_mean([trial.scores[metric] for trial in trials]) for trials in answers]


_pace = ratio_of_sums(lambda counts: counts.total_seconds, lambda counts: counts.emitted)


def _relative_latency(pairs: Sequence[tuple[RawCounts, RawCounts]]) -> float:
    """Sums, not a median over prompts: a rule that answers some prompts fast and some slowly costs their mean."""
    mine, its = zip(*pairs, strict=True)
    return _pace(mine) / _pace(its)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def points_table(study: Study, summaries: Sequence[Summary], *, markdown: bool = False) -> str:
    """A row for every arm: quality, latency, target passes, rejections."""
    quality = [words for name in study.metrics for words in (study.label(name), "minus AR-large's [95 %]")]
    headers = ("", "", *quality, "latency [95 %]")
    rows = [
        (
            s.arm.curve,
            s.arm.at,
            *(words for name in study.metrics for words in _quality(s, name)),
            "1" if s.arm == LARGE else interval(*s.latency),
            f"{s.passes:.3f}",
            "" if s.rejection_rate is None else f"{s.rejection_rate:.3f}",
            f"{s.reply_tokens:.1f}",
        )
        for s in summaries
    ]
    return table((*headers, "passes", "rejected", "tokens"), rows, markdown=markdown, left=2)


def _quality(summary: Summary, metric: str) -> tuple[str, str]:
    behind = "" if summary.arm == LARGE else interval(*summary.behind[metric], digits=3)
    return f"{summary.quality[metric][0]:.3f}", behind


def curves_of(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Rules in their order, each with its points by ascending parameter; the end points are left out."""
    curves: dict[str, list[Summary]] = {}
    for summary in summaries:
        if summary.arm not in ENDS:
            curves.setdefault(summary.arm.curve, []).append(summary)
    return {name: sorted(points, key=lambda s: s.arm.value or 0.0) for name, points in curves.items()}


def frontier(summaries: Sequence[Summary], metric: str) -> list[Summary]:
    """Points that no other is both as fast and as good as, and better in one of the two; by ascending latency."""

    def beats(one: Summary, other: Summary) -> bool:
        faster, better = other.latency[0] - one.latency[0], one.quality[metric][0] - other.quality[metric][0]
        return faster >= 0 and better >= 0 and (faster > 0 or better > 0)

    best = [point for point in summaries if not any(beats(other, point) for other in summaries)]
    return sorted(best, key=lambda point: point.latency[0])


def best_table(study: Study, summaries: Sequence[Summary], metric: str, *, markdown: bool = False) -> str:
    """For each rule: its fastest point at AR-large's quality, and its best quality in AR-large's time (cascades, Table 2).

    A point has AR-large's quality where the interval of the difference reaches 0. By point estimates, as there, a lossless rule
    that samples would have it or not by chance.
    """
    rows = []
    for name, points in curves_of(summaries).items():
        good = [point for point in points if point.behind[metric][2] >= 0]
        fast = [point for point in points if point.latency[0] <= 1.0]
        first = max(good, key=lambda s: -s.latency[0], default=None)
        best = max(fast, key=lambda s: (s.quality[metric][0], -s.latency[0]), default=None)
        speedup = "none" if first is None else _at(first, f"{1 / first.latency[0]:.2f}x")
        quality = "none" if best is None else _at(best, f"{best.quality[metric][0]:.3f}")
        rows.append((name, speedup, quality))
    headers = ("", f"speed-up, {study.label(metric)} not below", f"best {study.label(metric)} in its time")
    return table(headers, rows, markdown=markdown)


def _at(point: Summary, words: str) -> str:
    """Words for a point, with its parameter where it has one."""
    return f"{words} ({point.arm.at})" if point.arm.at else words


def text(study: Study, summaries: Sequence[Summary], *, markdown: bool = False) -> str:
    """Setting, all points, and by metric what is best: for the terminal, or a part of a document."""
    parts = [setting(study), points_table(study, summaries, markdown=markdown)]
    for metric in study.metrics:
        names = [" ".join(filter(None, (s.arm.curve, s.arm.at))) for s in frontier(summaries, metric)]
        parts.append(best_table(study, summaries, metric, markdown=markdown))
        parts.append(
            f"Nothing is both faster and higher in {study.label(metric)} than, from fast to slow: {', '.join(names)}."
        )
    return "\n\n".join(parts)


def setting(study: Study) -> str:
    """What was run, and whether other programs ran beside it."""
    about, options = study.about, study.about["options"]
    prompts, repeats = len({trial.prompt for trial in study.trials}), options["repeats"]
    beside, share = "", about["free_share"]
    if share < QUIET:
        beside = f" Other programs ran too and left {share:.0%} of the processors: latencies suffer."
    warped = Warp(**{field.name: options[field.name] for field in fields(Warp) if field.name in options})
    return (
        f"{about['pair']}, {about['engine']} {about['precision']}, {many(about['threads'], 'thread')}: "
        f"{many(prompts, 'prompt')}{f' x {repeats}' if repeats > 1 else ''}, up to {options['max_new_tokens']} tokens, "
        f"γ = {options['draft_length']}, {warped.words()}. "
        f"Block of tokens against single steps: {about['block_against_single_steps']}.{beside}"
    )


def document(studies: Sequence[tuple[Study, Sequence[Summary], str]]) -> str:
    """A Markdown page of studies, each with its summaries and the link to its picture ('' for none)."""
    parts = [_HEAD]
    for study, summaries, picture in studies:
        title, about = study.about["title"], study.about
        parts += [f"## {title}", f"    {about['command']}", f"{about['date']}, on {about['device']}."]
        if picture:
            parts.append(f"![Quality against latency and rejection rate: {title}]({picture})")
        parts.append(text(study, summaries, markdown=True))
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Quality against latency

Written by `edgespec tradeoff`, never by hand: the commands below measure, and with `--render` the page is written again from
their JSON files.

A rule that keeps more of the drafter's tokens is faster and further from the target. Each line of a picture is one rule through
the values of its parameter; AR-large is the target alone, AR-small the drafter alone. All runs of a prompt follow one another, in
an order of its own for every prompt. Brackets are 95 % bootstrap intervals over prompts; differences from AR-large, the bars
in the pictures too, compare replies to the same prompts.

- **latency**: decoding seconds per emitted token (prefill apart) / AR-large's. **passes**: target passes per emitted token, the
  cost that does not depend on the machine. **rejected**: rejected / tested draft tokens. **tokens**: mean length of a reply.
- **exact-match**: share of replies whose final number is the reference's. **rouge-2**: F1 of word pairs with the reference.
- **agreement** (greedy): tokens up to the first one that differs from AR-large's reply / tokens of the longer reply. **log p**
  (sampled): mean log-probability of a reply's tokens under the target at temperature 1, in nats. True samples have AR-large's;
  a reply with a higher one is sharper than they are, not better.
- token-cascade, sequence-cascade and bild choose their draft lengths themselves; in the first two the target tests no drafts. A
  rule without a parameter is one point.
- **not below**: the interval of the difference from AR-large reaches 0, so a study of few prompts says it of more points.
  **in its time**: latency at most 1. Both as in Table 2 of Faster Cascades via Speculative Decoding, which compares point
  estimates."""


def as_json(study: Study, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Everything: raw counts and replies of every run first, what is derived from them after."""
    return {
        "schema": SCHEMA,
        "about": study.about,
        "arms": [asdict(arm) for arm in study.arms],
        "runs": [{"arm": t.arm, **vars(t), "counts": dump(t.counts)} for t in study.trials],
        "summaries": [asdict(summary) for summary in summaries],
    }


def from_json(found: Any, where: str) -> Study:
    """The study that `as_json` wrote. Raises InputError for a file of another kind or another schema."""
    with suppress(KeyError, TypeError):
        arms = tuple(Arm(**arm) for arm in found["arms"])
        trials = tuple(
            Trial(**row | {"counts": RawCounts(**row["counts"]), "reply": tuple(row["reply"])})
            for row in found["runs"]
        )
        if found["schema"] == SCHEMA and LARGE in arms:
            return Study(found["about"], arms, trials)
    raise InputError(f"{where} is no trade-off study of schema {SCHEMA}; measure it again with --json")
