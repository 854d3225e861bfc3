"""Whole or absent: atomic writes, and what a full disk looks like to the user."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_files import files_of_at_most

from edgespec.core import files
from edgespec.core.errors import InputError, NoRoom
from edgespec.core.files import (
    FICLONE,
    copy_file,
    put_in_place,
    read_json,
    read_jsonl,
    scratch_beside,
    sha256_file,
    shares_blocks,
    whole_file,
    whole_folder,
    write_array,
    write_bytes,
    write_json,
    writing,
)

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from pathlib import Path
from edgespec.core.errors import InputError
from edgespec.core.files import write_bytes
try:
    write_bytes(Path(sys.argv[1]), b"x" * 5000)
except InputError as error:
    print(error)
    sys.exit(2)
"""


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    write_bytes(file, b"old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(file)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "data.bin" in done.stdout
    assert "MiB free" in done.stdout
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["data.bin"]


def test_a_full_device_is_one_clear_message() -> None:
    with (
        pytest.raises(InputError, match="no space left on the disk"),
        writing("/dev/full"),
        open("/dev/full", "wb") as stream,
    ):
        stream.write(b"x" * 100_000)


def test_an_arrays_last_bytes_that_find_no_room_are_missed(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="File too large"),
        files_of_at_most(1000),
        open(tmp_path / "file", "wb") as stream,
    ):
        write_array(stream, np.zeros(1001, np.uint8))


def test_an_arrays_bytes_are_those_of_its_rows(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (values, values.T, values[:, ::2], values[1:1], np.array(3, np.int16)):
        with open(tmp_path / "file", "wb") as stream:
            write_array(stream, array)
        assert (tmp_path / "file").read_bytes() == array.tobytes()


def test_whole_folder_is_all_or_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_folder(tmp_path / "out") as place:
            (place / "part").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "out") as place:
        (place / "part").write_text("whole")
    assert (tmp_path / "out" / "part").read_text() == "whole"


def test_what_a_virus_scanner_holds_up_is_put_in_place_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, tries, pauses = os.replace, list[Path](), list[float]()
    source, place = tmp_path / "source", tmp_path / "place"
    source.touch()

    def refused(given: Path, *to: Path) -> None:
        tries.append(given)
        if len(tries) < 3:
            error = PermissionError(errno.EACCES, "Access is denied")
            if is_windows:
                error.winerror = 5
            raise error
        replace(given, *to)

    monkeypatch.setattr(files.os, "replace", refused)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    is_windows = False
    with pytest.raises(PermissionError):
        put_in_place(source, place)
    assert (len(tries), pauses) == (1, [])
    is_windows = True
    tries.clear()
    put_in_place(source, place)
    assert place.exists()
    assert (len(tries), len(pauses)) == (3, 2)


def test_a_refusal_names_the_place_that_the_user_knows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError) as seen, whole_folder(out) as folder, whole_file(folder / "a") as file:
        raise InputError(f"{file} has rows of 7, and {folder / 'b'} of 8")
    assert str(seen.value) == f"{out / 'a'} has rows of 7, and {out / 'b'} of 8"
    with (
        pytest.raises(NoRoom, match=rf"^cannot write {out / 'a'}: no space left"),
        whole_folder(out) as folder,
        whole_file(folder / "a"),
    ):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(InputError) as seen, scratch_beside(out, "trial") as scratch:
        raise InputError(f"{scratch / 'out' / 'a'} has rows of 7")
    assert str(seen.value) == f"{out / 'a'} has rows of 7"


def test_a_link_stands_in_the_way_of_a_whole_folder(tmp_path: Path) -> None:
    """It is said before hours of work, and what the link leads to stays."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="out is a symbolic link"), whole_folder(tmp_path / "out"):
        pytest.fail("the body ran")
    assert (tmp_path / "out" / "letter").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_what_a_killed_run_left_is_swept_and_what_another_writes_is_not(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    theirs, left, part = (
        tmp_path / f".chat.json.{end}.tmp" for end in (os.getppid(), 99999999, "99999999.f16")
    )
    for path in (theirs, left, part):
        path.touch()
    write_bytes(file, b"mine")
    assert sorted(tmp_path.iterdir()) == sorted([file, theirs])


def test_what_cannot_be_swept_is_in_nobodys_way(tmp_path: Path) -> None:
    """As the part of another user's file in a shared folder that lets everybody remove only what is his."""
    left = tmp_path / ".chat.json.99999999.tmp"
    left.mkdir()
    write_bytes(tmp_path / "chat.json", b"mine")
    assert (tmp_path / "chat.json").read_bytes() == b"mine"
    assert sorted(tmp_path.iterdir()) == [left, tmp_path / "chat.json"]


