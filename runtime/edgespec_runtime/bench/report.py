"""What the runs of a bench mean: a summary for each draft length and category, tables, a verdict in words. Pure; times nothing.

Costs are in units of one plain target step and come from the raw counts: c_t = a drafter step, v = a pass over γ + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from edgespec.core.metrics import (
    RawCounts,
    bootstrap,
    mbsu,
    median,
    predicted_block_efficiency,
    predicted_speedup,
    ratio_of_sums,
    summed,
)
from edgespec.core.table import interval, many, table

PLAIN = 0  # the draft length of a plain run
AUTO = -1  # ... of one whose draft lengths were chosen block by block, by the schedule or by a rule with a loop of its own
LEAST_PROMPTS = 5  # of fewer the interval is their range: with three it holds the true median 75 times in 100
GOOD_ACCEPTANCE = 0.8  # what a well-distilled drafter reaches on its own target's replies
Interval = tuple[float, float, float]  # value, low and high end of the 95 % interval
ALL = "all"  # the categories together
_BOTH = ("token_rate", "first_token_seconds")
_DRAFTED = ("prompts", "draft_length", "block_efficiency", "acceptance_rate", *_BOTH, "speedup", "identical")


class Place(NamedTuple):
    """Where a run stands: the prompt, its repeat, and the turn of a conversation, all counted from 0."""

    prompt: int
    repeat: int
    turn: int = 0


@dataclass(frozen=True)
class Run:
    """One prompt decoded once. `first_token_seconds` is prefill and first block, from an empty cache.

    `turn`: of a prompt that is a conversation, which of its turns; the turns of one prompt are summarised together.
    """

    prompt: int
    repeat: int
    draft_length: int
    prompt_tokens: int
    first_token_seconds: float
    reply: tuple[int, ...]
    counts: RawCounts
    turn: int = 0


@dataclass(frozen=True)
class Summary:
    """One draft length over all prompts; `speedup`: median over prompts of its token rate / the plain one's.

    `of_fastest`: token rate over all tokens / that of the fastest fixed draft length in hindsight, 0 among them. The median of
    replies of twenty tokens leaps with single blocks, and the best of several such medians is a lucky one; this hardly is.
    `mean_draft_length`: draft tokens a block, less than γ where drafts end early. MBSU is that of γ, or of the mean where γ was
    chosen.
    """

    draft_length: int
    prompts: int
    mean_draft_length: float
    token_rate: Interval
    first_token_seconds: float
    step_seconds: float  # one target pass
    speedup: Interval
    of_fastest: Interval
    block_efficiency: Interval
    acceptance_rate: float
    mbsu: dict[str, float]
    draft_cost: float
    verify_cost: float
    behind: float  # drafter steps behind a draft, in a block
    identical: int  # prompts whose reply has the same tokens as the plain one

    @property
    def name(self) -> str:
        mean = f" ({self.mean_draft_length:.1f})" if self.blocks else ""
        named = {PLAIN: "plain", AUTO: f"γ chosen{mean}"}
        return named.get(self.draft_length, f"γ = {self.draft_length}")

    @property
    def blocks(self) -> bool:
        """Whether the target verified any; a drafter that writes alone makes none, and has no τ and no v (NaN)."""
        return not math.isnan(self.block_efficiency[0])

    @property
    def predicted(self) -> float:
        """τ / (γ·c_t + v(γ + 1)), from the measured costs, with steps behind drafts in γ; NaN without a block."""
        steps = self.mean_draft_length + self.behind
        return predicted_speedup(self.block_efficiency[0], steps, self.draft_cost, self.verify_cost)


class _Runs:
    """All runs, by prompt and draft length: lists of one number for each prompt, medians over its repeats and turns.

    NaN of a prompt where no run has the number.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs: dict[int, dict[int, list[Run]]] = {}
        for run in runs:
            self._runs.setdefault(run.prompt, {}).setdefault(run.draft_length, []).append(run)

    def of(self, length: int, value: Callable[[Run], float]) -> list[float]:
        return [_middle(map(value, own[length])) for own in self._runs.values()]

    def ratios(self, length: int, value: Callable[[Run], float], unit: Callable[[Run], float]) -> list[float]:
        """`value` in units of `unit` of the plain run."""
        return [mine / its for mine, its in zip(self.of(length, value), self.of(PLAIN, unit), strict=True)]

    def counts(self, length: int) -> list[RawCounts]:
        return [summed(run.counts for run in own[length]) for own in self._runs.values()]

    def identical(self, length: int) -> set[int]:
        """Prompts whose replies are the plain ones, turn by turn."""
        return {
            prompt
            for prompt, own in self._runs.items()
            if all(
                run.reply == plain.reply
                for run in own[length]
                for plain in own[PLAIN]
                if run.turn == plain.turn
            )
        }


