"""Text that UTF-8 cannot write is refused where it is read, by file and row; what a stream cannot show is replaced."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from edgespec_recipes.data.documents import read_documents
from edgespec_recipes.data.instructions import read_conversations
from edgespec_recipes.data.sources import hub_rows
from edgespec_runtime.text.prompts import read_chats
from pyarrow import parquet
from repository import PYTHONPATH, REPOSITORY

from edgespec.cli import VERBS, main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl
from edgespec.core.texts import (
    check_text,
    forgive_streams,
    obeys,
    parse_yaml,
    printable_json,
    unwritable,
    without_nan,
)

HALF = "half \ud83d"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("whole 🙂", ""),
        ({"a": [1, None, {"b": "ünïcode"}]}, ""),
        (HALF, "the text has 'half \\ud83d'"),
        ({"a": [1, {"b": HALF}]}, "a[1].b has 'half \\ud83d'"),
        ([["x"], [HALF]], "[1][0] has 'half \\ud83d'"),
        ({"\udc00": 1}, "a key has '\\udc00'"),
    ],
)
def test_where_a_text_cannot_be_written(value: Any, where: str) -> None:
    assert unwritable(value) == where
    if where:
        with pytest.raises(InputError, match=r"^f:3: .*half a character"):
            check_text(value, "f:3")


def test_a_whole_pair_of_escapes_is_one_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude42"}\n')
    assert read_conversations(str(tmp_path / "a.jsonl"))[0].messages[0]["content"] == "🙂"
    assert read_jsonl(tmp_path / "a.jsonl") == [{"prompt": "🙂"}]


@pytest.mark.parametrize(
    ("name", "read", "content", "words"),
    [
        (
            "a.jsonl",
            read_conversations,
            '{"prompt": "a"}\n\n{"prompt": "\\ud83d"}\n',
            r"a.jsonl:3: prompt has",
        ),
        ("a.json", read_conversations, '[{"prompt": "a"}, {"prompt": "\\uDFFF"}]', r"a.json:2: prompt has"),
        ("a.jsonl", read_documents, '{"text": "a"}\n{"text": "\\ude42 b"}\n', r"a.jsonl:2: text has"),
        (
            "a.jsonl",
            read_chats,
            '{"instruction": "a"}\n{"instruction": "\\ud83d"}\n',
            r"a.jsonl:2: instruction",
        ),
    ],
)
def test_files_are_refused_by_row(tmp_path: Path, name: str, read: Any, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InputError, match=words):
        list(read(file if read is read_chats else str(file)))


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\ncaf\xe9\n" + b"x\n" * 100_000)
    with pytest.raises(InputError, match=r"a.txt:3 cannot be read as UTF-8"):
        list(read_documents(str(tmp_path / "a.txt")))
    texts = pa.array([b"one", b"caf\xe9"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet:2 has a text that is not UTF-8"):
        list(read_documents(str(tmp_path / "b.parquet")))


def test_rows_of_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"text": "a"}, {"text": HALF}]))
    with pytest.raises(InputError, match=r"^hub:o/n row 2: text has"):
        list(hub_rows("hub:o/n"))


def test_a_byte_order_mark_makes_no_difference(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"instruction": "a"}\r\n', encoding="utf-8")
    (tmp_path / "a.json").write_text('\ufeff[{"instruction": "a"}]', encoding="utf-8")
    assert read_chats(tmp_path / "a.jsonl") == [[{"role": "user", "content": "a"}]]
    assert read_conversations(str(tmp_path / "a.json"))[0].messages[0]["content"] == "a"
    assert read_json(tmp_path / "a.json") == [{"instruction": "a"}]


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "bundle", "caf\udce9"],
        ["generate", "bundle", "hi", "--system", "caf\udce9"],
        ["chat", "bundle", "--system", "caf\udce9"],
        ["serve", "caf\udce9"],
        ["build-drafter", "--target", "caf\udce9"],
        ["build-drafter", "--target", "x", "--generate.system-prompts", "caf\udce9"],
        ["build-drafter", "--target", "x", "--pretrain.text", "a,caf\udce9"],
    ],
)
def test_arguments_are_refused_in_one_line(
    bundle: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle) if word == "bundle" else word for word in words]) == 2
    errors = capfd.readouterr().err
    assert "is 'caf\\udce9', which UTF-8 cannot write" in errors
    assert len(errors.splitlines()) == 1


def test_texts_of_a_recipe_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('target: x\ngenerate:\n  system_prompts: ["a \\ud83d"]\n')
    assert yaml.safe_load(recipe.read_text())["generate"]["system_prompts"] == ["a \ud83d"]
    assert main(["build-drafter", "--recipe", str(recipe), "--target", "x"]) == 2
    assert "generate.system_prompts is 'a \\ud83d', which UTF-8 cannot write" in capfd.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize(
    "words",
    [
        ["build-drafter", "--help"],
        ["plan", "--target", "tiny-chat"],
        ["plan", "--devices"],
        ["recipes", "list"],
        ["targets", "--json"],
    ],
)
def test_verbs_print_whatever_the_encoding_is(encoding: str, words: list[str]) -> None:
    done = run(words, encoding)
    assert done.returncode == 0, done.stderr
    if "--json" in words:
        assert json.loads(done.stdout.decode(encoding)) == json.loads(run(words, "utf-8").stdout)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_reply_does_not_die_of_its_encoding(bundle: Path, encoding: str) -> None:
    """A random model writes characters of all scripts; chat's stats line has Greek letters."""
    prompt = "naïve café, 日本語のテキスト, Привет 🙂"
    talk = ["generate", str(bundle), prompt, "--max-new-tokens", "100", "--temperature", "1", "--seed", "1"]
    talk += ["--draft-length", "3"]  # no time goes into measuring the pair
    wanted, seen = run(talk, "utf-8"), run(talk, encoding)
    assert seen.returncode == 0, seen.stderr
    text = wanted.stdout.decode()
    assert any(ord(letter) > 0xFF for letter in text)
    assert seen.stdout == text.encode(encoding, "replace")
    told = json.loads(run([*talk, "--json"], encoding).stdout.decode(encoding))
    assert told["reply"] + "\n" == text
    chat = run(
        ["chat", str(bundle), "--max-new-tokens", "40", "--draft-length", "3"],
        encoding,
        f"{prompt}\n".encode(),
    )
    assert chat.returncode == 0, chat.stderr
    assert b"tok/s" in chat.stderr


