"""Tables as people and files see them: whole on a pipe, folded on a terminal that is too narrow."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from edgespec.core.table import count, duration, many, table

HEADERS = ("device", "what it is", "bytes")
ROWS = [("laptop-cpu-x86", "a laptop with a processor of eight cores", 12), ("pi", "small", 3)]


def test_a_table_is_whole_where_nobody_looks() -> None:
    lines = table(HEADERS, ROWS, left=2).splitlines()
    assert lines[1].split() == ["-" * 14, "-" * 40, "-" * 5]
    assert lines[3] == f"{'pi':<14}  {'small':<40}      3"
    assert table(HEADERS, ROWS, markdown=True, left=2).splitlines()[1] == (
        f"| {'-' * 14} | {'-' * 40} | ----: |"
    )


def on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))


@pytest.mark.parametrize("columns", [200, 60, 40, 10])
def test_a_terminal_folds_text_and_breaks_no_name(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = table(HEADERS, ROWS, left=2)
    on_a_terminal(columns, monkeypatch)
    folded = table(HEADERS, ROWS, left=2)
    least = 14 + 12 + 5 + 2 * 2
    assert max(map(len, folded.splitlines())) <= max(columns, least)
    assert (folded == whole) == (columns >= len(whole.splitlines()[0]))
    assert "laptop-cpu-x86" in folded
    assert sorted(folded.replace("-", "").split()) == sorted(whole.replace("-", "").split())


@pytest.mark.parametrize("columns", [60, 50, 30])
def test_headers_of_numbers_fold_first_and_names_only_where_it_helps(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, name = (
        ("", "x plain, chat at temperature 0", "MBSU by parameters"),
        "target llama.cpp in fast mode",
    )
    on_a_terminal(columns, monkeypatch)
    first, second, _, row, *rest = table(headers, [(name, "1.05 [1.01, 1.10]", "1.21")]).splitlines()
    words = " ".join((first, second)).split()
    assert words == ["x", "plain,", "chat", "at", "MBSU", "by", "temperature", "0", "parameters"]
    assert row.split("  ", 1)[0] == ("target llama.cpp in" if columns == 50 else name)
    assert row.split()[-4:] == ["1.05", "[1.01,", "1.10]", "1.21"]
    assert rest == (["fast mode"] if columns == 50 else [])
    assert columns == 30 or max(map(len, (first, row))) <= columns


def test_the_lines_of_a_row_are_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(40, monkeypatch)
    lines = table(HEADERS, ROWS, left=2, painted=lambda row, line: f"{row}{line}").splitlines()
    assert [line[0] for line in lines[2:]] == ["0", "0", "0", "1"]


def test_one_is_singular() -> None:
    assert [many(number, "prompt") for number in (0, 1, 2)] == ["0 prompts", "1 prompt", "2 prompts"]


def test_counts_have_three_digits() -> None:
    seen = [count(number) for number in (652.94, 999, 999.6, 1234567, 999_400, 999_700, 999_700_000)]
    assert seen == ["653", "999", "1k", "1.23M", "999k", "1M", "1B"]


def test_durations_have_two_units() -> None:
    seen = [duration(seconds) for seconds in (0.04, 59.9, 59.96, 75.2, 3599.6, 7325)]
    assert seen == ["0.0s", "59.9s", "1m 00s", "1m 15s", "1h 00m", "2h 02m"]