def _middle(values: Iterable[float]) -> float:
    """The median of those that are known; NaN where none is."""
    return median([value for value in values if not math.isnan(value)] or [math.nan])


_rate_over_all = ratio_of_sums(lambda counts: counts.emitted, lambda counts: counts.total_seconds)


def _ratio_over_all(pairs: Sequence[tuple[RawCounts, RawCounts]]) -> float:
    mine, theirs = zip(*pairs, strict=True)
    return _rate_over_all(mine) / _rate_over_all(theirs)


def _pass_seconds(run: Run) -> float:
    return run.counts.verify_seconds / run.counts.blocks if run.counts.blocks else math.nan


def _draft_step_seconds(run: Run) -> float:
    steps = run.counts.drafted + run.counts.behind
    return run.counts.draft_seconds / steps if steps else math.nan


def identical_prompts(runs: Sequence[Run]) -> int:
    """Prompts whose replies are the plain ones at every draft length."""
    return len(set.intersection(*map(_Runs(runs).identical, {run.draft_length for run in runs})))


def summarise(runs: Sequence[Run], cost_ratios: dict[str, float]) -> list[Summary]:
    """Summaries by ascending draft length, plain first, chosen ones last. Every prompt must have every draft length."""
    grouped = _Runs(runs)
    lengths = sorted({run.draft_length for run in runs}, key=lambda length: (length == AUTO, length))
    found = {length: grouped.counts(length) for length in lengths}
    fixed = [length for length in lengths if length != AUTO]
    fastest = found[max(fixed, key=lambda length: _rate_over_all(found[length]))]
    rate, first = attrgetter("counts.token_rate"), attrgetter("first_token_seconds")
    summaries = []
    for length in lengths:
        counts = found[length]
        total = summed(counts)
        efficiency = bootstrap(counts, ratio_of_sums(lambda c: c.emitted, lambda c: c.blocks))
        charged = total.computed(total.mean_draft_length if length == AUTO else length)
        # a prompt that stayed plain tells nothing of a drafter step, and one without blocks nothing of a pass
        steps = grouped.ratios(length, _draft_step_seconds, _pass_seconds)
        passes = grouped.ratios(length, _pass_seconds, _pass_seconds)
        summaries.append(
            Summary(
                draft_length=length,
                prompts=len(counts),
                mean_draft_length=total.mean_draft_length,
                token_rate=bootstrap(grouped.of(length, rate), median),
                first_token_seconds=median(grouped.of(length, first)),
                step_seconds=_middle(grouped.of(length, _pass_seconds)),
                speedup=bootstrap(grouped.ratios(length, rate, rate), median),
                of_fastest=bootstrap(list(zip(counts, fastest, strict=True)), _ratio_over_all),
                block_efficiency=efficiency,
                acceptance_rate=total.acceptance_rate,
                mbsu={name: mbsu(efficiency[0], charged, c) for name, c in cost_ratios.items()},
                draft_cost=_middle(steps) if total.drafted + total.behind else 0.0,
                verify_cost=_middle(passes),
                behind=total.behind / total.blocks if total.blocks else 0.0,
                identical=len(grouped.identical(length)),
            )
        )
    return summaries


