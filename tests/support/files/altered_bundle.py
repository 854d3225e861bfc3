"""Real bundles in which one thing is made to harm, with a manifest that is honest about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from tokenizers import Tokenizer

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json, sha256_file, write_json

OPTIONS = LoadOptions(threads=1)
LLAMACPP = LoadOptions(engine="llama.cpp", threads=1)
ONNX = "target/onnx-fp32"
HELLO = [{"role": "user", "content": "Hello"}]


def settle(folder: Path, *names: str) -> None:
    """Make the manifest honest about files that were changed or added."""
    value = read_json(folder / "manifest.json")
    for name in names:
        file = folder / name
        value["files"][name] = {"sha256": sha256_file(file), "bytes": file.stat().st_size}
    write_json(folder / "manifest.json", value)


def change(folder: Path, name: str, data: bytes | str) -> None:
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    settle(folder, name)


def change_manifest(folder: Path, alter: Callable[[dict[str, Any]], Any]) -> None:
    value = read_json(folder / "manifest.json")
    alter(value)
    write_json(folder / "manifest.json", value)


def with_tokenizer(bundle: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    """A copy of a bundle with another tokenizer."""
    shutil.copytree(bundle, folder)
    change(folder, "tokenizer/tokenizer.json", tokenizer.to_str())
    return folder


def refused(folder: Path, words: str, options: LoadOptions = OPTIONS) -> None:
    with pytest.raises(BundleError, match=words):
        open_pair(folder, options)


def secret(copy: Path) -> Path:
    folder = copy.parent / "outside"
    folder.mkdir(exist_ok=True)
    (folder / "secret").write_text("secret\n")
    return folder
