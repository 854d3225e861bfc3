"""What a pull does on this disk, without a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from edgespec.core.errors import BundleError, InputError
from edgespec.core.manifest import MANIFEST
from edgespec.hub import pull


def manifest_alone(repo: str, revision: str, folder: Path) -> str:
    (folder / MANIFEST).write_text("{}")
    return "0" * 40


def test_a_pull_into_a_folder_of_other_files_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_fetch_manifest", manifest_alone)
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "notes.txt").touch()
    with pytest.raises(InputError, match="pair is there already and is not this bundle"):
        pull.pull("me/pair", tmp_path / "pair", "main", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_a_part_of_another_size_is_closed_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows deletes no file that is open."""
    part, opened = tmp_path / "part", list[pull._Bounded]()
    was_open, unlink = list[bool](), Path.unlink

    class Stream(pull._Bounded):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            opened.append(self)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("Consistency check failed: file should be of size 5 but has size 9")

    def noted(path: Path, missing_ok: bool = False) -> None:
        was_open.extend(not stream.closed for stream in opened)
        unlink(path, missing_ok)

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refused)
    monkeypatch.setattr(pull, "_Bounded", Stream)
    monkeypatch.setattr(Path, "unlink", noted)
    with pytest.raises(BundleError, match="has another size than the 5 bytes"):
        pull._download("me/pair", "0" * 40, "target.gguf", 5, part, Mock())
    assert was_open == [False]
    assert not part.exists()


def test_what_a_bundle_cannot_become_is_said_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file system lets a folder replace a link or another disk, and the current folder would be gone."""
    for name in ("empty", "here", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "astray").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(pull, "_fetch_manifest", manifest_alone)
    monkeypatch.setattr(pull.os.path, "ismount", lambda place: Path(place).name == "disk")
    monkeypatch.chdir(tmp_path / "here")
    for out, words in (
        (tmp_path / "link", "link is a symbolic link, .*; remove the link"),
        (tmp_path / "astray", "astray is a symbolic link, .*; remove the link"),
        (Path(), "here is the current folder, .*; go to another"),
        (tmp_path / "disk", "disk is the root of a file system; give a folder in it"),
    ):
        with pytest.raises(InputError, match=words):
            pull.pull("me/pair", out, "main", 1)
    assert not list(tmp_path.glob(".*"))
