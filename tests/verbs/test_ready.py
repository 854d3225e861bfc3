"""A ready pair that cannot be made: what is said fits the verb that asked for it. One whose making was cut at its end."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import write_text
from edgespec.core.manifest import MANIFEST, open_manifest
from edgespec.planning.preflight import check_memory
from edgespec.recipe.targets import FoundTarget
from edgespec.verbs import ready


def test_too_little_memory_names_no_option_that_chat_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Export:
        def __init__(self, *_: object, **how: Any) -> None:
            asked.update(how)

        def run(self) -> None:
            pass

    monkeypatch.setattr(ready, "Export", Export)
    monkeypatch.setattr(ready, "gguf_target", lambda name: FoundTarget(name, tmp_path, "pip"))
    ready._export("tiny", tmp_path / "drafter", tmp_path / "out")
    monkeypatch.setattr("edgespec.planning.preflight.free_memory", lambda: 300 * 2**20)
    with pytest.raises(InputError) as caught:
        check_memory({"export": 2**30}, tmp_path, asked["memory_cure"])
    said = str(caught.value)
    assert "1.39 GiB of memory and 300 MiB are free" in said
    assert said.endswith("; close other programs, then run the same command again")
    assert "--" not in said


@pytest.mark.parametrize(("verb", "package"), [("bench", "matplotlib"), ("serve", "uvicorn")])
def test_a_package_that_is_missing_is_named_before_a_pair_is_made(
    verb: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "edgespec_runtime.serving.listening", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(ready, "bundle_of", lambda name: pytest.fail("made"))
    flags = ["--plot", str(tmp_path / "p.png")] if verb == "bench" else []
    assert main([verb, "smollm2-135m-instruct", *flags]) == 2
    assert f"needs {package}, which is not installed: " in capsys.readouterr().err


def test_what_was_left_beside_a_whole_bundle_goes_with_the_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its making was cut behind the bundle: by a kill, by Ctrl-C, by a reader of its notes who left."""
    pair = tmp_path / "tiny-0123456789ab"
    for name in (f"bundle/{MANIFEST}", "export/target/gguf/target-q4_1.gguf", "verify/verify.json"):
        write_text(pair / name, "")
    monkeypatch.setattr(ready, "gguf_of", lambda name: tmp_path / "tiny.gguf")
    monkeypatch.setattr(ready, "folder_of", lambda *_: pair)
    monkeypatch.setattr(ready, "open_manifest", lambda *_, **__: None)
    monkeypatch.setattr(ready, "_export", lambda *_: pytest.fail("made again"))
    assert ready._make("tiny", tmp_path / "drafter") == pair / "bundle"
    assert [folder.name for folder in pair.iterdir()] == ["bundle"]


def test_a_pair_that_lost_a_file_is_made_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache may be cleaned of what nobody has read for a month, and no command fetches or builds a ready pair."""
    pair, made = tmp_path / "tiny-0123456789ab", list[str]()
    shutil.copytree(bundle, pair / "bundle")
    monkeypatch.setattr(ready, "gguf_of", lambda name: tmp_path / "tiny.gguf")
    monkeypatch.setattr(ready, "folder_of", lambda *_: pair)
    monkeypatch.setattr(ready, "_export", lambda name, *_: made.append(name))
    ready._make("tiny", tmp_path / "drafter")
    assert made == []
    (pair / "bundle" / next(iter(open_manifest(bundle).files))).unlink()
    ready._make("tiny", tmp_path / "drafter")
    assert made == ["tiny"]
