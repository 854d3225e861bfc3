"""Text sources: files, folders, parquet, hub datasets (a local folder stands for one), and what is wrong with bad ones."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from edgespec_recipes.data import documents
from edgespec_recipes.data.documents import fingerprint, read_documents, text_files
from edgespec_recipes.data.instructions import read_conversations
from pyarrow import parquet

from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.files import write_jsonl
from edgespec.recipe.data_sources import HubSource, parse_hub


def jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    write_jsonl(path, [{field: text} for text in texts])
    return path


def test_documents_of_files_folders_and_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo<|endoftext|>\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps({"text": "three"}) + "\n\n" + json.dumps({"text": " "}) + "\n")
    (tmp_path / "c.md").write_text("not text of ours")
    parquet.write_table(pa.table({"n": [1, 2, 3], "text": ["four", None, "five"]}), tmp_path / "d.parquet")
    with gzip.open(tmp_path / "e.txt.gz", "wt") as stream:
        stream.write("\ufeffsix")
    assert list(read_documents(str(tmp_path))) == ["one", "two", "three", "four", "five", "six"]
    assert list(read_documents(str(tmp_path / "a.txt"))) == ["one", "two"]


def test_what_a_mac_puts_beside_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07\xff")
    assert list(read_documents(str(tmp_path))) == ["one"]


def test_marks_are_found_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo <|endof<|endoftext|><|endoftext|>three")
    for chunk in range(1, 40):
        monkeypatch.setattr(documents, "_CHUNK", chunk)
        assert list(read_documents(str(tmp_path / "a.txt"))) == ["one", "two <|endof", "three"]


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl"])
def test_a_very_long_document_is_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "LONGEST", 100)
    monkeypatch.setattr(documents, "_CHUNK", 30)
    text = "".join(f"line {number} of it\n" for number in range(50)) + "x" * 250
    file = tmp_path / name
    file.write_text(text if name == "long.txt" else json.dumps({"text": text}))
    pieces = list(read_documents(str(file)))
    assert max(map(len, pieces)) <= 100
    assert len(pieces) < 20
    assert all(piece.rstrip("\n").endswith(("it", "x")) for piece in pieces)
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "")


def test_a_text_is_read_no_further_than_it_is_wanted(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wt") as stream:
        for number in range(200_000):
            stream.write(f"document {number}<|endoftext|>\n")
    whole = (tmp_path / "a.txt.gz").read_bytes()
    (tmp_path / "a.txt.gz").write_bytes(whole[: len(whole) // 2])  # its end is gone
    assert list(islice(read_documents(str(tmp_path / "a.txt.gz")), 2)) == ["document 0", "document 1"]
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        list(read_documents(str(tmp_path / "a.txt.gz")))


def test_a_gzip_that_is_no_utf8_and_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "caf\xe9"}\n')[:-6])
    with pytest.raises(InputError, match=r"a.jsonl.gz cannot be read as UTF-8 text: invalid"):
        list(read_documents(str(tmp_path / "a.jsonl.gz")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"does not exist; give a .txt.*or hub:NAME"),
        ("a.csv", b"1,2", r"a.csv is none of .txt"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as UTF-8"),
        ("a.txt.gz", b"plain", "cannot be read as UTF-8"),
        ("a.txt", b"", r"is empty; give text"),
        ("a.txt", b"\n<|endoftext|>\n", r"is empty; give text"),
        ("a.jsonl", b"", r"is empty; give text"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', r"a.jsonl:2 has the keys txt; it needs 'text'"),
        ("a.jsonl", b'{"text": 7}\n', r"a.jsonl:1 has a 'text' that is no string: '7'"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "y"\n', r"a.jsonl:3 is not valid JSON"),
        ("a.jsonl", b'[{"text": "x"}]\n', r"a.jsonl:1 is .*a file that is one list is named .json"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1 nests deeper than 64 levels"),
        ("a.parquet", b"", r"a.parquet cannot be read as parquet after row 0: .*0 bytes"),
        ("a.parquet", b"PAR1 and nothing else", r"cannot be read as parquet after row 0"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(read_documents(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(InputError, match=r"holds no .txt"):
        text_files(str(tmp_path))


def test_a_line_without_end_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_LONGEST_LINE", 1000)
    with pytest.raises(InputError, match=r"a.jsonl:2 is longer than 1,000 characters"):
        list(read_documents(str(jsonl(tmp_path / "a.jsonl", ["x", "y" * 1000]))))


def test_a_line_without_end_that_is_no_utf8_takes_little_memory(tmp_path: Path) -> None:
    """The file has 300 kB; to tell the number of the line, 64 MiB were read at once."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as stream:
        stream.write(b"\n\xff" + b"a" * 2**26)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a.jsonl.gz:2 cannot be read as UTF-8"):
        list(read_documents(str(tmp_path / "a.jsonl.gz")))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24


def test_a_parquet_file_without_text_names_its_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="has the columns body, n; it needs 'text'"):
        list(read_documents(str(tmp_path / "a.parquet")))


