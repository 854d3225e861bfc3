"""Measures of a reply: worked values, and the cases that are easy to get wrong."""

from __future__ import annotations

from decimal import Decimal

import pytest
from edgespec_runtime.tradeoff.quality import common_prefix, exact_match, final_number, rouge_2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48/2 = 24 clips in May.\n48+24 = 72.\n#### 72", "72"),
        ("#### 72 and then 5 more", "72"),  # what follows the mark counts, not what is last
        ("#### 3\n#### 4", "3"),
        ("####\n4 apples", "4"),  # the mark's number stands on its line; else the last number
        ("#### ?, I think 5", "5"),
        ("### 5 or 7", "7"),  # a heading is no mark
        ("It costs $1,200.00.", "1200"),
        ("#### $1,200", "1200"),
        ("1,2,3", "3"),  # a list, not thousands
        ("1,2345", "2345"),
        ("from 10-7", "7"),  # minus between two numbers is no sign
        ("it is -7", "-7"),
        ("x = (3)-4", "4"),
        ("about 0.50 of it.", "0.5"),
        ("He ran 3.5 miles.", "3.5"),
        ("in 2024. Then 12.", "12"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_exact_match_compares_values_and_not_writing() -> None:
    assert exact_match("so $1,200.0 in all", "She has 1200.\n#### 1,200") == 1.0
    assert exact_match("#### 71", "#### 72") == 0.0
    assert exact_match("I do not know", "#### 72") == 0.0
    assert exact_match("7 8", "#### 7") == 0.0


def test_rouge_2_of_worked_examples() -> None:
    # pairs: the-cat cat-sat sat-on on-the the-mat against the-cat cat-is is-on on-the the-mat: 3 of 5 and 3 of 5
    assert rouge_2("The cat sat on the mat.", "the cat is on the mat") == pytest.approx(3 / 5)
    # 1 pair of 1 against 1 of 4: precision 1, recall 1/4
    assert rouge_2("a b", "a b c d e") == pytest.approx(2 * 0.25 / 1.25)
    assert rouge_2("one two", "two one") == 0.0  # order matters
    assert rouge_2("same text here", "same text here") == 1.0


def test_rouge_2_counts_a_pair_as_often_as_both_have_it() -> None:
    # a-b three times and b-a twice against a-b once: one shared of 5 and of 1
    assert rouge_2("a b a b a b", "a b") == pytest.approx(2 * (1 / 5) / (1 / 5 + 1))
    # three pairs of a b a b, all of them among the five
    assert rouge_2("a b a b", "a b a b a b") == pytest.approx(2 * (3 / 5) / (1 + 3 / 5))


def test_rouge_2_sees_words_as_runs_of_letters_and_digits() -> None:
    assert rouge_2("It's 11:30!", "it s 11 30") == 1.0
    assert rouge_2("re-served_table", "re served table") == 1.0


@pytest.mark.parametrize(("reply", "reference"), [("", "a b"), ("a", "a"), ("a b", ""), ("!?", "!?")])
def test_a_text_without_a_pair_scores_nothing(reply: str, reference: str) -> None:
    assert rouge_2(reply, reference) == 0.0


def test_the_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert common_prefix([1, 2, 9, 4], [1, 2, 3, 4]) == 0.5  # the 4 behind the difference does not count
    assert common_prefix([9, 2, 3, 4], [1, 2, 3, 4]) == 0.0


def test_a_reply_that_stops_early_or_goes_on_is_not_the_same() -> None:
    assert common_prefix([1, 2], [1, 2, 3, 4]) == 0.5
    assert common_prefix([1, 2, 3, 4], [1, 2]) == 0.5
    assert common_prefix([], [1]) == 0.0
    assert common_prefix([], []) == 1.0
