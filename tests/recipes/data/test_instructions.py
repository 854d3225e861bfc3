"""Instruction sets: every form is recognised, said rightly, and held against its first row."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from edgespec_recipes.data import instructions, sources
from edgespec_recipes.data.instructions import FORMS, Conversation, read_conversations, recognise
from pyarrow import parquet

from edgespec.core.errors import InputError

Row = dict[str, Any]


def asked(text: str, response: str | None = None) -> Conversation:
    return Conversation([{"role": "user", "content": text}], response)


def write(path: Path, rows: list[Any]) -> str:
    """Rows in the form the name's ending stands for."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".gz"):
        with gzip.open(path, "wt") as stream:
            stream.write(lines)
    elif path.name.endswith(".parquet"):
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        parquet.write_table(pa.table(columns), path)
    else:
        path.write_text(json.dumps(rows) if path.name.endswith(".json") else lines)
    return str(path)


def turn(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


CHAT = [message("user", "a"), message("assistant", "b"), message("user", "c")]
EXAMPLES: dict[str, tuple[list[Row], list[Conversation]]] = {
    "alpaca": (
        [
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            {"instruction": "Sing.", "input": "", "output": "La"},
            {"instruction": "Say nothing.", "input": None, "output": ""},
            {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
        ],
        [
            *(asked("Add.\n\n1, 2", "3"), asked("Sing.", "La"), asked("Say nothing.")),
            Conversation([message("system", "s"), *CHAT], "d"),
        ],
    ),
    "dolly": (
        [
            {"instruction": "Who?", "context": "Ann came.", "response": "Ann", "category": "closed_qa"},
            {"instruction": "Hi", "context": "", "response": "Hello", "category": "chat"},
        ],
        [asked("Who?\n\nAnn came.", "Ann"), asked("Hi", "Hello")],
    ),
    "self-instruct": (
        [
            {
                "id": "seed_task_0",
                "instruction": "Translate.",
                "instances": [{"input": "oui", "output": "yes"}, {"input": "", "output": "no"}],
            }
        ],
        [asked("Translate.\n\noui", "yes"), asked("Translate.", "no")],
    ),
    "ShareGPT": (
        [
            {"conversations": [turn("human", "a"), turn("gpt", "b"), turn("human", "c"), turn("gpt", "d")]},
            {"conversations": [turn("gpt", "cut off"), turn("system", "s"), turn("user", "e")]},
            {"conversations": [turn("user", "f")], "system": "beside"},
        ],
        [
            Conversation(CHAT, "d"),
            Conversation([message("system", "s"), message("user", "e")]),
            Conversation([message("system", "beside"), message("user", "f")]),
        ],
    ),
    "messages": (
        [
            {"messages": [message("user", "a")], "reference": "of the standard library's held-out file"},
            {
                "messages": [message("system", "s"), message("user", "b"), message("assistant", "c")],
                "system": "x",
            },
        ],
        [asked("a"), Conversation([message("system", "s"), message("user", "b")], "c")],
    ),
    "question and answer": ([{"question": "1 + 1?", "answer": "2"}], [asked("1 + 1?", "2")]),
    "prompt": (
        [{"prompt": "p"}, {"prompt": "q", "completion": "c"}, {"prompt": "r", "response": "d"}],
        [asked("p"), asked("q", "c"), asked("r", "d")],
    ),
    "instruction": (
        [{"instruction": "Hi"}, {"instruction": "Hi", "system": "s"}],
        [asked("Hi"), Conversation([message("system", "s"), message("user", "Hi")])],
    ),
    "OpenAssistant trees": (
        [
            {
                "message_tree_id": "t",
                "prompt": {
                    "text": "root",
                    "role": "prompter",
                    "replies": [
                        {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
                        {
                            "text": "better",
                            "role": "assistant",
                            "rank": 0,
                            "replies": [{"text": "more?", "replies": [{"text": "yes"}]}],
                        },
                    ],
                },
            }
        ],
        [
            asked("root", "better"),
            Conversation(
                [message("user", "root"), message("assistant", "better"), message("user", "more?")], "yes"
            ),
        ],
    ),
}


def node(name: str, parent: str | None, rank: int | None = None, **more: Any) -> Row:
    role = "prompter" if name.startswith("p") else "assistant"
    return {"message_id": name, "parent_id": parent, "role": role, "text": name.upper(), "rank": rank, **more}


TREE = [
    node("p0", None, lang="en"),
    node("a1", "p0", 1),
    node("a2", "p0", None),  # without rank: last
    node("a3", "p0", 0),
    node("a4", "p0", -1, deleted=True),
    node("p5", "a1"),
    node("a6", "p5", 0),
    node("p8", "a3"),
    node("p7", "a3"),  # the id decides where no rank does
    node("a9", "p7", 0),
    node("a10", "p8", 0),
    node("p11", "a9"),  # nobody answered
]
PATH = [message("user", "P0"), message("assistant", "A3"), message("user", "P7")]
EXAMPLES["OpenAssistant messages"] = (
    [*TREE, node("p20", None), node("a21", "p20", 0)],
    [asked("P0", "A3"), Conversation(PATH, "A9"), asked("P20", "A21")],
)


def test_every_form_has_an_example() -> None:
    assert set(EXAMPLES) == {form.name for form in FORMS}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ending", sources.ROW_FILES)
def test_every_form_in_every_kind_of_file(tmp_path: Path, name: str, ending: str) -> None:
    rows, conversations = EXAMPLES[name]
    form = recognise(rows[0])
    assert form is not None
    assert form.name == name
    assert read_conversations(write(tmp_path / f"set{ending}", rows)) == conversations


def test_a_hub_dataset(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows, conversations = EXAMPLES["dolly"]
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "test.jsonl", rows[:1])
    assert read_conversations(f"hub:{tmp_path / 'set'}") == conversations
    assert read_conversations(f"hub:{tmp_path / 'set'}:test") == conversations[:1]


def test_the_order_of_openassistant_messages_does_not_matter(tmp_path: Path) -> None:
    generator = random.Random(0)
    for _ in range(20):
        rows = generator.sample(TREE, len(TREE))
        assert read_conversations(write(tmp_path / "a.jsonl", rows)) == [
            asked("P0", "A3"),
            Conversation(PATH, "A9"),
        ]


def test_messages_below_a_missing_or_deleted_one_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        *(node("p0", None), node("a1", "p0", 0)),
        *(node("p2", "gone"), node("a3", "p2", 0), node("a4", "a3", 0)),
        *(node("p5", None, deleted=True), node("a6", "p5", 0)),
    ]
    assert read_conversations(write(tmp_path / "a.jsonl", rows)) == [asked("P0", "A1")]
    assert (
        "4 rows of the form OpenAssistant messages" in caplog.text
    )  # three hang on `gone`, one root is deleted


CALLS = {
    "a tool's turn": [message("user", "a"), message("tool", "42"), message("assistant", "b")],
    "a function's": [message("user", "a"), message("function", "42"), message("assistant", "b")],
    "a call": [message("user", "a"), {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    "an old call": [
        message("user", "a"),
        {"role": "assistant", "content": "", "function_call": {"name": "f"}},
    ],
    "ShareGPT's": [
        turn("human", "a"),
        turn("function_call", "{}"),
        turn("observation", "42"),
        turn("gpt", "b"),
    ],
}


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_rows_with_tools_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, call: list[Any]
) -> None:
    plain = {"role": "user", "content": "x", "tool_calls": None}  # as a column of a table has it
    file = write(tmp_path / "a.jsonl", [{key: call}, {key: [plain]}, {key: call}])
    assert read_conversations(file) == [asked("x")]
    assert read_conversations(file) == [asked("x")]
    assert [record.message for record in caplog.records] == [
        f"{file}: 2 rows with turns of tools are skipped; 1 conversations are left"
    ]
    with pytest.raises(InputError, match=r"a.jsonl:1 has a turn of a tool: .*data.strict"):
        read_conversations(file, strict=True)


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_turns_may_be_of_either_kind_under_either_key(tmp_path: Path, key: str, ending: str) -> None:
    """Several drafter trainers write conversations: role, content."""
    chat = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    shared = [turn("human", "a"), turn("bard", "b"), turn("human", "c"), turn("model", "d")]
    wanted = Conversation([message("user", "a"), message("assistant", "b"), message("user", "c")], "d")
    for name, turns in (("chat", chat), ("shared", shared)):
        file = write(tmp_path / f"{name}{ending}", [{"id": "1", key: turns}] * 2)
        assert read_conversations(file) == [wanted, wanted]


def test_a_deep_tree_is_no_trouble(tmp_path: Path) -> None:
    rows = [
        node(f"{'pa'[depth % 2]}{depth}", f"{'ap'[depth % 2]}{depth - 1}" if depth else None)
        for depth in range(400)
    ]
    assert len(read_conversations(write(tmp_path / "a.jsonl", rows))) == 200


def test_a_rank_beyond_floats_is_a_rank(tmp_path: Path) -> None:
    rows = [node("p0", None), node("a1", "p0", 10**400), node("a2", "p0", 3)]
    assert read_conversations(write(tmp_path / "a.jsonl", rows)) == [asked("P0", "A2")]


def test_a_path_of_very_many_messages_is_refused(tmp_path: Path) -> None:
    """Every answer is a conversation with all before it: 100,000 messages in a file of 9 MB would be 20 GB."""
    rows = [node("p0", None)]
    for depth in range(1, 1002):
        rows.append(node(f"{'pa'[depth % 2]}{depth}", rows[-1]["message_id"]))
    with pytest.raises(InputError, match=r"a.jsonl:1 begins a path of more than 1,000 messages"):
        read_conversations(write(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty; give rows in one of these forms: .*alpaca"),
        ([{"text": "Hi"}], r"a.jsonl:1 has the keys text; the forms known are .*ShareGPT \(conversations"),
        ([{}], r"a.jsonl:1 has the keys of none"),
        ([["Hi"]], r"a.jsonl:1 is .*a file that is one list is named .json"),
        (
            [{"instruction": "a", "output": "b"}, {"prompt": "c"}],
            r"a.jsonl:2 has the keys prompt; the first row is of the form alpaca \(instruction, input, output\)",
        ),
        (
            [{"instruction": "a"}, {"instruction": "b", "output": "c"}],
            r"a.jsonl:2 has .* of the form instruction ",
        ),
        ([{"instruction": "a", "output": 3}], r"a.jsonl:1 has the output '3'; it must be a string"),
        ([{"question": None, "answer": "x"}], r"a.jsonl:1 has the question 'None'; it must be a string"),
        ([{"instruction": "a", "instances": {}}], r"has the instances '{}'; they must be a list of objects"),
        ([{"messages": "Hi"}], r"has the messages 'Hi'; they must be a list"),
        ([{"messages": [], "system": 3}], r"a.jsonl:1 has the system '3'; it must be a string"),
        ([{"instruction": "a", "history": [["b"]]}], r"has the history .*it must be a list of pairs"),
        ([{"instruction": "a", "history": "b"}], r"has the history 'b'"),
        (
            [{"messages": ["Hi"]}],
            r"has the turn 'Hi'; it needs 'role' \(system, user, assistant\) and 'content'",
        ),
        ([{"messages": [message("robot", "x")]}], r"has the turn .*robot"),
        (
            [{"conversations": [turn("robot", "x")]}],
            r"it needs 'from' \(system, user, assistant\) and 'value'",
        ),
        ([{"messages": [{"role": ["user"], "content": "x"}]}], r"has the turn .*it needs 'role'"),
        (
            [{"messages": [message("user", "a"), message("tool", "b")]}],
            r"is of the form messages and asks nothing, and its 1 rows with turns of tools are skipped",
        ),
        (
            [{"instruction": "half \ud83d"}],
            r"a.jsonl:1: instruction has 'half \\ud83d', which holds half a char",
        ),
        (
            [{"messages": [message("user", "a")]}, {"messages": [message("user", "\udc00b")]}],
            r"a.jsonl:2: messages\[0\].content has",
        ),
        ([{"messages": [message("assistant", "x")]}], r"is of the form messages and asks nothing"),
        ([{"messages": []}], r"is of the form messages and asks nothing"),
        ([{"instruction": " "}], r"asks nothing; give rows with a user's turn"),
        ([node("p0", None), node("p0", None)], r"a.jsonl:2 has the message_id 'p0' of .*a.jsonl:1"),
        (
            [node("p0", None), node("p1", "a2"), node("a2", "p1")],
            r"a.jsonl:3: the message 'a2' is its own ancestor; correct its parent_id",
        ),
        ([node("p0", None), {**node("a1", "p0"), "role": "robot"}], r"a.jsonl:1 has the role 'robot'"),
        ([node("p0", None), {**node("a1", "p0"), "role": ["x"]}], r"a.jsonl:1 has the role .*'x'"),
        ([node("p0", None), {**node("a1", "p0"), "message_id": 7}], r"a.jsonl:2 has the message_id 7"),
        ([{**node("p0", None), "parent_id": ["p1"]}], r"OpenAssistant messages and asks nothing"),
        ([{"prompt": {"text": 3}}], r"a.jsonl:1 has the message .*it needs a text"),
        ([{"prompt": {"text": "a", "replies": "b"}}], r"a.jsonl:1 has the replies 'b'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read_conversations(write(tmp_path / "a.jsonl", rows))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, r"does not exist; give a .jsonl, .jsonl.gz, .json, .parquet file or hub:NAME"),
        ("", None, r"a source is ''; give a .jsonl, .*a folder or hub:NAME"),
        ("a.csv", "x", r"a.csv is none of .jsonl"),
        ("a.jsonl", '{"instruction": "a"}\nnonsense\n', r"a.jsonl:2 is not valid JSON"),
        ("a.json", '{"instruction": "a"}', r"a.json holds a dict; a .json file must be a list of objects"),
        ("a.json", '["a"]', r"a.json:1 is 'a'; each item must be a JSON object"),
        (
            "a.json",
            '{"prompt": "a"}\n{"prompt": "b"}',
            r"Extra data.*; a file with one object in each line must be named .jsonl",
        ),
        ("a.json", "[" * 100_000, r"a.json nests deeper than 64 levels"),
        ("a.parquet", "x", r"a.parquet cannot be read as parquet"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words):
        read_conversations(str(tmp_path / name) if name else name)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_huge_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(instructions, "LONGEST", 500)
    rows = [{"instruction": "x" * 100}, {"instruction": "y" * 501}]
    with pytest.raises(InputError, match=rf"a{ending}:2 (is longer than 500|has 501 characters)"):
        read_conversations(write(tmp_path / f"a{ending}", rows))


def test_a_json_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_JSON_BYTES", 10)
    with pytest.raises(InputError, match=r"a.json has 26 bytes; above 10 give .jsonl"):
        read_conversations(write(tmp_path / "a.json", [{"instruction": "Hello"}]))


def test_sets_as_their_authors_publish_them(shared: Path) -> None:
    """GSM8K, self-instruct, P3 and the Schema-Guided Dialogues: every row is read, and answered."""
    places = {
        "gsm8k/train.jsonl": 7473,
        "self_instruct/seed_tasks.jsonl": 175,
        "self_instruct/user_oriented_instructions.jsonl": 252,
        "p3_open_subset/p3_open.jsonl.gz": 27653,
        "sgd_dialogues/sgd_dev.jsonl.gz": 2098,
    }
    for place, rows in places.items():
        conversations = read_conversations(str(shared / "data" / place))
        assert len(conversations) == rows, place
        assert all(conversation.messages[-1]["role"] == "user" for conversation in conversations)
        assert sum(conversation.response is not None for conversation in conversations) > 0.98 * rows, place
