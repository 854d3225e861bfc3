"""What may travel and what finds room, without a network: pickles under other names, and a disk that holds too little."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from altered_bundle import change

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import sha256_file
from edgespec.core.manifest import MANIFEST, BundleFile, open_manifest
from edgespec.hub.pull import _fetch, pull
from edgespec.hub.push import files_to_send

REPO, COMMIT = "me/pair", "0" * 40
PICKLE = b"\x80\x04\x95" + bytes(61)


def test_a_pickle_is_not_kept_though_its_manifest_is_honest(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(PICKLE)
    entry = BundleFile(sha256_file(part), len(PICKLE))
    with pytest.raises(BundleError, match="runs code of its maker"):
        _fetch(REPO, COMMIT, "drafter/model.safetensors", entry, part, Mock())
    assert not part.exists()


def test_a_pickle_is_not_sent_though_its_manifest_is_honest(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    assert set(files_to_send(copy, open_manifest(copy))) == {*open_manifest(copy).files, MANIFEST}
    change(copy, "prompts.jsonl", PICKLE)
    with pytest.raises(BundleError, match=r"'prompts\.jsonl', and its first bytes are those of a .*pickle"):
        files_to_send(copy, open_manifest(copy))


class Begun(Exception):
    """The first file is fetched."""


def test_what_is_still_to_fetch_finds_room_or_nothing_is_fetched(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each content once, and less what has arrived."""

    def manifest_alone(repo: str, revision: str, folder: Path) -> str:
        shutil.copy(bundle / MANIFEST, folder)
        return COMMIT

    contents = {entry.sha256: entry.bytes for entry in open_manifest(bundle).files.values()}
    largest = max(contents, key=contents.__getitem__)
    parts = tmp_path / ".pair.partial" / "parts"
    parts.mkdir(parents=True)
    (parts / largest).write_bytes(bytes(1000))
    missing = sum(contents.values()) - 1000
    monkeypatch.setattr("edgespec.hub.pull._fetch_manifest", manifest_alone)
    monkeypatch.setattr("edgespec.hub.pull._fetch", Mock(side_effect=Begun))
    monkeypatch.setattr("edgespec.hub.pull.free_disk", lambda folder: missing - 1)
    with pytest.raises(InputError, match=r"still to fetch and .* free; make room"):
        pull(REPO, tmp_path / "pair", "main", 2**40)
    monkeypatch.setattr("edgespec.hub.pull.free_disk", lambda folder: missing)
    with pytest.raises(Begun):
        pull(REPO, tmp_path / "pair", "main", 2**40)
    assert not (tmp_path / "pair").exists()


LIBRARY = {"model": {"decoder": {"session_options": {"custom_ops_library": "model.data"}}}}


@pytest.mark.parametrize(
    ("name", "text", "other", "words"),
    [
        ("drafter/genai_config.json", json.dumps(LIBRARY), "{}", "has no usable 'session_options'"),
        (
            "elsewhere/vllm.yaml",
            "trust-remote-code: true\n",
            "speculative-num-steps: 3\n",
            "has 'trust-remote-code'",
        ),
    ],
)
def test_settings_with_which_an_engine_would_run_code_do_not_travel(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    other: str,
    words: str,
) -> None:
    """The model card has people run these engines on the bundle."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (copy / name).parent.mkdir(exist_ok=True)
    change(copy, name, text)
    change(copy, "z.md", text)  # of files with one content one is fetched
    with pytest.raises(BundleError, match=f"bundle.{name} {words}"):
        files_to_send(copy, open_manifest(copy))

    def manifest_alone(repo: str, revision: str, folder: Path) -> str:
        shutil.copy(copy / MANIFEST, folder)
        return COMMIT

    def fetched(repo: str, commit: str, name: str, entry: BundleFile, part: Path, bar: object) -> None:
        shutil.copy(copy / name, part)

    monkeypatch.setattr("edgespec.hub.pull._fetch_manifest", manifest_alone)
    monkeypatch.setattr("edgespec.hub.pull._fetch", fetched)
    with pytest.raises(BundleError, match=f"{REPO}.{name} {words}"):
        pull(REPO, tmp_path / "pair", "main", 2**40)
    assert not (tmp_path / "pair").exists()
    change(copy, name, other)
    pull(REPO, tmp_path / "pair", "main", 2**40)
    assert (tmp_path / "pair" / name).read_text() == other
