"""The bounds of the three words, and what a check of verify.json says that a file keeps."""

from __future__ import annotations

import math

import pytest
from edgespec_export.answers.verdict import CHANGED, CLOSE_ANSWERS, SAME_ANSWERS, kept_of, verdict_of


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (1.0, SAME_ANSWERS),
        (0.97, SAME_ANSWERS),
        (0.9699, CLOSE_ANSWERS),
        (0.92, CLOSE_ANSWERS),
        (0.9199, CHANGED),
        (0.0, CHANGED),
        (math.nan, CHANGED),
    ],
)
def test_bounds(share: float, word: str) -> None:
    assert verdict_of(share) == word


def test_replies_go_before_prompts() -> None:
    prompts = {"top1": 0.99, "positions": 100, "fast": {"block_flips": 4}}
    assert kept_of(prompts) == {"exact": 0.99, "fast": pytest.approx(0.95)}
    answers = {"top1": [0.9, 0.85, 0.95]}
    assert kept_of({**prompts, "answers": answers}) == {"exact": 0.9}
    assert kept_of({**prompts, "answers": answers, "fast": {"answers": {"top1": [0.8, 0.7, 0.9]}}}) == {
        "exact": 0.9,
        "fast": 0.8,
    }
    assert kept_of({"top1": None, "fast": None}) == {"exact": 0.0}