def test_a_name_with_brackets_is_swept_too(tmp_path: Path) -> None:
    for name in (".out[1].99999999.tmp", ".out[1].slices.x1"):
        (tmp_path / name).mkdir()
    with scratch_beside(tmp_path / "out[1]", "slices"), whole_folder(tmp_path / "out[1]"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]


def test_nobody_can_put_a_link_where_a_file_will_be_written(tmp_path: Path) -> None:
    """Who shares the folder and knew the name would choose which of our files is overwritten."""
    names = set()
    for _ in range(2):
        with whole_file(tmp_path / "a.json") as temporary:
            temporary.touch()
            names.add(temporary.name)
    assert len(names) == 2


def test_a_scratch_folder_vanishes_with_what_killed_runs_left(tmp_path: Path) -> None:
    """Other purposes and the temporary names of whole folders are other processes' own."""
    others = [".out.float.x1", ".out.99999999.tmp", ".out2.slices.x1", "out"]
    for name in (*others, ".out.slices.x1", ".out.slices.x2"):
        (tmp_path / name / "part").mkdir(parents=True)
    with scratch_beside(tmp_path / "out", "slices") as scratch:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, scratch.name])
        with whole_folder(tmp_path / "out"):
            assert list(scratch.iterdir()) == []
    assert not scratch.exists()
    with scratch_beside(tmp_path / "new" / "out", "slices") as scratch:
        assert scratch.is_dir()
    assert list((tmp_path / "new").iterdir()) == []


def test_json_errors_name_file_and_line(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": 1})
    assert read_json(tmp_path / "a.json") == {"é": 1}
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(InputError, match=r"b\.jsonl:2"):
        read_jsonl(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="is missing"):
        read_json(tmp_path / "none.json")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a").startswith("ba7816bf")


def test_a_copy_is_a_file_of_its_own(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "there" / "copy"
    source.write_bytes(b"x" * 100_000)
    copy_file(source, copy)
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_nlink == source.stat().st_nlink == 1
    copy.write_bytes(b"other")
    assert source.read_bytes() == b"x" * 100_000
    (tmp_path / "link").symlink_to(source)
    copy_file(tmp_path / "link", copy)  # as in the hub's cache
    assert not copy.is_symlink()
    assert copy.read_bytes() == source.read_bytes()


def test_a_copy_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"x" * 100_000)
    monkeypatch.setattr(files, "_share_blocks", lambda *_: False)
    with files_of_at_most(50), pytest.raises(NoRoom):
        copy_file(source, copy)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.skipif(sys.platform != "linux", reason="FICLONE is Linux's")
def test_blocks_are_shared_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked with the right numbers; here it may well say no."""
    asked = []

    def clone(destination: int, request: int, source: int) -> int:
        asked.append(request)
        os.sendfile(destination, source, 0, os.fstat(source).st_size)
        return 0

    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    truth = shares_blocks(tmp_path / "not" / "there" / "yet")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr(fcntl, "ioctl", clone)
    copy_file(source, tmp_path / "copy")
    assert asked == [FICLONE]
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert shares_blocks(tmp_path)
    monkeypatch.undo()
    assert shares_blocks(tmp_path) == truth


def test_a_folders_name_that_utf8_cannot_write_is_one_line(tmp_path: Path) -> None:
    """Of the project, on a disk from another system: nobody typed it, and stages note where a target lies."""
    odd = os.fsdecode(b"/home/me/B\xfccher/target")
    words = r"stage.json: the text has .*udcfccher.*; if it is a folder's .* rename it"
    with pytest.raises(InputError, match=words):
        write_json(tmp_path / "stage.json", {"folder": odd})
    assert not list(tmp_path.iterdir())
