"""Suites: files of questions in the forms that the field uses, and the one that comes with edgespec.

    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}     Spec-Bench, MT-bench
    {"task_id": "HumanEval/0", "prompt": "..."}                             HumanEval: category "code"
    {"question": "...", "answer": "..."}                                    GSM8K: category "maths"
    {"messages": [{"role": "user", "content": "..."}]}                      messages: category "prompts"
    {"prompt": "..."}, {"instruction": "..."}, or a text file with a prompt on every line

A row may name its category itself. A file may mix forms. It may come from a stranger: its size, the number of its questions and
the length of each are bounded, and nothing in it is run. Knows no tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import parse_json, read_bounded
from edgespec.core.texts import check_json
from edgespec_runtime.text.prompts import instruction_of, messages_of
from edgespec_runtime.text.tokenizer import Message

BUILT_IN = "built-in"
"""The suite that comes with edgespec, written for it; a file of this name is given as ./built-in."""
MAX_BYTES = 64 * 1024 * 1024
MAX_QUESTIONS = 10_000
MAX_CATEGORIES = 64
MAX_TURNS = 16
MAX_MESSAGES = 256
MAX_CHARACTERS = 200_000  # of one text
MAX_NAME = 40  # characters of a category
FORMS = '{"turns": [...]}, {"prompt": ...}, {"question": ...}, {"instruction": ...} or {"messages": [...]} is wanted'
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True)
class Question:
    """What is asked of the target, turn by turn.

    Attributes:
        turns: the user's messages, each asked behind the target's replies to those before.
        before: messages that precede the first turn.
        name: the file's own name for it, or the line.
        where: file and line, for errors.
    """

    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()
    category: str = ""
    name: str = ""
    where: str = ""


def question_of(chat: list[Message]) -> Question:
    """The question of a conversation that ends with the user."""
    return Question((chat[-1]["content"],), tuple(chat[:-1]))


def read_suite(name: str) -> list[Question]:
    """The questions of a file, or of the suite that comes with edgespec, in the order of the file.

    Raises InputError naming file, line, what was seen and what is wanted.
    """
    path = Path(name).expanduser()
    if name == BUILT_IN:
        path = Path(__file__).with_name(f"{BUILT_IN}.jsonl")
    elif not path.exists():
        raise InputError(f"the suite {name!r} is no file; give a file, or {BUILT_IN} for edgespec's own")
    lines = _lines(path)
    first = next((line.strip() for line in lines if line.strip()), "")
    is_text = path.suffix != ".jsonl" and not first.startswith(("{", "["))
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if len(questions) == MAX_QUESTIONS:
            raise InputError(f"{where}: {path} has more than {MAX_QUESTIONS} questions; split it")
        row = {"prompt": line.strip()} if is_text else _row(line, where)
        questions.append(_question(row, str(number), where))
    if not questions:
        raise InputError(f"{path} holds no questions; {FORMS}")
    questions = _as_spec_bench(questions)
    names = {question.category for question in questions}
    if len(names) > MAX_CATEGORIES:
        raise InputError(f"{path} has {len(names)} categories; at most {MAX_CATEGORIES} are wanted")
    return questions


def round_robin(questions: Iterable[Question]) -> list[Question]:
    """The first question of every category, then the second of every one ...: whoever stops early has seen them all."""
    grouped: dict[str, list[Question]] = {}
    for question in questions:
        grouped.setdefault(question.category, []).append(question)
    return [question for question in chain(*zip_longest(*grouped.values())) if question is not None]


def _lines(path: Path) -> list[str]:
    """Split at line feeds alone: JSON may hold other ends of lines within a text."""
    data = read_bounded(path, limit=MAX_BYTES)
    try:
        return data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        seen = data[error.start : error.end]
        raise InputError(f"{path}:{number} has the bytes {seen!r}; UTF-8 text is wanted") from error


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line, where)
    except InputError as error:
        raise InputError(f"{error}; the line is {_seen(line.strip())}; a JSON object is wanted") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is {_seen(row)}; a JSON object on every line is wanted")
    check_json(line, row, where)
    return row


def _question(row: dict[str, Any], number: str, where: str) -> Question:
    """One row in whichever form it has."""
    identity = row.get("question_id", row.get("task_id", number))
    if type(identity) not in (int, str) or len(str(identity)) > 200:
        raise InputError(f"{where}: its id is {_seen(identity)}; a number or a short string is wanted")
    before: list[Message] = []
    usual = "prompts"
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not 1 <= len(turns) <= MAX_TURNS:
            raise InputError(
                f"{where}: turns is {_seen(turns)}; a list of 1 to {MAX_TURNS} strings is wanted"
            )
        texts = [_text(turn, f"{where}: turns[{place}]") for place, turn in enumerate(turns)]
    elif "messages" in row:
        chat = messages_of({"messages": row["messages"]}, where)
        if len(chat) > MAX_MESSAGES:
            raise InputError(f"{where} has {len(chat)} messages; at most {MAX_MESSAGES} are wanted")
        for place, message in enumerate(chat):
            _text(message["content"], f"{where}: messages[{place}]")
        before, texts = chat[:-1], [chat[-1]["content"]]
    elif key := next((key for key in ("prompt", "question", "instruction") if key in row), ""):
        texts = [_text(row[key], f"{where}: {key}")]
        if key == "instruction":
            texts = [_text(instruction_of(row), f"{where}: {key} and what it is about")]
        usual = "maths" if key == "question" else "code" if key == "prompt" and "task_id" in row else usual
    else:
        raise InputError(f"{where} has the keys {_seen(sorted(row))}; {FORMS}")
    category = row.get("category", usual)
    plain = isinstance(category, str) and category.isprintable() and "|" not in category
    if not plain or not 0 < len(category.strip()) <= MAX_NAME:
        raise InputError(
            f"{where}: category is {_seen(category)}; 1 to {MAX_NAME} printable characters without | are wanted"
        )
    return Question(tuple(texts), tuple(before), category.strip(), str(identity), where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} is {_seen(value)}; a text that is not empty is wanted")
    if len(value) > MAX_CHARACTERS:
        raise InputError(f"{where} has {len(value)} characters; at most {MAX_CHARACTERS} are wanted")
    return value


def _as_spec_bench(questions: list[Question]) -> list[Question]:
    """MT-bench's eight categories as one beside others, as Spec-Bench's own table counts them (Xia et al. 2024)."""
    if not {question.category for question in questions} > MT_BENCH:
        return questions
    return [replace(one, category="mt_bench") if one.category in MT_BENCH else one for one in questions]


def _seen(value: Any) -> str:
    """A value of the file, short enough for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
