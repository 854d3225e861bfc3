"""Files that are either whole or absent: temporary name, fsync, rename. Knows nothing of what is written."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.free_space import folder_at
from edgespec.core.no_room import write_error
from edgespec.core.texts import check_json, unwritable

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_JSON_DEPTH = 64
FICLONE = 0x40049409  # linux/fs.h: share all blocks of a file
_HELD_UP = (5, 32)  # Windows' numbers of errors for what a program has open
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before it is tried again: a virus scanner is done by then


@contextmanager
def writing(path: Path | str, *, within: bool = False) -> Iterator[None]:
    """Turn a full disk (or a forbidden place) into one clear InputError, which names `path`, or a file `within` it."""
    try:
        yield
    except Exception as error:  # libraries have errors of their own for a full disk
        message = write_error(path, error, within=within)
        if message is None:
            raise
        raise message from error


@contextmanager
def told_as(place: Path, known: Path) -> Iterator[None]:
    """Have refusals name `known`, which the user knows, where they would name `place`, which vanishes with them."""
    try:
        yield
    except EdgespecError as error:
        error.args = (str(error).replace(str(place), str(known)),)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically: after a crash `path` is the old file or the new one, never a part."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Raises InputError for what UTF-8 cannot write, as the name of a folder around ours may be, which nobody typed."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"cannot write {path}: {unwritable(text)}, which UTF-8 cannot write; if it is a folder's or a file's name, rename "
            "it, then run the same command again"
        ) from error
    write_bytes(path, data)


def write_array(stream: BinaryIO, values: Any) -> None:
    """Append the bytes of a NumPy array. Its own `tofile` is silent where the last bytes find no room."""
    stream.write(values.ravel().view("u1").data)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(
    path: Path, *, error: type[EdgespecError] = InputError, limit: int = MAX_JSON_BYTES, strict: bool = False
) -> Any:
    """Parse a JSON file of at most `limit` bytes.

    `strict` is for files from strangers: an object that names a key twice, NaN, Infinity and numbers beyond a float are refused
    (readers differ on what they mean). Raises `error` naming the file, what was seen and what is wanted.
    """
    return parse_json(read_bounded(path, error=error, limit=limit), path, error=error, strict=strict)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises InputError."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}; a JSON object is wanted: fetch it again")
    return value


def read_bounded(path: Path, *, error: type[EdgespecError] = InputError, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Raises `error`, and never waits at a FIFO or a device."""
    with _opened(path, limit, error, "is it the right file?") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise error(f"{path} grew beyond {limit} bytes while it was read; try again")
    return data


@contextmanager
def _opened(
    path: Path, limit: int | None, error: type[EdgespecError] = InputError, step: str = "split it"
) -> Iterator[BinaryIO]:
    """A regular file of at most `limit` bytes, to be read. Raises `error`; `step`: what to do with a larger one."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is {kind_of(status.st_mode)}; a regular file is wanted")
        if limit is not None and status.st_size > limit:
            raise error(f"{path} has {status.st_size} bytes; at most {limit} are read: {step}")
        with open(path, "rb") as stream:
            yield stream
    except FileNotFoundError as seen:
        raise error(f"{path} is missing") from seen
    except (OSError, RuntimeError, ValueError) as seen:
        # RuntimeError: a loop of links; ValueError: odd names
        raise error(f"{path} cannot be read: {seen}") from seen


def parse_json(
    data: bytes | str, where: Path | str, *, error: type[EdgespecError] = InputError, strict: bool = False
) -> Any:
    """JSON nested at most MAX_JSON_DEPTH deep; see `read_json`. Raises `error` naming `where`."""
    try:
        text = data.decode("utf-8" if strict else "utf-8-sig") if isinstance(data, bytes) else data
        value = json.loads(text, **(_STRICT if strict else {}))
        if _is_deeper(value, MAX_JSON_DEPTH):
            raise RecursionError
    except ValueError as seen:
        # so is a number of 5,000 digits, whose words end with advice to Python's programmers
        words = str(seen).partition("; use sys.")[0]
        raise error(f"{where} is not valid JSON: {words}") from seen
    except RecursionError as seen:
        raise error(f"{where} nests deeper than {MAX_JSON_DEPTH} levels; write it flatter") from seen
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has something below so many levels."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if levels == 0:
        return bool(inside)
    return any(_is_deeper(one, levels - 1) for one in inside if isinstance(one, dict | list))


def kind_of(mode: int) -> str:
    """What a path is, in words, from its st_mode."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} is there twice in one object")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:80]} is beyond what a float holds")
    return value


_STRICT: Any = {"object_pairs_hook": _unique, "parse_constant": _no_constant, "parse_float": _finite}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Every line as one object; `limit`: most bytes of the file.

    Raises InputError with the line number: no JSON object, text with half a character.
    """
    rows = []
    with _opened(path, limit) as stream, TextIOWrapper(stream, "utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = parse_json(line, f"{path}:{number}")
                    if not isinstance(row, dict):
                        raise InputError(f"{path}:{number} is not a JSON object")
                    check_json(line, row, f"{path}:{number}")
                    rows.append(row)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: after row {len(rows)} it is not UTF-8: {error}") from error
    return rows


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the body succeeds and vanishes when it fails.

    Raises InputError for a link: what it leads to is not this folder's to take away.
    """
    if path.is_symlink():
        raise InputError(
            f"{path} is a symbolic link, and edgespec writes a folder there; remove the link, "
            "then run the same command again"
        )
    with _temporary(path, partial(shutil.rmtree, ignore_errors=True)) as temporary:
        temporary.mkdir()
        yield temporary
        for file in filter(Path.is_file, temporary.rglob("*")):
            sync_file(file)
        if path.exists():
            shutil.rmtree(path)


