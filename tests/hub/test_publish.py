"""push and pull against a hub on a real socket: the hub's own client in a process of its own, which is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hub_server import TOKEN, Hub, contents, running
from repository import REPOSITORY
from small_files import files_of_at_most

from edgespec.cli import main
from edgespec.core.errors import BundleError, InputError
from edgespec.core.manifest import (
    MANIFEST,
    BundleModel,
    Manifest,
    describe_files,
    open_manifest,
    write_manifest,
)
from edgespec.hub.publish import check_head, check_names
from edgespec.hub.pull import _Bounded, pull
from edgespec.hub.push import local_paths

REPO = "me/pair"
BIG = 24 * 10**6  # the hub's client hands over pieces of 10 MB


def make_bundle(folder: Path, big: int = 9000, title: str = "pair with a drafter") -> Path:
    """A bundle of files that no engine opens: what travels is bytes."""
    generator = np.random.default_rng(0)
    for name, size in {
        "target/target-q8_0.gguf": big,
        "drafter/drafter-q8_0.gguf": 5000,
        "tokenizer/tokenizer.json": 300,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF" + generator.bytes(size - 4))
    (folder / "tokenizer" / "copy.json").write_bytes((folder / "tokenizer" / "tokenizer.json").read_bytes())
    (folder / "README.md").write_text(f"---\nlibrary_name: edgespec\n---\n\n# {title}\n")
    (folder / "empty.txt").touch()
    models = {
        role: BundleModel(role, "test", {}, 1000, {"llama.cpp": {"q8_0": f"{role}/{role}-q8_0.gguf"}})
        for role in ("target", "drafter")
    }
    manifest = Manifest(
        pair={"tokenizer_sha256": "0" * 64, "vocab_size": 8},
        default={"engine": "llama.cpp", "precision": "q8_0", "reason": "the only one"},
        cost_ratio={},
        metrics={},
        provenance={"recipe": {"target": "/home/someone/model"}},
        files=describe_files(folder),
        **models,
    )
    write_manifest(folder, manifest)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return make_bundle(tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as server:
        yield server


def environment(hub: Hub, place: Path, token: str = TOKEN) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HOME": str(place / "hf-home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }


def edgespec(hub: Hub, place: Path, *words: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in `place`."""
    command = [sys.executable, "-m", "edgespec", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=place, env=environment(hub, place, token), timeout=60
    )


def killed(hub: Hub, place: Path, *words: object, arrived: Any = None) -> None:
    """Start a command, wait until its transfer stalls (and `arrived()`), and kill it."""
    command = [sys.executable, "-m", "edgespec", *map(str, words)]
    process = subprocess.Popen(
        command, cwd=place, env=environment(hub, place), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert hub.stalled.wait(30)
        end = time.monotonic() + 20
        while arrived is not None and not arrived():
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    hub.stall = None
    hub.released.set()


def part_of(bundle: Path, place: Path) -> Path:
    """Where a pull keeps what it has of the target's file."""
    entry = open_manifest(bundle).files["target/target-q8_0.gguf"]
    return place / ".pair.partial" / "parts" / entry.sha256


def refused(hub: Hub, place: Path, *words: object, token: str = TOKEN) -> str:
    """The one line of a command that must fail, which leaves nothing in `place` but the partial folder of a pull."""
    done = edgespec(hub, place, *words, token=token)
    lines = [line for line in done.stderr.splitlines() if line.startswith("edgespec: ")]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) == 1
    assert {path.name for path in place.iterdir()} <= {"hf-home", ".pair.partial"}
    return lines[0]


def test_push_shows_first_and_sends_with_yes(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    dry = edgespec(hub, tmp_path, "push", bundle, REPO, token="")
    assert dry.returncode == 0, dry.stderr
    assert "target/target-q8_0.gguf" in dry.stdout
    assert "# pair with a drafter" in dry.stdout
    assert "/home/someone/model" in dry.stdout
    assert "Nothing was sent" in dry.stdout
    assert not [line for line in hub.requests if REPO in line]
    sent = edgespec(hub, tmp_path, "push", bundle, REPO, "--yes")
    assert sent.returncode == 0, sent.stderr
    assert hub.repos[REPO] == contents(bundle)
    assert REPO in hub.private
    assert not hub.leaks


def test_a_card_is_shown_without_its_escape_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle(tmp_path / "bundle", title="a \x1b[2Jpair")
    assert main(["push", str(bundle), REPO]) == 0
    shown = capsys.readouterr().out
    assert "\n    # a \ufffd[2Jpair\n" in shown
    assert "\x1b" not in shown


def test_what_is_no_part_of_the_bundle_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / "diary.md").write_text("mine")
    assert edgespec(hub, tmp_path, "push", folder, REPO, "--yes").returncode == 0
    assert "diary.md" not in hub.repos[REPO]
    (folder / "README.md").write_text("altered")
    (tmp_path / "bundle").rename(tmp_path.parent / f"{tmp_path.name}-away")
    line = refused(hub, tmp_path, "push", tmp_path.parent / f"{tmp_path.name}-away", REPO, "--yes")
    assert "README.md" in line


