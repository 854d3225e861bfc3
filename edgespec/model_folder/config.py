"""A model folder's settings as every stage reads them. Knows no model classes.

Special token ids beyond the vocabulary count as absent: padding is never read, and no model writes such a token. The weights have
the type that their files hold, whatever config.json says.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.core.files import read_json, read_object, write_json, writing
from edgespec.model_folder.weights_files import stored_type

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TYPE_NAMES = ("dtype", "torch_dtype")  # of transformers 5, and of 4


def read_config(folder: Path) -> dict[str, Any]:
    """config.json without the special token ids that are beyond its vocabulary. Raises InputError where it is no JSON object."""
    config = read_object(folder / CONFIG)
    return config | known_ids(config, config.get("vocab_size"))


def corrected_ids(folder: Path) -> dict[str, Any]:
    """What `read_config` changes: keyword arguments for transformers' from_pretrained, which reads config.json by itself."""
    config = read_object(folder / CONFIG)
    return known_ids(config, config.get("vocab_size"))


def read_generation_config(folder: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """generation_config.json the same way; {} where there is none. `vocab_size`: that of config.json unless given."""
    file = folder / GENERATION
    if not file.is_file():
        return {}
    settings = read_object(file)
    return settings | known_ids(settings, vocab_size or read_object(folder / CONFIG).get("vocab_size"))


def stop_ids(folder: Path, eos: int | None) -> list[int]:
    """Ids that end a model's reply, in order: those of its generation config, else of its config; and its tokenizer's `eos`."""
    ids = read_generation_config(folder).get("eos_token_id")
    if ids is None:
        ids = read_config(folder).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return sorted({token for token in (*listed, eos) if token is not None})


def known_ids(settings: Mapping[str, Any], vocab_size: Any) -> dict[str, Any]:
    """The special token ids of settings that name tokens beyond the vocabulary, without these: a shorter list, or None."""
    changed: dict[str, Any] = {}
    for name in TOKEN_IDS:
        value = settings.get(name)
        if value is None or not isinstance(vocab_size, int):
            continue
        listed = value if isinstance(value, list) else [value]
        known = [token for token in listed if type(token) is int and 0 <= token < vocab_size]
        if known != listed:
            changed[name] = (known or None) if isinstance(value, list) else None
    return changed


@contextmanager
def corrected_folder(folder: Path) -> Iterator[Path]:
    """The folder for a program that reads config.json by itself; where it would read wrong settings, a temporary one of links.

    The links lead to the folder's files; config.json and generation_config.json are written anew, with the ids of `read_config`
    and the type of the stored weights.
    """
    config = read_config(folder)
    stored = stored_type(folder)
    if stored is not None:
        config |= dict.fromkeys(_TYPE_NAMES, stored)
    written: dict[str, dict[str, Any]] = {CONFIG: config, GENERATION: read_generation_config(folder)}
    written = {name: value for name, value in written.items() if _differs(folder / name, value)}
    if not written:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="edgespec-", ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / folder.resolve().name
        copy.mkdir()
        for file in folder.iterdir():
            if file.is_file() and file.name not in written:
                _refer(file.resolve(), copy / file.name)
        for name, value in written.items():
            write_json(copy / name, value)
        yield copy


def _differs(file: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether a file says otherwise. One of the names of the type is enough."""
    seen = read_json(file) if file.is_file() else {}
    types = {seen[name] for name in _TYPE_NAMES if seen.get(name)}
    if "dtype" in wanted and types != {wanted["dtype"]}:
        return True
    return any(seen.get(name) != value for name, value in wanted.items() if name not in _TYPE_NAMES)


def _refer(file: Path, place: Path) -> None:
    """A link to a file; a copy where the system gives none."""
    for link in (os.symlink, os.link):
        try:
            link(file, place)
        except OSError:  # Windows asks for a right to make symbolic links
            continue
        return
    with writing(place):  # on the disk of temporary files, and no other
        shutil.copyfile(file, place)
