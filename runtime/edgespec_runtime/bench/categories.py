"""A bench by category: one row for each kind of question, plain decoding against one way of speculation. Pure; times nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.core.table import interval, table
from edgespec_runtime.bench.report import LEAST_PROMPTS, PLAIN, Interval, Run, Summary, shown, summarise

ALL = "all"
_BOTH = ("token_rate", "first_token_seconds")
_DRAFTED = ("prompts", "draft_length", "block_efficiency", "acceptance_rate", *_BOTH, "speedup", "identical")


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
