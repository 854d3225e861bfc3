"""Token rows: text cut into blocks, conversations packed side by side."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_recipes import data
from edgespec_recipes.loading import load_tokenizer
from tiny_models import make_model_folder

from edgespec.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_documents_of_files_folders_and_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo<|endoftext|>\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps({"text": "three"}) + "\n\n" + json.dumps({"text": " "}) + "\n")
    (tmp_path / "c.md").write_text("not text of ours")
    assert list(data.read_documents(str(tmp_path))) == ["one", "two", "three"]
    assert list(data.read_documents(str(tmp_path / "a.txt"))) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist; give a .txt"),
        ("a.csv", b"1,2", "none of .txt"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as UTF-8"),
        ("a.txt.gz", b"plain", "cannot be read as UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', r"a.jsonl:2 is no JSON object with a 'text'"),
        ("a.jsonl", b'{"text": 7}\n', r"a.jsonl:1 has a 'text' that is no string"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(data.read_documents(str(tmp_path / name)))


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no .txt"):
        data.text_files(str(tmp_path))


def test_blocks_hold_the_documents_joined_by_the_end_token(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    texts = [f"document {number} says hello world" for number in range(150)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    blocks = data.text_blocks(str(tmp_path / "t.jsonl"), tokenizer, 16, tmp_path / "cache")
    assert blocks.dtype == np.uint16
    expected = [i for text in texts for i in [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]]
    assert blocks.flatten().tolist() == expected[: len(expected) // 16 * 16]
    before = (tmp_path / "cache" / "tokens.bin").stat().st_mtime_ns
    data.text_blocks(str(tmp_path / "t.jsonl"), tokenizer, 32, tmp_path / "cache")
    assert (tmp_path / "cache" / "tokens.bin").stat().st_mtime_ns == before
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "other text " * 40}) + "\n")
    assert len(data.text_blocks(str(tmp_path / "t.jsonl"), tokenizer, 16, tmp_path / "cache")) < len(blocks)


def test_too_little_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    with pytest.raises(InputError, match="tokens; at least one block of 512"):
        data.text_blocks(str(tmp_path / "t.txt"), load_tokenizer(folder), 512, tmp_path / "cache")


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


def test_attention_mask_is_causal_within_documents() -> None:
    mask = data.attention_mask(torch.tensor([[0, 0, 1, 1, data.PADDING]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