@contextmanager
def scratch_beside(path: Path, purpose: str) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which vanishes behind the body. `purpose`: a word of its own, without a dot.

    What killed runs left there for the same path and purpose is taken away first, and nothing else is.
    """
    prefix = f".{path.name}.{purpose}."
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f"{escape(prefix)}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder,
        told_as(Path(folder) / path.name, path),  # what has its name there becomes it
    ):
        yield Path(folder)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling name to write to; it becomes `path` (synced) when the body succeeds, else it vanishes."""
    with _temporary(path, partial(Path.unlink, missing_ok=True)) as temporary:
        yield temporary
        sync_file(temporary)


@contextmanager
def _temporary(path: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    """A sibling name of what becomes `path` behind the body. `remove` takes away what is left there, also by a killed run."""
    # nobody who writes to the folder too can have put a link there
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            process = stale.name.removeprefix(f".{path.name}.").partition(".")[0]
            if process == str(os.getpid()) or not _is_running(process):
                with suppress(OSError):  # another user's: the new one has another name
                    remove(stale)
        try:
            with told_as(temporary, path):
                yield temporary
            put_in_place(temporary, path)
        finally:
            remove(temporary)


def put_in_place(source: Path, place: Path) -> None:
    """os.replace. Windows refuses it while a virus scanner looks at what was just written, so it is tried again there."""
    for pause in _PAUSES:
        try:
            os.replace(source, place)
            return
        except OSError as error:
            if getattr(error, "winerror", None) not in _HELD_UP:
                raise
        time.sleep(pause)
    os.replace(source, place)


def _is_running(process: str) -> bool:
    """Whether a process of this machine has the number `process`: what it writes now is not to be taken away."""
    if sys.platform == "win32" or not process.isdecimal():  # there a file in use cannot be deleted
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def copy_file(source: Path, destination: Path) -> None:
    """A copy with an inode of its own, whole or not at all; where the file system can, it shares the source's blocks.

    No hard link: onnx refuses to read data files that have several.
    """
    with whole_file(destination) as temporary, open(source, "rb") as origin:
        with open(temporary, "wb") as copy:
            shared = _share_blocks(origin.fileno(), copy.fileno())
        if not shared:
            shutil.copyfile(source, temporary)


def shares_blocks(folder: Path) -> bool:
    """Whether copies take no room of their own in a folder that is or will be. Writes two small files to find out."""
    folder = folder_at(folder)
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder) as origin,
            tempfile.NamedTemporaryFile(dir=folder) as copy,
        ):
            origin.write(bytes(65536))
            origin.flush()
            return _share_blocks(origin.fileno(), copy.fileno())
    except OSError:  # not to be written to: another check says so
        return False


def _share_blocks(source: int, destination: int) -> bool:
    """Have an empty file share the blocks of another until one of them is written; False where the file system cannot."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(destination, FICLONE, source)
    except OSError:  # another file system, or one that shares no blocks
        return False
    return True


def sync_file(path: Path) -> None:
    """Have the system write a finished file to the disk before this returns."""
    with open(path, "r+b") as stream:  # Windows syncs only what is open for writing
        os.fsync(stream.fileno())


def sha256_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def compact_json(results: dict[str, Any]) -> str:
    """JSON with a line for each entry of a list and of a mapping at the top: small, and readable in a diff."""
    dump, parts = partial(json.dumps, ensure_ascii=False), []
    for key, value in results.items():
        rows = ",\n".join(map(dump, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(key)}: " + (f"[\n{rows}\n]" if rows else dump(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


# Names that a Windows path cannot have or that open a device there; a bundle made here must unpack everywhere.
FORBIDDEN = frozenset('\\:*?"<>|')
DEVICES = frozenset(
    [
        *("CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"),
        *(f"{port}{digit}" for port in ("COM", "LPT") for digit in "123456789¹²³"),
    ]
)


def path_problem(name: Any) -> str:
    """What is wrong with a stranger's path below a folder, '' where nothing is.

    It must be relative, stay below, be spelt in one way only, and have names that every file system takes.
    """
    if not isinstance(name, str) or not name or len(name) > 1024:
        return f"{str(name)[:80]!r} is no file name"
    plain = PurePosixPath(name)
    if plain.is_absolute() or ".." in plain.parts or plain.parts == () or plain.as_posix() != name:
        return f"the path {name!r} leaves the bundle or is not plain"
    for part in plain.parts:
        odd = FORBIDDEN & set(part) or not part.isprintable() or part.endswith((".", " "))
        if odd or part.split(".")[0].strip().upper() in DEVICES or len(part.encode("utf-8", "replace")) > 200:
            return (
                f"the path {name[:200]!r} leaves the bundle or is not plain: {part[:80]!r} is no name that every file system "
                "takes"
            )
    return ""