def test_a_small_parquet_file_takes_little_memory(tmp_path: Path) -> None:
    """Its one value of a MiB stands in 256 rows."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["x" * 2**20]))
    parquet.write_table(
        pa.table({"text": values}), tmp_path / "a.parquet", compression="zstd", store_schema=False
    )
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    before, rows = pa.total_allocated_bytes(), 0
    for text in read_documents(str(tmp_path / "a.parquet")):
        rows += len(text) == 2**20
        assert pa.total_allocated_bytes() - before < 32 * 2**20
    assert rows == 256


def test_a_huge_row_of_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LONGEST_LINE", 1000)
    parquet.write_table(pa.table({"text": ["日" * 1000, "y" * 5000]}), tmp_path / "a.parquet")
    found = read_documents(str(tmp_path / "a.parquet"))
    assert next(found) == "日" * 1000
    with pytest.raises(InputError, match=r"a.parquet:2 has 5,\d+ bytes; at most 4,000 are read"):
        next(found)


def test_a_date_of_parquet_that_python_has_not_is_named(tmp_path: Path) -> None:
    """Of a column that nobody asked for: all columns of conversations are read."""
    when = pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("us"))
    parquet.write_table(pa.table({"prompt": ["a", "b"], "when": when}), tmp_path / "a.parquet")
    with pytest.raises(
        InputError, match=r"a.parquet:2 has a value that Python cannot hold: .*; leave its col"
    ):
        read_conversations(str(tmp_path / "a.parquet"))


def test_a_damaged_name_of_a_parquet_column_is_said(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet", store_schema=False)
    damaged = (tmp_path / "a.parquet").read_bytes().replace(b"text", b"te\xfft")
    (tmp_path / "a.parquet").write_bytes(damaged)
    with pytest.raises(InputError, match=r"a.parquet cannot be read as parquet after row 0: .*0xff"):
        list(read_documents(str(tmp_path / "a.parquet")))


def test_damage_inside_a_parquet_file_is_named(tmp_path: Path) -> None:
    texts = [f"text number {number} " * 5 for number in range(2000)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=500)
    assert list(read_documents(str(tmp_path / "a.parquet"))) == texts
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"a.parquet cannot be read as parquet after row [1-9]"):
        list(read_documents(str(tmp_path / "a.parquet")))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder in the form of a hub dataset: two splits of JSON lines."""
    jsonl(tmp_path / "set" / "train.jsonl", [f"document {number}" for number in range(300)])
    jsonl(tmp_path / "set" / "test.jsonl", ["held out"])
    return tmp_path / "set"


def test_a_hub_dataset_is_streamed(dataset: Path) -> None:
    assert list(islice(read_documents(f"hub:{dataset}"), 2)) == ["document 0", "document 1"]
    assert len(list(read_documents(f"hub:{dataset}:train"))) == 300
    assert list(read_documents(f"hub:{dataset}:test:text")) == ["held out"]
    other = jsonl(dataset.parent / "other" / "train.jsonl", ["by another name"], "body").parent
    assert list(read_documents(f"hub:{other}:train:body")) == ["by another name"]


def test_a_folder_with_the_name_of_a_reader_in_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("of the folder around it")
    jsonl(tmp_path / "text" / "train.jsonl", ["its own"])
    assert list(read_documents("hub:./text")) == list(read_documents("hub:text")) == ["its own"]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (
            ":validation",
            r"cannot be read: Bad split: validation. Available splits: .*'train'.*the form is hub:NAME",
        ),
        (":train:body", r"row 1 has the keys text; it needs 'body'; name another field with hub:NAME"),
        (":train:text:more", r"is not of the form hub:NAME\[:SPLIT\[:FIELD\]\]"),
        ("::text", r"is not of the form hub:NAME"),
    ],
)
def test_a_wrong_split_or_field_is_named(dataset: Path, rest: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        list(read_documents(f"hub:{dataset}{rest}"))
    assert "\n" not in str(caught.value)


def test_a_dataset_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"cannot be read: .*doesn't contain any data files"):
        list(read_documents(f"hub:{tmp_path / 'empty'}"))
    program = tmp_path / "code" / "code.py"
    program.parent.mkdir()
    program.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_documents(f"hub:{program.parent}"))
    assert not (tmp_path / "ran").exists()  # code of a dataset never runs


def test_a_dataset_behind_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    # both read the environment when they were first imported, maybe before the fixture that sets it
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"hub:nobody/nothing cannot be reached .*; check the name and the network"
    ):
        list(read_documents("hub:nobody/nothing"))


def test_names_of_hub_datasets(dataset: Path) -> None:
    assert parse_hub("hub:openai/gsm8k/main:test:question") == HubSource(
        "openai/gsm8k", "main", "test", "question"
    )
    assert parse_hub("hub:owner/name") == HubSource("owner/name", None, "train", "text")
    assert parse_hub(f"hub:{dataset}").folder == dataset
    assert parse_hub("hub:owner/name").folder is None


def test_a_folder_on_a_drive_of_windows_in_the_form_of_a_hub_dataset() -> None:
    assert parse_hub(r"hub:C:\data\chats") == HubSource(r"C:\data\chats", None, "train", "text")
    assert parse_hub("hub:d:/my/chats:test:question") == HubSource("d:/my/chats", None, "test", "question")
    with pytest.raises(InputError, match="is not of the form"):
        parse_hub(r"hub:C:\data:test:question:more")


@pytest.mark.parametrize(("package", "source"), [("pyarrow", "a.parquet"), ("datasets", "hub:owner/name")])
def test_a_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtra, match=rf'{package}, which is not installed: .*pip install "edgespec\[data\]"'
    ):
        list(read_documents(source))


def test_a_fingerprint_tells_states_of_a_text_apart(dataset: Path, tmp_path: Path) -> None:
    def states() -> Iterator[str]:
        yield json.dumps(fingerprint(str(dataset)))
        yield json.dumps(fingerprint(f"hub:{dataset}"))
        yield json.dumps(fingerprint(f"hub:{dataset}:test"))
        yield json.dumps(fingerprint("hub:owner/name"))

    before = list(states())
    assert len(set(before)) == 4
    jsonl(dataset / "test.jsonl", ["changed text"])
    assert [a == b for a, b in zip(before, states(), strict=True)] == [False, False, False, True]