def shown(value: float, digits: int = 2) -> str:
    """A dash for what is not known."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def speed_table(summaries: Sequence[Summary], *, markdown: bool = False) -> str:
    """Token rate, against plain decoding, and time to the first token."""
    rows = [
        (
            s.name,
            interval(*s.token_rate, digits=1),
            "1" if s.draft_length == PLAIN else interval(*s.speedup),
            "" if s.draft_length == PLAIN else shown(s.predicted),
            f"{1e3 * s.first_token_seconds:.1f}",
        )
        for s in summaries
    ]
    headers = ("", "tok/s [95 %]", "x plain [95 %]", "predicted", "first token ms")
    return table(headers, rows, markdown=markdown)


def cost_table(summaries: Sequence[Summary], *, markdown: bool = False) -> str:
    """What the drafter gives (τ, α, MBSU) and what it costs (c_t, v)."""
    drafted = [s for s in summaries if s.draft_length != PLAIN]
    names = list(drafted[0].mbsu)
    rows = [
        (
            s.name,
            interval(*s.block_efficiency) if s.blocks else "-",
            f"{s.acceptance_rate:.3f}" if s.mean_draft_length else "-",
            *(shown(s.mbsu[name]) for name in names),
            f"{s.draft_cost:.3f}" if s.mean_draft_length else "-",
            shown(s.verify_cost),
        )
        for s in drafted
    ]
    headers = ("", "τ [95 %]", "α", *(f"MBSU by {name}" for name in names), "c_t", "v(γ+1)")
    return table(headers, rows, markdown=markdown)


class Category(NamedTuple):
    """The questions of one category; intervals are over questions. `turns`: of all of them, each decoded on its own."""

    name: str
    turns: int
    plain: Summary
    drafted: Summary

    def as_json(self) -> dict[str, Any]:
        """Figures as in `Summary`; `block_efficiency` is Spec-Bench's mean accepted tokens."""
        drafted = {name: getattr(self.drafted, name) for name in _DRAFTED}
        plain = {f"plain_{name}": getattr(self.plain, name) for name in _BOTH}
        return {"category": self.name, "turns": self.turns, **drafted, **plain}


def by_category(runs: Sequence[Run], category_of: Mapping[int, str], draft_length: int) -> list[Category]:
    """A row for each category in the order in which they were run, and one for all where there are several.

    `category_of`: by index of the prompt. `draft_length`: the one that is held against plain decoding.
    """
    wanted = [run for run in runs if run.draft_length in (PLAIN, draft_length)]
    grouped: dict[str, list[Run]] = {}
    for run in wanted:
        grouped.setdefault(category_of[run.prompt], []).append(run)
    every = [(ALL, wanted)] if len(grouped) > 1 else []
    return [
        Category(name, len({(run.prompt, run.turn) for run in group}), *summarise(group, {}))
        for name, group in [*grouped.items(), *every]
    ]


def category_table(rows: Sequence[Category], *, markdown: bool = False) -> str:
    """One line a category; τ is Spec-Bench's mean accepted tokens. Of few questions no interval is shown: it is too narrow."""

    def within(row: Category, found: Interval) -> str:
        return interval(*found) if row.drafted.prompts >= LEAST_PROMPTS else f"{found[0]:.2f}"

    cells = [
        (
            row.name,
            row.drafted.prompts,
            within(row, row.drafted.block_efficiency),
            shown(row.drafted.acceptance_rate, 3),
            f"{row.plain.token_rate[0]:.1f}",
            f"{row.drafted.token_rate[0]:.1f}",
            within(row, row.drafted.speedup),
            f"{1e3 * row.drafted.first_token_seconds:.1f}",
        )
        for row in rows
    ]
    headers = ("", "prompts", "τ [95 %]", "α", "plain tok/s", "tok/s", "x plain [95 %]", "first token ms")
    return table(headers, cells, markdown=markdown)


def _fixed(summaries: Sequence[Summary]) -> list[Summary]:
    """The fixed draft lengths. A rule with a loop of its own has none, and its one way to draft stands for them."""
    fixed = [s for s in summaries if s.draft_length > PLAIN]
    return fixed or [s for s in summaries if s.draft_length == AUTO]


def fastest_fixed(summaries: Sequence[Summary]) -> Summary:
    """The fixed draft length with the highest speed-up."""
    return max(_fixed(summaries), key=lambda s: s.speedup[0])


def compared(summaries: Sequence[Summary]) -> list[Summary]:
    """What is looked at by category: the fastest fixed γ and, last, the chosen draft lengths where they were run."""
    best = fastest_fixed(summaries)
    return [s for s in summaries if s is best or s.draft_length == AUTO]