def test_a_killed_push_does_not_send_again_what_arrived(hub: Hub, tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", big=3 * 2**20)
    files = open_manifest(folder).files
    small, big = (files[f"{role}/{role}-q8_0.gguf"].sha256 for role in ("drafter", "target"))
    hub.stall = (big, 2**20)
    killed(hub, tmp_path, "push", folder, REPO, "--yes", arrived=lambda: small in hub.objects)
    assert hub.repos[REPO] == {}  # nothing to be seen before all of it is there
    done = edgespec(hub, tmp_path, "push", folder, REPO, "--yes")
    assert done.returncode == 0, done.stderr
    assert hub.repos[REPO] == contents(folder)
    assert hub.requests.count(f"PUT /lfs/{small}") == 1
    assert hub.requests.count(f"PUT /lfs/{big}") == 2


def test_a_hub_with_other_content_is_noticed(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    hub.lost.add("README.md")
    done = edgespec(hub, tmp_path, "push", bundle, REPO, "--yes")
    assert done.returncode == 1
    assert "other content" in done.stderr
    assert "README.md" in done.stderr
    hub.lost.clear()
    assert edgespec(hub, tmp_path, "push", bundle, REPO, "--yes").returncode == 0


def test_pull_gives_the_bundle_and_nothing_else(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    hub.store(REPO, bundle)
    hub.private.add(REPO)
    hub.repos[REPO]["training.bin"] = b"\x80\x04 not asked for"
    done = edgespec(hub, tmp_path, "pull", REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Next: edgespec chat pair"
    assert contents(tmp_path / "pair") == contents(bundle)
    assert open_manifest(tmp_path / "pair").target.name == "target"
    assert not (tmp_path / ".pair.partial").exists()
    assert not hub.leaks
    assert not [line for line in hub.requests if "training.bin" in line]
    asked = len(hub.requests)
    again = edgespec(hub, tmp_path, "pull", REPO)
    assert "already, and whole" in again.stdout
    assert not [line for line in hub.requests[asked:] if ".gguf" in line]
    (tmp_path / "pair" / "README.md").write_text("altered")
    assert edgespec(hub, tmp_path, "pull", REPO).returncode == 2


def test_a_killed_pull_goes_on_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "made" / "bundle", big=BIG)
    hub.store(REPO, folder)
    hub.stall = ("target-q8_0.gguf", 12 * 10**6)
    part = part_of(folder, tmp_path)

    def arrived() -> bool:
        if not part.exists() or part.stat().st_size < 10**7:
            return False
        second = edgespec(hub, tmp_path, "pull", REPO)
        return second.returncode == 2 and ".pair.partial is in use by process" in second.stderr

    killed(hub, tmp_path, "pull", REPO, arrived=arrived)
    held = part.stat().st_size
    assert not (tmp_path / "pair").exists()
    done = edgespec(hub, tmp_path, "pull", REPO)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "pair") == contents(folder)
    assert hub.ranges == [f"target/target-q8_0.gguf {held}"]
    fetched = [line for line in hub.requests if line.startswith("GET /cdn/")]
    assert sum(line.endswith("drafter-q8_0.gguf") for line in fetched) == 1


def test_a_part_of_other_content_is_not_continued(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    """Bytes of the part that are not the file's are noticed, thrown away, and fetched again by the next run."""
    hub.store(REPO, bundle)
    part = part_of(bundle, tmp_path)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    assert "arrived with sha256" in refused(hub, tmp_path, "pull", REPO)
    assert hub.ranges == ["target/target-q8_0.gguf 100"]
    assert edgespec(hub, tmp_path, "pull", REPO).returncode == 0
    assert contents(tmp_path / "pair") == contents(bundle)


def test_a_pull_that_ended_while_it_put_its_files_together(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    """What it had goes on being used, and a file of another revision is not in the bundle."""
    hub.store(REPO, bundle)
    name, done = "target/target-q8_0.gguf", tmp_path / ".pair.partial" / "files"
    (done / name).parent.mkdir(parents=True)
    (done / name).write_bytes((bundle / name).read_bytes())
    (done / "older.md").write_text("of another revision")
    assert edgespec(hub, tmp_path, "pull", REPO).returncode == 0
    assert contents(tmp_path / "pair") == contents(bundle)
    assert not [line for line in hub.requests if line.endswith("target-q8_0.gguf")]


def altered(hub: Hub, change: Any) -> None:
    """A repository whose manifest says something else."""
    value = json.loads(hub.repos[REPO][MANIFEST])
    change(value)
    hub.repos[REPO][MANIFEST] = json.dumps(value).encode()


def rename(old: str, new: str) -> Any:
    def change(value: dict[str, Any]) -> None:
        value["files"][new] = value["files"].pop(old)

    return change


def test_names_that_are_refused(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    for name, words in {"../escaped.txt": "leaves the bundle", "weights/pytorch_model.bin": "pickle"}.items():
        hub.store(REPO, bundle)
        altered(hub, rename("empty.txt", name))
        hub.repos[REPO][name] = b""
        assert words in refused(hub, tmp_path, "pull", REPO)
    assert not [line for line in hub.requests if ".gguf" in line]
    assert not list(tmp_path.parent.glob("escaped.txt"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights/model.PT", "pickle"),
        ("arrays.npz", "pickle"),
        ("setup.py", "no bundle needs"),
        ("model.onnx/../x", "no bundle needs"),
        ("Readme.md", "one file on some systems"),
        ("README.md/more.md", "as a file"),
    ],
)
def test_names_that_do_not_travel(name: str, words: str) -> None:
    graph = "target/onnx-int4/model.onnx"
    names = [graph, f"{graph}.data", "LICENSE", "README.md", MANIFEST]
    check_names(names, "a bundle")
    with pytest.raises(BundleError, match=words):
        check_names([*names, name], "a bundle")


def test_contents_that_are_refused(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    hub.store(REPO, bundle)
    target, drafter = "target/target-q8_0.gguf", "drafter/drafter-q8_0.gguf"
    whole = dict(hub.repos[REPO])
    hub.extra[drafter] = b"more" * 1000
    assert "sends more than" in refused(hub, tmp_path, "pull", REPO)
    hub.extra.clear()
    hub.repos[REPO][drafter] = whole[drafter][:-1]
    assert "another size" in refused(hub, tmp_path, "pull", REPO)
    hub.repos[REPO][drafter] = whole[drafter][:-1] + bytes([whole[drafter][-1] ^ 1])
    assert "arrived with sha256" in refused(hub, tmp_path, "pull", REPO)
    hub.repos[REPO] = dict(whole)
    altered(hub, lambda value: value["files"][target].update(bytes=2**45))
    assert "give a larger --max-gib" in refused(hub, tmp_path, "pull", REPO)
    hub.repos[REPO][MANIFEST] = b" " * (5 * 2**20)
    assert "at most" in refused(hub, tmp_path, "pull", REPO)
    hub.repos[REPO] = whole
    assert edgespec(hub, tmp_path, "pull", REPO).returncode == 0


@pytest.mark.parametrize("head", [b"\x80\x04\x95", b"PK\x03\x04"])
def test_a_pickle_under_another_name(bundle: Path, tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(head + b"rest")
    with pytest.raises(BundleError, match=r"runs code of its maker"):
        check_head(file, "model.safetensors", "a bundle")
    for path in bundle.rglob("*.gguf"):
        check_head(path, path.name, "a bundle")
    # a header of 1,152 bytes, not protocol 4
    file.write_bytes(0x480.to_bytes(8, "little") + b'{"__metadata__"')
    check_head(file, "model.safetensors", "a bundle")


def test_gate_token_network_and_names(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    assert "was not found" in refused(hub, tmp_path, "pull", "me/none")
    assert "HF_TOKEN" in refused(hub, tmp_path, "push", bundle, REPO, "--yes", token="")
    hub.store(REPO, bundle)
    hub.private.add(REPO)
    assert "no token for it" in refused(hub, tmp_path, "pull", REPO, token="")
    assert "no such revision" in refused(hub, tmp_path, "pull", REPO, "--revision", "v9")
    hub.gated[REPO] = 403
    assert "accept its conditions" in refused(hub, tmp_path, "pull", REPO)
    hub.gated.clear()
    del hub.repos[REPO]["drafter/drafter-q8_0.gguf"]
    assert "lacks a file" in refused(hub, tmp_path, "pull", REPO)
    assert "ORGANISATION/NAME" in refused(hub, tmp_path, "pull", "pair")
    away = Hub()
    away.server_close()
    assert "cannot be reached" in refused(away, tmp_path, "pull", REPO)


@pytest.mark.parametrize("whose", ["a link", "another user's"])
def test_a_partial_folder_that_others_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """In a folder where they may write, they would choose which file a part is added to, and which files are removed."""
    mine = tmp_path / "mine" / "files"
    mine.mkdir(parents=True)
    (mine / "precious").touch()
    if whose == "a link":
        (tmp_path / ".pair.partial").symlink_to(mine.parent)
    else:
        (tmp_path / ".pair.partial").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match=r"\.pair\.partial is a link or another user's; remove it"):
        pull("me/pair", tmp_path / "pair", "main", 1)
    assert (mine / "precious").exists()


def test_bytes_that_find_no_room_are_missed(tmp_path: Path) -> None:
    """Else a disk that fills up in a file's last bytes would be told as a repository that was altered."""
    with (
        pytest.raises(OSError, match="File too large"),
        files_of_at_most(1000),
        _Bounded(tmp_path / "part", 2000, "a file", Mock()) as part,
    ):
        part.write(bytes(1500))


def test_the_root_of_a_file_system_becomes_no_bundle() -> None:
    with pytest.raises(InputError, match="is the root of a file system; give a folder in it with --out"):
        pull("me/pair", Path("/"), "main", 1)


def test_local_paths_are_found_in_words_and_lists() -> None:
    value = {
        "command": "edgespec export --target /home/a/model",
        "list": [r"C:\models\x", "text"],
        "url": "https://x.org/a",
    }
    assert local_paths(value) == ["/home/a/model", r"C:\models\x"]
