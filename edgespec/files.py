"""Files that are either whole or absent: temporary name, fsync, rename. Knows nothing of what is written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import InputError

MAX_JSON_BYTES = 64 * 1024 * 1024

_NO_ROOM = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the size limit",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
}


def write_error(path: Path | str, error: OSError) -> InputError | None:
    """The message for an OSError met while writing, or None where the error is not about the place written to."""
    reason = _NO_ROOM.get(error.errno or 0)
    if reason is None:
        return None
    folder = Path(path)
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**20
    return InputError(
        f"cannot write {path}: {reason} ({free:.0f} MiB free in {folder}); "
        "make room or choose another folder, then run the same command again"
    )


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn a full disk (or a forbidden place) into one clear InputError."""
    try:
        yield
    except OSError as error:
        message = write_error(path, error)
        if message is None:
            raise
        raise message from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically: after a crash `path` is the old file or the new one, never a part."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file of bounded size. Raises InputError that names the file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise InputError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read as JSON")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every line as one object. Raises InputError with the line number."""
    rows = []
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise InputError(f"{path}:{number} is not a JSON object")
                    rows.append(row)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}:{len(rows) + 1} is not valid JSON: {error}") from error
    return rows


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the body succeeds and vanishes when it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed run
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in filter(Path.is_file, temporary.rglob("*")):
                _sync(file)
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling name to write to; it becomes `path` (synced) when the body succeeds, else it vanishes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed run
            stale.unlink(missing_ok=True)
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def sha256_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
