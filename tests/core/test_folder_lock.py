"""One process at a time in a folder: the second one says who holds it, and a killed holder blocks nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import REPOSITORY
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.folder_lock import LOCK, held, is_empty, refuse_other, remove_older

HOLDS = """
import sys, time
from pathlib import Path
from edgespec.core.folder_lock import held
with held(Path(sys.argv[1]), "edgespec something"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1], "last").touch()
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLDS, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert process.stdout is not None
    with process.stdout as stream:
        assert stream.readline() == b"held\n"
    return process


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = hold(tmp_path / "out", 60)
    yield process
    process.kill()
    process.wait()


def test_the_second_process_says_who_holds_it(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    words = rf"out is in use by process {holder.pid} on .* since \d{{4}}-.* \(edgespec something\); wait for its end"
    with pytest.raises(InputError, match=words), held(tmp_path / "out", "edgespec other"):
        pass
    assert is_empty(tmp_path / "out")


def test_older_folders_of_the_same_name_go(tmp_path: Path) -> None:
    """Not one that is in use, and not one whose name is longer."""
    names = [
        "a[1]-0123abcd",
        "a[1]-2-0123abcd",
        "a1-0123abcd",
        "a[1]-00000000",
        "a[1]-ffffffff",
    ]
    for name in names:
        (tmp_path / name / "inside").mkdir(parents=True)
    with held(tmp_path / "a[1]-00000000", "edgespec other"):
        remove_older(tmp_path / "a[1]-ffffffff", "edgespec something")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_killed_holder_blocks_nobody(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out" / LOCK).exists()
    with (
        held(tmp_path / "out", "edgespec other"),
        pytest.raises(InputError, match=r"\(edgespec other\)"),
        held(tmp_path / "out", "edgespec third"),
    ):
        pass
    assert not (tmp_path / "out" / LOCK).exists()


@pytest.mark.parametrize("lock", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused_and_nothing_is_emptied(tmp_path: Path, lock: str) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    (tmp_path / "out").mkdir()
    if lock == "link":
        (tmp_path / "out" / LOCK).symlink_to(precious)
    else:
        os.mkfifo(tmp_path / "out" / LOCK)
    with (
        pytest.raises(InputError, match=r"in-use\.json is a link or no regular file; remove it"),
        held(tmp_path / "out", "edgespec something"),
    ):
        pass
    assert precious.read_text() == "precious"


def test_one_that_waits_gets_it(tmp_path: Path) -> None:
    process = hold(tmp_path, 1.5)
    with held(tmp_path, "edgespec other", wait=True):
        assert (tmp_path / "last").exists()  # what the other one does last while it holds the folder
    assert process.wait() == 0


def test_every_verb_that_fills_a_folder_holds_it(
    tmp_path: Path, holder: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    out, target = str(tmp_path / "out"), str(make_model_folder(tmp_path / "target"))
    (tmp_path / "x").mkdir()
    for words in (
        ["build-drafter", "--target", target, "--out", out],
        ["export", "--target", target, "--drafter", target, "--out", out],
        [
            *("plan", "--rehearse", "--target", "llama-2-7b-chat", "--rehearsal.shape", "tiny"),
            *("--rehearsal.out", out),
        ],
    ):
        capfd.readouterr()
        assert main(words) == 2
        errors = capfd.readouterr().err
        assert f"is in use by process {holder.pid}" in errors
        assert len(errors.splitlines()) == 1
    assert is_empty(tmp_path / "out")


def test_a_run_killed_at_its_first_file_can_be_started_again(tmp_path: Path) -> None:
    """Its lock and the beginning of that file are no other files; those of somebody else are."""
    for left in (LOCK, ".own.yaml.123.0123abcd.tmp"):
        (tmp_path / left).touch()
    refuse_other(tmp_path, "own.yaml")
    with pytest.raises(InputError, match=r"other files and no else\.yaml"):
        refuse_other(tmp_path, "else.yaml")


def test_who_shares_a_folder_cannot_have_a_huge_lock_read(tmp_path: Path) -> None:
    with held(tmp_path, "edgespec other"):
        with open(tmp_path / LOCK, "ab") as stream:
            stream.write(b" " * 2**16)
        with (
            pytest.raises(InputError, match="is in use by another process"),
            held(tmp_path, "edgespec third"),
        ):
            pass