def shortfalls(
    summaries: Sequence[Summary], least_speedup: float | None, least_tau: float | None
) -> list[str]:
    """A sentence for each bound that is not reached, with the value seen and the value wanted; None: no bound.

    The speed-up is that of chosen draft lengths, as chat has them, or of the fastest γ. τ is the highest of a fixed γ: that of
    chosen lengths says how often this machine drafted rather than how good the drafter is.
    """
    highest = max(_fixed(summaries), key=lambda s: s.block_efficiency[0])
    used = compared(summaries)[-1]
    found = []
    for name, value, at, least in (
        ("speed-up over plain decoding", used.speedup, used.name, least_speedup),
        ("block efficiency τ", highest.block_efficiency, highest.name, least_tau),
    ):
        if least is not None and not value[0] >= least:  # NaN reaches no bound
            digits = next((n for n in range(2, 9) if not round(value[0], n) >= least), 9)  # not to reach it
            found.append(f"The {name} is {interval(*value, digits)} at {at}; at least {least:g} is wanted.")
    return found


def verdict(summaries: Sequence[Summary]) -> str:
    """Whether speculation pays for this pair on this machine; where it does not, the cause, from the measured costs.

    The chosen γ is judged where it was measured, since chat and generate have no other. Too few prompts tell nothing.
    """
    best = fastest_fixed(summaries)
    chosen = next((s for s in summaries if s.draft_length == AUTO), None)
    value, low, high = (round(each, 2) for each in (chosen or best).speedup)  # as they are shown
    measured, beside = f"{value:.2f}x plain decoding [{low:.2f}, {high:.2f}] ", ""
    measured += f"at {best.name}" if chosen is None else "with γ chosen block by block"
    if chosen is not None and chosen is not best:
        fastest = max((s for s in summaries if s is not chosen), key=lambda s: s.of_fastest[0])
        beside = (
            f" At {best.name} it is {interval(*best.speedup)}x. Over all tokens the chosen γ has {interval(*chosen.of_fastest)} "
            f"of the rate of {fastest.name}, the fastest in hindsight."
        )
    block = (best.block_efficiency[0], best.mean_draft_length, best.draft_cost, best.verify_cost, best.behind)
    sums = f" ({_block_sums(*block)})" if best.blocks else ""
    if best.prompts < LEAST_PROMPTS:
        few = f"{many(best.prompts, 'prompt')} cannot tell whether speculation pays here"
        return f"{few}: {measured}; more prompts would tell{sums}.{beside}"
    if low > 1.0:
        return f"Speculation pays here: {measured}.{beside}"
    if high >= 1.0:
        unclear = "more prompts or a quieter machine would tell"
        return f"Speculation makes no clear difference here: {measured}; {unclear}{sums}.{beside}"
    cause = " The drafter wrote alone, so there is no block to find the cause in."
    if best.speedup[0] > 1.0:
        cause = ""  # a fixed γ pays, so the cause is in no block of it
    elif best.predicted > 1.0:
        cause = f" The models' passes alone would give {best.predicted:.2f}x, but sampling and the loop take the rest{sums}."
    elif best.blocks:
        cause = f" {block_cause(best.acceptance_rate, *block)}"
    return f"Speculation does not pay here: {measured}.{cause}{beside}"


def _block_sums(tau: float, length: float, draft_cost: float, verify_cost: float, behind: float) -> str:
    """What a block of γ drafts yields (τ) and costs (γ·c_t + v), in words."""
    made, drafting = f"{length + behind:.2g}", (length + behind) * draft_cost
    steps = f"{drafting:.2f} for {made} drafter step{'s' * (made != '1')}"
    return (
        f"a block yields {tau:.2f} tokens and costs {drafting + verify_cost:.2f} plain steps: "
        f"{steps}, {verify_cost:.2f} for verifying {length + 1:.2g} tokens"
    )


def block_cause(
    acceptance_rate: float,
    efficiency: float,
    draft_length: float,
    draft_cost: float,
    verify_cost: float,
    behind: float = 0.0,
) -> str:
    """What is most in the way: a block gains τ − 1 tokens over a plain step, for γ·c_t of drafting and v − 1 of verifying."""
    sums = _block_sums(efficiency, draft_length, draft_cost, verify_cost, behind)
    drafting, verifying = (draft_length + behind) * draft_cost, verify_cost - 1.0
    attainable = predicted_block_efficiency(GOOD_ACCEPTANCE, draft_length)
    if acceptance_rate < GOOD_ACCEPTANCE and attainable > drafting + verify_cost:
        return f"Acceptance is too low, α = {acceptance_rate:.2f} ({sums})."
    if drafting >= verifying:
        return f"The drafter is too slow for this target: a step of it costs {draft_cost:.2f} target steps ({sums})."
    return f"Verifying {draft_length + 1:.2g} tokens in one pass is too costly on this machine ({sums})."
