"""A bench by category: one row for each kind of question, plain decoding against one way of speculation. Pure; times nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.core.table import interval, table
from edgespec_runtime.bench.report import LEAST_PROMPTS, PLAIN, Interval, Run, summarise

ALL = "all"


@dataclass(frozen=True)
class Category:
    """Figures of the questions of one category; intervals are 95 % bootstrap intervals over questions.

    Attributes:
        prompts: questions. turns: their turns, each decoded on its own.
        draft_length: what speculates, as in `Summary`.
        block_efficiency: τ, tokens per target pass: Spec-Bench's mean accepted tokens.
        acceptance_rate: α; None where nothing was drafted.
        token_rate, plain_token_rate: tokens per second, medians over questions. speedup: median of their ratio.
        first_token_seconds, plain_first_token_seconds: from an empty cache, prompt included; medians over questions.
        identical: questions whose replies have the same tokens as the plain ones.
    """

    category: str
    prompts: int
    turns: int
    draft_length: int
    block_efficiency: Interval
    acceptance_rate: float | None
    plain_token_rate: Interval
    token_rate: Interval
    speedup: Interval
    plain_first_token_seconds: float
    first_token_seconds: float
    identical: int


def by_category(runs: Sequence[Run], category_of: Mapping[int, str], draft_length: int) -> list[Category]:
    """A row for each category in the order in which they were run, and one for all where there are several.

    `category_of`: by index of the prompt. `draft_length`: the one that is held against plain decoding.
    """
    wanted = [run for run in runs if run.draft_length in (PLAIN, draft_length)]
    grouped: dict[str, list[Run]] = {}
    for run in wanted:
        grouped.setdefault(category_of[run.prompt], []).append(run)
    rows = [_row(name, group, draft_length) for name, group in grouped.items()]
    return [*rows, _row(ALL, wanted, draft_length)] if len(rows) > 1 else rows


def _row(name: str, runs: Sequence[Run], draft_length: int) -> Category:
    plain, drafted = summarise(runs, {})
    alpha = drafted.acceptance_rate
    return Category(
        category=name,
        prompts=len({run.prompt for run in runs}),
        turns=len({(run.prompt, run.turn) for run in runs}),
        draft_length=draft_length,
        block_efficiency=drafted.block_efficiency,
        acceptance_rate=None if math.isnan(alpha) else alpha,
        plain_token_rate=plain.token_rate,
        token_rate=drafted.token_rate,
        speedup=drafted.speedup,
        plain_first_token_seconds=plain.first_token_seconds,
        first_token_seconds=drafted.first_token_seconds,
        identical=drafted.identical,
    )


def category_table(rows: Sequence[Category], *, markdown: bool = False) -> str:
    """One line a category; τ is Spec-Bench's mean accepted tokens. Of few questions no interval is shown: it is too narrow."""

    def shown(row: Category, found: Interval) -> str:
        return interval(*found) if row.prompts >= LEAST_PROMPTS else f"{found[0]:.2f}"

    cells = [
        (
            row.category,
            row.prompts,
            shown(row, row.block_efficiency),
            "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.3f}",
            f"{row.plain_token_rate[0]:.1f}",
            f"{row.token_rate[0]:.1f}",
            shown(row, row.speedup),
            f"{1e3 * row.first_token_seconds:.1f}",
        )
        for row in rows
    ]
    headers = ("", "prompts", "τ [95 %]", "α", "plain tok/s", "tok/s", "x plain [95 %]", "first token ms")
    return table(headers, cells, markdown=markdown)