def test_streams_that_are_closed_are_the_null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `edgespec chat BUNDLE <&- 2>&-`: Python has None there."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    forgive_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        assert sys.stdin.buffer.readline() == b""
        for stream in (sys.stdout, sys.stderr):
            assert stream.name == os.devnull
            print("\u03c4", file=stream, flush=True)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of its own")
def test_a_table_goes_where_nobody_reads_it() -> None:
    command = f"{shlex.quote(sys.executable)} -m edgespec targets >&-"
    done = subprocess.run(
        command, shell=True, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PYTHONPATH}
    )
    assert (done.returncode, done.stderr) == (0, b"")


def run(words: list[str], encoding: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    assert words[0].startswith("-") or words[0] in VERBS
    return subprocess.run(
        [sys.executable, "-m", "edgespec", *words],
        input=given,
        capture_output=True,
        cwd=REPOSITORY,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\ntarget: a\nseed: 2\n", "f has the key 'seed' in line 1 and again in line 3; give it once"),
        ("arms:\n- {a: 1}\n- x: {b: 1, b: 1}\n", "f has the key 'b' in line 3 and again in line 3"),
        ("1: a\n'1': b\n", "f has the key '1' in line 1 and again in line 2"),  # the names of two arms
    ],
)
def test_a_key_of_yaml_stands_once(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text.encode(), "f")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "number", ["1" + ":1" * 50, "0x" + "f" * 99, "1" + ":1" * 48 + ":1.5", "!!int 1" + "0" * 100]
)
@pytest.mark.parametrize("form", ["a: 1\nb: {}", "{}: 1", "b: [1, {}]"])
def test_a_long_number_of_yaml_is_refused(number: str, form: str) -> None:
    """PyYAML took half a minute for one in base 60 in a file of 400 kB, and Python prints no number of 5,000 digits."""
    with pytest.raises(
        InputError, match=r"f has a number of 10\d characters in line \d; at most 100 are read"
    ):
        parse_yaml(form.format(number).encode(), "f")


@pytest.mark.parametrize("value", ["!!bool maybe", "!!int ''", "!!float ''", "!!timestamp x"])
def test_a_tag_of_yaml_before_another_value_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"f has a tag .* before a value of another kind; leave the tag out"):
        parse_yaml(f"a: {value}".encode(), "f")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "3",
        "a: " + "9" * 100,
        "a: '" + "9" * 200 + "'",
        "a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 1}]",
        "<<: {a: 1}\na: 2",
    ],
)
def test_other_yaml_is_what_pyyaml_reads(text: str) -> None:
    assert parse_yaml(text.encode(), "f") == yaml.safe_load(text)


def test_json_has_null_for_what_is_no_number() -> None:
    found = {"a": [1.5, float("nan"), {"b": float("-inf")}], "c": (True, None, "NaN")}
    assert without_nan(found) == {"a": [1.5, None, {"b": None}], "c": [True, None, "NaN"]}


def test_json_that_is_printed_has_no_control_characters() -> None:
    """JSON takes those above 126 as they are, and U+009B begins an escape code."""
    found = {"reply": "a\x1b[2J b\x9b2J c\x7f", "\x85": ["ü🙂"]}
    text = printable_json(found, io.StringIO())
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "ü🙂" in text
    assert json.loads(text) == found


def test_no_escape_codes_on_the_old_console_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows them as letters."""

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert obeys(Stream())
    assert not obeys(io.StringIO())
    monkeypatch.setattr("rich.console.detect_legacy_windows", lambda: True)
    assert not obeys(Stream())
