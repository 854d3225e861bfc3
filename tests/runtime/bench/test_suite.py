"""Suites: every form of the field is read, a broken line is named with what was seen and what is wanted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.bench import suite
from edgespec_runtime.bench.suite import BUILT_IN, MT_BENCH, Question, read_suite, round_robin

from edgespec.core.errors import InputError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who are you?"},
]


def written(folder: Path, *rows: Any, name: str = "suite.jsonl") -> str:
    """A file with these rows; text stands as it is."""
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "turns", "category", "name"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["One", "Two"], "reference": []},
            ("One", "Two"),
            "writing",
            "81",
        ),
        ({"turns": ["One"]}, ("One",), "prompts", "1"),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x"},
            ("def f():\n",),
            "code",
            "HumanEval/0",
        ),
        ({"question": "How many?", "answer": "3 #### 3"}, ("How many?",), "maths", "1"),
        ({"prompt": "Say hi"}, ("Say hi",), "prompts", "1"),
        ({"prompt": "Say hi", "category": "hello"}, ("Say hi",), "hello", "1"),
        ({"instruction": "Say hi"}, ("Say hi",), "prompts", "1"),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, ("Add.\n\n1, 2",), "prompts", "1"),
        ({"instruction": "Say hi", "input": ""}, ("Say hi",), "prompts", "1"),
    ],
)
def test_forms(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...], category: str, name: str) -> None:
    (question,) = read_suite(written(tmp_path, row))
    assert (question.turns, question.category, question.name) == (turns, category, name)
    assert question.before == ()
    assert question.where.endswith("suite.jsonl:1")


def test_messages_keep_what_comes_before_the_last(tmp_path: Path) -> None:
    (question,) = read_suite(written(tmp_path, {"messages": MESSAGES}))
    assert question.turns == ("Who are you?",)
    assert list(question.before) == MESSAGES[:3]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts"])
def test_a_text_file_has_a_prompt_on_every_line(tmp_path: Path, name: str) -> None:
    questions = read_suite(written(tmp_path, "What is {x}?", "", "  Grüße \r", "\u2028", name=name))
    assert [question.turns for question in questions] == [("What is {x}?",), ("Grüße",)]
    assert [question.name for question in questions] == ["1", "3"]


def test_a_file_may_mix_forms_and_have_empty_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    rows = ["\ufeff" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), "", {"question": "c"}]
    questions = read_suite(written(tmp_path, *rows))
    assert [question.turns[0] for question in questions] == ["a\u2028b", "c"]
    assert questions[1].where.endswith(":3")


GOOD = {"prompt": "fine"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "cut', "is not valid JSON"),
        ('{"prompt": "cut', "a JSON object is wanted"),
        ("[1, 2]", "is [1, 2]; a JSON object on every line is wanted"),
        ({"text": "x"}, "has the keys ['text']; "),
        ({"prompt": 3}, "prompt is 3; a text that is not empty is wanted"),
        ({"question": "  "}, "question is '  '; a text that is not empty is wanted"),
        ({"turns": "x"}, "turns is 'x'; a list of 1 to 16 strings is wanted"),
        ({"turns": []}, "turns is []; "),
        ({"turns": ["a"] * 17}, "a list of 1 to 16 strings is wanted"),
        ({"turns": ["a", None]}, "turns[1] is None; "),
        ({"turns": ["a"], "category": 7}, "category is 7; 1 to 40 printable characters"),
        ({"turns": ["a"], "category": "\x1b[31m"}, "category is '\\x1b[31m'; "),
        ({"turns": ["a"], "category": "x" * 41}, "1 to 40 printable characters"),
        ({"turns": ["a"], "category": "a|b"}, "category is 'a|b'"),
        ({"turns": ["a"], "question_id": [1]}, "its id is [1]; "),
        ({"messages": MESSAGES[:3]}, "ends with the role 'assistant'"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "it needs a role (system, user, assistant)"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0] is ''; "),
        ({"messages": [*MESSAGES] * 65}, "has 260 messages; at most 256 are wanted"),
        ({"prompt": "x" * 200_001}, "prompt has 200001 characters; at most 200000 are wanted"),
        ('{"prompt": "\\ud83d"}', "half a character"),
        ('{"prompt": ' + "[" * 100_000, "nests deeper than 64 levels"),
        ('{"prompt": ' + "[" * 70 + "]" * 70 + "}", "nests deeper than 64 levels"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_suite(written(tmp_path, GOOD, "", row, GOOD))
    assert words in str(caught.value)
    assert "suite.jsonl:3" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r"s\.jsonl:2 has the bytes b'\\xe9'; UTF-8 text is wanted"):
        read_suite(str(tmp_path / "s.jsonl"))


def test_files_that_hold_nothing_or_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no questions"):
        read_suite(written(tmp_path, "", " "))
    with pytest.raises(InputError, match="give a file, or built-in"):
        read_suite("buildin")
    with pytest.raises(InputError, match="a regular file is wanted"):
        read_suite(str(tmp_path))
    with pytest.raises(InputError, match=r"array\.json:1 is \[\]; a JSON object on every line is wanted"):
        read_suite(written(tmp_path, "[]", name="array.json"))


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MAX_QUESTIONS", 3)
    assert len(read_suite(written(tmp_path, *[GOOD] * 3))) == 3
    with pytest.raises(InputError, match="more than 3 questions"):
        read_suite(written(tmp_path, *[GOOD] * 4))
    many = [{"prompt": "x", "category": f"c{place}"} for place in range(3)]
    monkeypatch.setattr(suite, "MAX_CATEGORIES", 2)
    with pytest.raises(InputError, match="has 3 categories; at most 2"):
        read_suite(written(tmp_path, *many))
    monkeypatch.setattr(suite, "MAX_BYTES", 40)
    with pytest.raises(InputError, match="at most 40 are read"):
        read_suite(written(tmp_path, *many))


def test_mt_benchs_categories_are_one_beside_spec_benchs_others(tmp_path: Path) -> None:
    rows = [{"category": name, "turns": ["a", "b"]} for name in sorted(MT_BENCH)]
    alone = read_suite(written(tmp_path, *rows))
    assert {question.category for question in alone} == MT_BENCH
    beside = read_suite(written(tmp_path, *rows, {"category": "rag", "turns": ["a"]}))
    assert Counter(question.category for question in beside) == {"mt_bench": 8, "rag": 1}
    some = read_suite(written(tmp_path, rows[0], {"category": "rag", "turns": ["a"]}))
    assert "mt_bench" not in {question.category for question in some}


def test_categories_take_turns() -> None:
    questions = [Question((text,), category=text[0]) for text in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [question.turns[0] for question in round_robin(questions)] == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_the_suite_that_comes_along() -> None:
    """Twenty questions of every kind that Spec-Bench has, and twenty of code; a chat has two turns, the others one."""
    questions = read_suite(BUILT_IN)
    kinds = Counter(question.category for question in questions)
    names = ("chat", "translation", "summary", "question answering", "maths", "retrieval", "code")
    assert kinds == dict.fromkeys(names, 20)
    assert {len(one.turns) for one in questions if one.category == "chat"} == {2}
    assert {len(one.turns) for one in questions if one.category != "chat"} == {1}
    assert len({turn for one in questions for turn in one.turns}) == 160
    assert len({one.name for one in questions}) == 140
    for one in questions:
        words = len(one.turns[0].split())
        if one.category == "summary":
            assert 80 <= words <= 225, one.name
        elif one.category == "retrieval":
            assert one.turns[0].startswith("Context: "), one.name
            assert 60 <= words <= 250, one.name
        else:
            assert words <= 120, one.name
