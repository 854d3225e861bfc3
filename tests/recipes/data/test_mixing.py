"""What a batch of distillation is made of: exact shares, every row once an epoch, positions that may be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edgespec_recipes.data.mixing import (
    FIXED,
    STUDENT,
    TARGET,
    TEXT,
    Mixture,
    TextRows,
    held_out,
    prompt_rows,
    response_rows,
    shares,
    take_turns,
)
from edgespec_recipes.data.token_rows import Rows

from edgespec.recipe.read import resolve
from edgespec.recipe.schema import PRESETS, DistillOptions

RESPONSES = [([5, 6, 7], [8, 9, 2]), ([10], [11, 12, 13, 2]), ([14, 15, 16, 17, 18, 19], [20])]


def numbered(kind: int, size: int) -> Rows:
    return Rows({"input_ids": np.full((size, 4), kind), "row_id": np.arange(size)})


def test_shares_follow_algorithm_a2() -> None:
    """λ1 of the rows that are not text are fixed, λ2 of the remaining are the student's."""
    options = DistillOptions(text_fraction=0.2, fixed_fraction=0.5, student_fraction=0.25, fixed="x")
    assert shares(options) == pytest.approx({TEXT: 0.2, FIXED: 0.4, STUDENT: 0.1, TARGET: 0.3})
    assert shares(replace(options, text_fraction=0, fixed_fraction=0, student_fraction=1)) == {STUDENT: 1.0}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_papers_points(preset: str) -> None:
    values = {"target": "x", "distill": {"preset": preset, "text_fraction": 0.0, "fixed": "some.jsonl"}}
    options = resolve(values, {}).distill
    expected: dict[str, tuple[str, str, dict[int, float]]] = {
        "seqkd": ("fkl", "hard", {TARGET: 1.0}),
        "supervised-kd": ("fkl", "soft", {FIXED: 1.0}),
        "imitkd": ("fkl", "soft", {FIXED: 0.5, STUDENT: 0.5}),
        "f-distill": ("tvd", "soft", {STUDENT: 0.5, TARGET: 0.5}),
        "gkd": ("jsd", "soft", {STUDENT: 1.0}),
    }
    assert (options.divergence, options.labels, shares(options)) == expected[preset]


def test_what_is_given_beats_the_preset() -> None:
    options = resolve(
        {"target": "x", "distill": {"preset": "gkd"}}, {"distill": {"divergence": "fkl"}}
    ).distill
    assert (options.divergence, options.student_fraction) == ("fkl", 1.0)


@pytest.mark.parametrize(
    "parts", [(0.1, 0.9), (0.5, 0.3, 0.2), (1.0,), (1 / 3, 1 / 3, 1 / 3), (0.01, 0.49, 0.5)]
)
def test_every_beginning_holds_its_shares(parts: tuple[float, ...]) -> None:
    turns = take_turns(parts, 1000)
    counts = np.stack([(turns == part).cumsum() for part in range(len(parts))], 1)
    wanted = np.arange(1, 1001)[:, None] * np.array(parts)
    assert np.abs(counts - wanted).max() < 1.01


def test_every_batch_holds_its_share_of_text() -> None:
    mixture = Mixture(
        {TEXT: numbered(TEXT, 3), TARGET: numbered(TARGET, 7)}, {TEXT: 0.3, TARGET: 0.7}, 100, seed=0
    )
    kinds = np.array([mixture[index]["kind"] for index in range(100)]).reshape(20, 5)
    assert set((kinds == TEXT).sum(1).tolist()) == {1, 2}
    assert (kinds == TEXT).sum() == 30
    assert all(mixture[i]["input_ids"][0] == mixture[i]["kind"] for i in range(100))
    assert [int(mixture[i]["slot"]) for i in (0, 99)] == [0, 99]


def test_order_depends_on_the_seed_alone() -> None:
    def order(seed: int, places: list[int]) -> list[tuple[int, int]]:
        mixture = Mixture(
            {TEXT: numbered(TEXT, 5), TARGET: numbered(TARGET, 9)}, {TEXT: 0.5, TARGET: 0.5}, 40, seed
        )
        return [(int(mixture[i]["kind"]), int(mixture[i]["row_id"])) for i in places]

    places = list(range(40))
    assert order(1, places) == order(1, places[::-1])[::-1]
    assert order(1, places) != order(2, places)


def test_every_row_is_seen_once_in_an_epoch() -> None:
    mixture = Mixture({TARGET: numbered(TARGET, 9)}, {TARGET: 1.0}, 18, seed=3)
    seen = [int(mixture[index]["row_id"]) for index in range(18)]
    assert sorted(seen[:9]) == sorted(seen[9:]) == list(range(9))


def test_compared_positions_predict_response_tokens() -> None:
    rows = response_rows(RESPONSES, 12)
    predicted: list[int] = []
    for row in range(len(rows)):
        item = rows[row]
        for place in np.flatnonzero(item["compared"]):
            assert item["document_ids"][place] == item["document_ids"][place + 1] >= 0
            predicted.append(int(item["input_ids"][place + 1]))
    assert sorted(predicted) == sorted(token for _, response in RESPONSES for token in response)
    assert not rows.arrays["room"].any()


def test_prompt_rows_leave_room_behind_every_prompt() -> None:
    rows = prompt_rows([prompt for prompt, _ in RESPONSES], longest=4, context=12)
    kept: list[list[int]] = []
    for row in range(len(rows)):
        item: dict[str, Any] = rows[row]
        for document in set(item["document_ids"].tolist()) - {-1}:
            here = item["document_ids"] == document
            kept.append(item["input_ids"][here & ~item["room"]].tolist())
            assert (here & item["room"]).sum() == 4
    assert sorted(kept) == sorted(prompt for prompt, _ in RESPONSES)
    assert not rows.arrays["compared"].any()


def test_text_rows_compare_what_has_a_next_token() -> None:
    row = TextRows(np.arange(12, dtype=np.uint16).reshape(2, 6))[1]
    assert row["input_ids"].tolist() == [6, 7, 8, 9, 10, 11]
    assert row["compared"].tolist() == [True] * 5 + [False]
    assert row["position_ids"].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("rows", "wanted", "watched"), [(100, 4, [12, 37, 62, 87]), (7, 4, [3]), (3, 4, []), (8, 0, [])]
)
def test_watched_rows_lie_among_the_others(rows: int, wanted: int, watched: list[int]) -> None:
    """Rows are packed with the longest texts first: the last ones alone would hold the shortest."""
    learnt, held = held_out(rows, wanted)
    assert held.tolist() == watched
    assert sorted([*learnt, *held]) == list(range(rows))
