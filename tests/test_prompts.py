"""Prompt files: the two forms, and rows that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgespec_runtime.prompts import read_chats

from edgespec.errors import InputError


def test_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"instruction": "Hi"}\n{"messages": [{"role": "user", "content": "Yo"}], "reference": "x"}\n'
    )
    assert [chat[0]["content"] for chat in read_chats(file)] == ["Hi", "Yo"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "Hi"}', r"row 1 has keys \['text'\]"),
        ('{"messages": ["Hi"]}', "row 1 has the message 'Hi'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "it needs a role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must end with the user"),
        ("", "holds no prompts"),
        ("{", "not valid JSON"),
    ],
)
def test_rows_that_are_no_prompt_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_chats(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        read_chats(tmp_path / "none.jsonl")
