"""What a stage read, so that it runs again when that changed: `inputs.json` in its folder, written before the stage begins.

Files are known by content: SHA-256 of all their bytes, computed once and again only where size or time of change differ from the
record. (A sample of the bytes would be cheaper and would miss one changed tensor or row; every stage reads the whole file anyway,
at a fraction of the speed of hashing it.) Other stages are known by their run id, which a stage gets when it begins from nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import put_in_place, read_json, sha256_file, write_json
from edgespec.core.progress import MIB, reading
from edgespec.stages.stage import STAGE_FILE

RECORD = "inputs.json"
BEFORE_RECORDS = "before records"  # run id of a stage that is older than the records
SHOWN = 3  # changes that a message names
_TOGETHER = 4  # shards hashed at once

_known: dict[tuple[str, int, int], str] = {}  # (path, bytes, time of change) -> SHA-256


@dataclass(frozen=True)
class Source:
    """Files that are read for one purpose. `root`: the file or folder that was given; where it is gone, nothing is compared."""

    root: Path
    files: tuple[Path, ...]

    def names(self) -> dict[str, Path]:
        return {
            file.name if file == self.root else file.relative_to(self.root).as_posix(): file
            for file in self.files
        }


@dataclass(frozen=True)
class Reads:
    """What a stage reads.

    files: by purpose (a knob's name). stages: folders of other stages by name. revisions: what tells the present revision of a
    hub dataset (None: it cannot be had), by source; a finished stage keeps the revision that it has read.
    """

    files: Mapping[str, Source] = field(default_factory=dict)
    stages: Mapping[str, Path] = field(default_factory=dict)
    revisions: Mapping[str, Callable[[], str | None]] = field(default_factory=dict)

    def __or__(self, other: Reads) -> Reads:
        return Reads(
            {**self.files, **other.files},
            {**self.stages, **other.stages},
            {**self.revisions, **other.revisions},
        )


def clear_if_inputs_changed(result: Path, reads: Reads, record: Path | None = None) -> str:
    """Bring a record up to date before its stage runs. Returns why the stage must run again, '' where it need not.

    `result`: the stage's folder, or a file that is its whole result (then `record` says where the record lies). Where the inputs
    changed, a result is removed, whole or half done, in one step: nothing old is mixed with the new. A result without a record
    is older than the records: it counts as made from what is there now, unless a stage that it reads has run since.
    """
    place = record or result / RECORD
    seen = _read(place)
    for stale in result.parent.glob(f".{escape(result.name)}.*.stale"):  # left by a killed run
        shutil.rmtree(stale, ignore_errors=True)
    begun = result.is_file() or (result.is_dir() and any(result.iterdir()))
    finished = result.is_file() or (result / STAGE_FILE).exists()
    now = _present(reads, seen or {}, finished)
    if seen is None:
        newer = [stage for stage, its_name in now["stages"].items() if its_name != BEFORE_RECORDS]
        reason = f"{newer[0]} ran again" if begun and newer else ""
        name = BEFORE_RECORDS if begun and not newer else secrets.token_hex(8)
    else:
        reason, name = _difference(seen, now), seen["made"]
    if reason:
        _remove(result)
        name, now = secrets.token_hex(8), _present(reads, {}, False)
    wanted = {"made": name, **now}
    if wanted != seen:
        write_json(place, wanted)
    return reason


def run_id(folder: Path) -> str:
    """The run id of a stage: another one means that the stage began anew."""
    seen = _read(folder / RECORD)
    return BEFORE_RECORDS if seen is None else str(seen["made"])


def sha256_of(files: list[Path]) -> dict[Path, str]:
    """SHA-256 of every file; computed once for a path, size and time of change. A bar shows how far it is where it takes long."""
    keys = {file: _key(file) for file in files}
    left = [file for file, key in keys.items() if key not in _known]
    with (
        ThreadPoolExecutor(_TOGETHER) as pool,
        reading("hash what the stage reads", sum(keys[file][1] for file in left)) as bar,
    ):
        for file, digest in zip(left, pool.map(_sha256, left), strict=True):
            _known[keys[file]] = digest
            bar.update(keys[file][1] / MIB)
    return {file: _known[key] for file, key in keys.items()}


def _key(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return (str(file.absolute()), status.st_size, status.st_mtime_ns)


def _sha256(file: Path) -> str:
    try:
        return sha256_file(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def _read(record: Path) -> dict[str, Any] | None:
    """The record, None where there is none or it is damaged."""
    try:
        seen = read_json(record)
        known = isinstance(seen, dict) and isinstance(seen["made"], str)
        return seen if known and all(isinstance(seen[key], dict) for key in _PARTS) else None
    except (InputError, KeyError):
        return None


_PARTS = ("files", "stages", "revisions")


def _present(reads: Reads, seen: Mapping[str, Any], finished: bool) -> dict[str, Any]:
    """The record's parts as they are now; of what is gone, and of hub datasets of a finished stage, what the record has."""
    before = {part: seen.get(part, {}) for part in _PARTS}
    files = {
        purpose: _files(source, before["files"].get(purpose, {})) for purpose, source in reads.files.items()
    }
    revisions = {
        source: before["revisions"].get(source) if finished else ask() or before["revisions"].get(source)
        for source, ask in reads.revisions.items()
    }
    return {
        "files": files,
        "stages": {name: run_id(folder) for name, folder in reads.stages.items()},
        "revisions": revisions,
    }


def _files(source: Source, before: dict[str, Any]) -> dict[str, Any]:
    if not source.root.exists():
        return before
    for name, file in source.names().items():
        if isinstance(entry := before.get(name), dict):
            path, size, changed = _key(file)
            if (entry.get("bytes"), entry.get("mtime_ns")) == (size, changed):
                _known.setdefault((path, size, changed), str(entry.get("sha256")))
    hashes = sha256_of(list(source.files))
    return {
        name: {"bytes": _key(file)[1], "mtime_ns": _key(file)[2], "sha256": hashes[file]}
        for name, file in source.names().items()
    }


def _difference(seen: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What changed between two records, in words; what only one of them knows of (an older edgespec's) is no change."""
    found = []
    for purpose, files in now["files"].items():
        before = seen["files"].get(purpose)
        if before is None or not files:
            continue
        found += [f"{purpose}: {name} is new" for name in files if name not in before]
        found += [f"{purpose}: {name} is gone" for name in before if name not in files]
        for name in files:
            old, new = before.get(name), files[name]
            if old and old["sha256"] != new["sha256"]:
                found.append(f"{name} changed ({old['bytes']:,} -> {new['bytes']:,} bytes)")
    for source, revision in now["revisions"].items():
        before = seen["revisions"].get(source)
        if before and revision and before != revision:
            found.append(f"{source} changed (revision {before[:8]} -> {revision[:8]})")
    for name, made_now in now["stages"].items():
        before = seen["stages"].get(name)
        if before is not None and before != made_now:
            found.append(f"{name} ran again")
    found = list(dict.fromkeys(found))  # one file may be read for two purposes
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _remove(result: Path) -> None:
    """Take a result away in one step; deleting the files of a folder may take longer, and may be cut short."""
    if not result.is_dir():
        result.unlink(missing_ok=True)
        return
    aside = result.with_name(f".{result.name}.{os.getpid()}.stale")
    try:
        put_in_place(result, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:  # in a container no folder of the image can be moved
            raise
        _delete(result)
    shutil.rmtree(aside, ignore_errors=True)


def _delete(stage: Path) -> None:
    """Delete a stage's folder where it is. Cut short, it is neither done nor without the record that has it deleted."""
    order = {STAGE_FILE: 0, RECORD: 2}
    for path in sorted(stage.iterdir(), key=lambda path: order.get(path.name, 1)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    stage.rmdir()
