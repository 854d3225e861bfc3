"""Token rows of fixed length: plain text cut into blocks, conversations packed side by side. Knows nothing of models.

Plain text: documents joined by the end-of-sequence token, concatenated, cut into blocks of the context length, no padding
(direct alignment, section 4.1). Conversations are never cut into each other: each keeps its own positions and may attend to
itself only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from edgespec.errors import InputError
from edgespec.files import read_json, write_json, writing
from edgespec.progress import progress
from edgespec.recipe import PYTHON_STDLIB

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
SEPARATOR = "<|endoftext|>"
PADDING = -1  # document id of padding
_TOKENISED_TOGETHER = 64

Row = dict[str, np.ndarray]


class Rows(Dataset[Row]):
    """Row i of every array, under the array's name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)
        self.size = min(len(array) for array in arrays.values())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        return {name: np.asarray(array[index]) for name, array in self.arrays.items()}


class Shuffled(Dataset[Row]):
    """`length` rows of another dataset in a random order of its own for every epoch, from the seed alone."""

    def __init__(self, dataset: Any, length: int, seed: int) -> None:
        self.dataset, self.length, self.seed = dataset, length, seed
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.length:
            raise IndexError(index)
        epoch, place = divmod(index, len(self.dataset))
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset)),
            )
        row: Row = self.dataset[int(self.order[place])]
        return row


def text_files(source: str) -> list[Path]:
    """The files a text source names: one file, a folder of them, or `python-stdlib`. Raises InputError."""
    if source == PYTHON_STDLIB:
        from edgespec_recipes.corpus import stdlib_corpus

        return [stdlib_corpus() / "text.jsonl"]
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
        if not files:
            raise InputError(f"text folder {path} holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.is_file():
        raise InputError(
            f"text {source!r} does not exist; give a .txt or .jsonl file, a folder of such, or {PYTHON_STDLIB}"
        )
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"text file {path} is none of {', '.join(SUFFIXES)}")
    return [path]


def read_documents(source: str) -> Iterator[str]:
    """Every document of a text source: a .txt file is one, or several between <|endoftext|> marks; a .jsonl row is one."""
    for file in text_files(source):
        opener: Any = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rt", encoding="utf-8") as stream:
                if ".jsonl" in file.name:
                    yield from _jsonl_documents(file, stream)
                else:
                    for part in stream.read().split(SEPARATOR):
                        if part.strip():
                            yield part.strip("\n")
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise InputError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _jsonl_documents(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{file}:{number} is no JSON object with a 'text' ({error})") from error
        if not isinstance(text, str):
            raise InputError(f"{file}:{number} has a 'text' that is no string: {text!r}")
        if text.strip():
            yield text


def _fingerprint(source: str, tokenizer: Any) -> dict[str, Any]:
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in text_files(source)]
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {"files": files, "tokenizer": hashlib.sha256(vocabulary).hexdigest()}


def tokenise(documents: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document between its start token (where the tokenizer has one of its own) and its end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            "the target's tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    start = [] if tokenizer.bos_token_id in (None, end) else [tokenizer.bos_token_id]
    batch: list[str] = []

    def encoded() -> Iterator[list[int]]:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"] if batch else []:
            yield [*start, *ids, end]

    for document in documents:
        batch.append(document)
        if len(batch) == _TOKENISED_TOGETHER:
            yield from encoded()
            batch.clear()
    yield from encoded()


def text_blocks(source: str, tokenizer: Any, context: int, folder: Path) -> np.ndarray:
    """[n, context] token ids (uint16 or uint32, mapped from `folder`/tokens.bin, which is written once).

    Raises InputError where the text gives not even one block.
    """
    file, about = folder / "tokens.bin", folder / "tokens.json"
    wanted = _fingerprint(source, tokenizer)
    if not (file.exists() and about.exists() and read_json(about)["source"] == wanted):
        about.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        kind = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        temporary, tokens = file.with_suffix(".tmp"), 0
        total = sum(item[1] for item in wanted["files"])
        compressed = any(path.suffix == ".gz" for path in text_files(source))
        with progress("tokenise text", total=None if compressed else total, unit="B") as bar:  # type: ignore[arg-type]
            with writing(file), open(temporary, "wb") as stream:
                sizes: list[int] = []

                def counted() -> Iterator[str]:
                    for document in read_documents(source):
                        sizes.append(len(document.encode()))
                        yield document

                for ids in tokenise(counted(), tokenizer):
                    np.asarray(ids, kind).tofile(stream)
                    tokens += len(ids)
                    bar.update(sum(sizes))
                    sizes.clear()
            temporary.replace(file)
        write_json(about, {"tokens": tokens, "dtype": np.dtype(kind).name, "source": wanted})
    stored = read_json(about)
    if stored["tokens"] < context:
        raise InputError(
            f"the text {source!r} has {stored['tokens']} tokens; at least one block of {context} is needed"
        )
    flat = np.memmap(file, dtype=stored["dtype"], mode="r", shape=(stored["tokens"],))
    blocks = stored["tokens"] // context
    return flat[: blocks * context].reshape(blocks, context)


def pack_conversations(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], context: int, padding_id: int = 0
) -> dict[str, np.ndarray]:
    """Whole conversations (prompt_ids, response_ids) side by side in rows of `context` tokens, best fit, longest first.

    Returns arrays [n, context]: input_ids (int64), position_ids (int64, from 0 in each conversation), document_ids (int32,
    from 0 in each row, PADDING beyond), loss_mask (bool, True on response tokens: the tokens to be predicted). A conversation
    longer than `context` loses its end; one whose prompt alone fills the row is left out.
    """
    usable = [(list(p), list(r)[: context - len(p)]) for p, r in rows if len(p) < context and len(r)]
    if not usable:
        raise InputError(
            f"no conversation has a response within the context of {context} tokens; raise the context"
        )
    usable.sort(key=lambda item: -(len(item[0]) + len(item[1])))  # stable: equal lengths keep their order
    free: list[list[int]] = [[] for _ in range(context + 1)]  # free[k]: rows with k tokens left
    bins: list[list[tuple[list[int], list[int]]]] = []
    for prompt, response in usable:
        size = len(prompt) + len(response)
        room = next((k for k in range(size, context + 1) if free[k]), None)
        if room is None:
            bins.append([])
            index, room = len(bins) - 1, context
        else:
            index = free[room].pop()
        bins[index].append((prompt, response))
        free[room - size].append(index)
    packed: dict[str, np.ndarray] = {
        "input_ids": np.full((len(bins), context), padding_id, np.int64),
        "position_ids": np.zeros((len(bins), context), np.int64),
        "document_ids": np.full((len(bins), context), PADDING, np.int32),
        "loss_mask": np.zeros((len(bins), context), bool),
    }
    for row, members in enumerate(bins):
        at = 0
        for document, (prompt, response) in enumerate(members):
            end = at + len(prompt) + len(response)
            packed["input_ids"][row, at:end] = prompt + response
            packed["position_ids"][row, at:end] = np.arange(end - at)
            packed["document_ids"][row, at:end] = document
            packed["loss_mask"][row, at + len(prompt) : end] = True
            at = end
    return packed


def attention_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] document ids -> bool [B, 1, T, T], True where query i may look at key j: same document, j <= i.

    Padding looks at padding, so that no row of the softmax is empty.
    """
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]
