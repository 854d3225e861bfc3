"""Token rows: text cut into blocks, conversations packed side by side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_recipes.data import token_rows as data
from edgespec_recipes.data import token_shards
from edgespec_recipes.models.loading import load_tokenizer
from repository import PYTHONPATH
from tiny_models import make_model_folder
from torchrun import two_processes

from edgespec.core.errors import InputError
from edgespec.core.files import write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def write_texts(path: Path, count: int) -> str:
    rows = [
        {"text": f"document {number} says hello world " + "again " * (number % 7)} for number in range(count)
    ]
    write_jsonl(path, rows)
    return str(path)


def tokens_of(blocks: data.TextBlocks) -> list[int]:
    return [int(token) for row in range(len(blocks)) for token in blocks[row]]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of so few tokens that blocks straddle them."""
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", 250)


@pytest.mark.parametrize("size", [250, token_shards.SHARD_TOKENS])
def test_blocks_hold_the_documents_joined_by_the_end_token(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", size)
    tokenizer, source = load_tokenizer(folder), write_texts(tmp_path / "t.jsonl", 150)
    blocks = data.text_blocks(source, tokenizer, 16, tmp_path / "cache")
    texts = [json.loads(line)["text"] for line in Path(source).read_text().splitlines()]
    expected = [i for text in texts for i in [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]]
    assert tokens_of(blocks) == expected[: len(expected) // 16 * 16]
    assert blocks[0].dtype == np.uint16
    assert (len(blocks), 16) == blocks.shape
    assert blocks.size == len(tokens_of(blocks))
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    rows = data.Rows({"input_ids": blocks, "row_id": np.arange(len(blocks))})
    assert rows[3]["input_ids"].tolist() == expected[48:64]


@pytest.mark.usefixtures("small_shards")
def test_tokens_are_made_once_and_again_for_another_text(folder: Path, tmp_path: Path) -> None:
    tokenizer, source = load_tokenizer(folder), write_texts(tmp_path / "t.jsonl", 150)
    cache = tmp_path / "cache"
    blocks = data.text_blocks(source, tokenizer, 16, cache)
    before = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert len(before) > 5
    data.text_blocks(source, tokenizer, 32, cache)
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == before
    Path(source).write_text(json.dumps({"text": "other text " * 20}) + "\n")
    assert len(data.text_blocks(source, tokenizer, 16, cache)) < len(blocks)
    assert list(files(cache)) == ["tokens-00000.bin", "tokens.json"]


@pytest.mark.usefixtures("small_shards")
def test_a_text_is_tokenised_as_far_as_it_is_wanted(folder: Path, tmp_path: Path) -> None:
    tokenizer, source = load_tokenizer(folder), write_texts(tmp_path / "t.jsonl", 150)
    whole = tokens_of(data.text_blocks(source, tokenizer, 10, tmp_path / "whole"))
    for tokens in (95, 250, 600, 1130, 400):  # within a shard, a whole one, over several, back
        blocks = data.text_blocks(source, tokenizer, 10, tmp_path / "cache", tokens=tokens)
        assert tokens_of(blocks) == whole[: tokens // 10 * 10]
    assert sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.bin")) == 2 * 1130
    assert tokens_of(data.text_blocks(source, tokenizer, 10, tmp_path / "cache", tokens=10**9)) == whole
    assert files(tmp_path / "cache") == files(tmp_path / "whole")
    with open(source, "a") as stream:
        stream.write("what is no JSON, at the end of a long text")
    data.text_blocks(source, tokenizer, 10, tmp_path / "other", tokens=100)
    with pytest.raises(InputError, match=r"t.jsonl:151 is not valid JSON"):
        data.text_blocks(source, tokenizer, 10, tmp_path / "other")


def test_long_documents_are_not_read_ahead(folder: Path) -> None:
    read: list[int] = []

    def documents() -> Iterator[str]:
        for number in range(20):
            read.append(number)
            yield "word " * 60_000

    ids = list(islice(data.tokenise(documents(), load_tokenizer(folder)), 2))
    assert ids[0] == ids[1]
    assert ids[0][0] == 0
    assert ids[0][-1] == 2
    assert len(read) == 4  # a million characters, not 64 documents


def _cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut_off, "has 493 bytes and had 500"),
        (_flip, "has the sha256"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_shard_is_named_and_only_it_is_made_again(
    folder: Path, tmp_path: Path, harm: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, source = load_tokenizer(folder), write_texts(tmp_path / "t.jsonl", 150)
    cache = tmp_path / "cache"
    data.text_blocks(source, tokenizer, 16, cache)
    before, times = files(cache), {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    harm(cache / "tokens-00002.bin")
    data.text_blocks(source, tokenizer, 16, cache, tokens=500)  # it needs the first two only
    assert not caplog.text
    data.text_blocks(source, tokenizer, 16, cache)
    assert f"tokens-00002.bin {words}" in caplog.text
    assert files(cache) == before
    after = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert [name for name in times if times[name] != after[name]] == ["tokens-00002.bin"]


@pytest.mark.usefixtures("small_shards")
def test_where_a_shard_comes_out_otherwise_those_after_it_follow(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, source = load_tokenizer(folder), write_texts(tmp_path / "t.jsonl", 150)
    cache = tmp_path / "cache"
    data.text_blocks(source, tokenizer, 16, cache)
    before, state = files(cache), json.loads((cache / "tokens.json").read_text())
    state["shards"][2]["sha256"] = "0" * 64  # as if the text had been another when it was written
    (cache / "tokens.json").write_text(json.dumps(state))
    (cache / "tokens-00003.bin").write_bytes(b"of that other text")
    data.text_blocks(source, tokenizer, 16, cache)
    assert files(cache) == before
    assert caplog.text.count("made again") == 1
    (cache / "tokens.json").write_text("{")
    data.text_blocks(source, tokenizer, 16, cache)
    assert files(cache) == before
    assert "tokens.json is not valid JSON" in caplog.text


PROGRAM = """
import sys, time
from pathlib import Path
from edgespec_recipes.data import token_rows as data
from edgespec_recipes.parallel import processes
from edgespec_recipes.data import token_shards
from edgespec_recipes.models.loading import load_tokenizer
token_shards.SHARD_TOKENS = 250
plain = token_shards.write_json
def waits(path, value):  # behind that many shards, to be killed
    plain(path, value)
    if len(value["shards"]) == int(sys.argv[4]):
        time.sleep(600)
token_shards.write_json = waits
blocks = data.text_blocks(sys.argv[1], load_tokenizer(Path(sys.argv[2])), 16, Path(sys.argv[3]))
found = f"{len(blocks)} rows of {sum(int(blocks[row].sum()) for row in range(len(blocks)))}"
Path(sys.argv[3] + f"-{processes.rank()}.txt").write_text(found)
"""


@pytest.mark.training
@pytest.mark.usefixtures("small_shards")
def test_a_killed_run_goes_on_at_the_last_whole_shard(folder: Path, tmp_path: Path) -> None:
    source, cache = write_texts(tmp_path / "t.jsonl", 150), tmp_path / "cache"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = [source, str(folder), str(cache)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, str(program), *given, "3"], env=environment)
    try:
        while run.poll() is None and not (cache / "tokens-00002.bin").exists():
            time.sleep(0.005)
        assert run.poll() is None
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    first = (cache / "tokens-00001.bin").stat().st_mtime_ns
    done = len(json.loads((cache / "tokens.json").read_text())["shards"])
    assert 2 <= done <= 3
    # two processes go on: one writes, both read the same
    two_processes(program, *given, "0")
    seen = [(tmp_path / f"cache-{rank}.txt").read_text() for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert (cache / "tokens-00001.bin").stat().st_mtime_ns == first
    data.text_blocks(source, load_tokenizer(folder), 16, tmp_path / "whole")
    assert files(cache) == files(tmp_path / "whole")


def test_too_little_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("just one line\n")
    with pytest.raises(
        InputError, match=r"t.txt' has \d+ tokens; at least one block of 512 is needed: give more text"
    ):
        data.text_blocks(str(tmp_path / "t.txt"), load_tokenizer(folder), 512, tmp_path / "cache")


def test_a_dataset_folder_of_the_hub_kind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_texts(tmp_path / "set" / "train.jsonl", 40)
    tokenizer = load_tokenizer(folder)
    streamed = data.text_blocks(f"hub:{tmp_path / 'set'}", tokenizer, 16, tmp_path / "streamed", tokens=320)
    plain = data.text_blocks(str(tmp_path / "set"), tokenizer, 16, tmp_path / "plain", tokens=320)
    assert tokens_of(streamed) == tokens_of(plain)
    assert len(plain) == 20


def test_packed_conversations_stay_whole_and_apart() -> None:
    generator = np.random.default_rng(0)
    lengths = [(int(generator.integers(3, 12)), int(generator.integers(1, 15))) for _ in range(60)]
    conversations = [([n + 1] * p, [n + 101] * r) for n, (p, r) in enumerate(lengths)]
    packed = data.pack_conversations(conversations, 32, padding_id=0)
    assert all(array.shape == packed["input_ids"].shape for array in packed.values())
    seen = {}
    for ids, positions, documents, mask in zip(*(packed[name] for name in packed), strict=True):
        for document in range(documents.max() + 1):
            here = documents == document
            assert positions[here].tolist() == list(range(here.sum()))
            seen[int(ids[here][0])] = (int((~mask[here]).sum()), int(mask[here].sum()))
            assert set(ids[here & mask] - 100) == set(ids[here & ~mask])
        assert not mask[documents == data.PADDING].any()
    assert seen == {n + 1: length for n, length in enumerate(lengths)}
    assert (packed["document_ids"] == data.PADDING).mean() < 0.1


def test_long_conversations_are_cut_and_longer_prompts_left_out() -> None:
    packed = data.pack_conversations([([1] * 6, [2] * 10), ([3] * 8, [4])], 8)
    assert packed["input_ids"].tolist() == [[1] * 6 + [2] * 2]
    with pytest.raises(InputError, match="raise the context"):
        data.pack_conversations([([3] * 8, [4])], 8)
