"""The last chat of a bundle: found again, bounded, its owner's alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chats import new_chat
from edgespec_runtime.chat import chat, saved
from edgespec_runtime.chat.conversation import Conversation
from edgespec_runtime.chat.saved import LastChat, state_folder
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.text.tokenizer import ChatTokenizer, Message

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.manifest import BundleFile, Manifest, open_manifest


@pytest.fixture
def manifest(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return open_manifest(bundle)


def last_chat(manifest: Manifest) -> LastChat:
    return LastChat(manifest, state_folder())


def conversation(bundle: Path, turns: int, words: str = "word") -> Conversation:
    made = Conversation(ChatTokenizer(bundle / "tokenizer"), "Be kind.")
    messages: list[Message] = []
    for number in range(turns):
        messages += [
            {"role": "user", "content": f"{number} {words}"},
            {"role": "assistant", "content": words},
        ]
    made.reset(messages)
    return made


def test_the_last_chat_of_a_bundle_is_found_again_wherever_the_bundle_lies(
    bundle: Path, manifest: Manifest
) -> None:
    mine = conversation(bundle, 2)
    last_chat(manifest).keep(mine)
    moved = last_chat(replace(manifest, folder=Path("elsewhere")))
    again = conversation(bundle, 0)
    assert moved.resume(again) == "going on behind 2 turns; the last message was: 1 word"
    assert (again.messages, again.system) == (mine.messages, "Be kind.")
    assert stat.S_IMODE(moved.path.stat().st_mode) == 0o600
    for folder in (moved.path.parent, moved.path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_chats_that_others_may_read_becomes_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shares a cache folder can have made it before; where it is not ours, it cannot be made so and no chat is kept."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    folder = state_folder()
    folder.chmod(0o777)
    assert stat.S_IMODE(state_folder().stat().st_mode) == 0o700


def changed(manifest: Manifest, *names: str) -> Manifest:
    """With other bytes in these files."""
    return replace(manifest, files={**manifest.files, **{name: BundleFile("0" * 64, 1) for name in names}})


@pytest.mark.parametrize("gguf", [False, True])
def test_a_bundle_that_was_packed_again_has_its_chat_and_another_model_none(
    bundle: Path, manifest: Manifest, gguf: bool
) -> None:
    graph, file = "target/onnx-fp32/model.onnx", "target/gguf/target-q8_0.gguf"
    if gguf:
        files = {**manifest.target.files, "llama.cpp": {"q8_0": file}}
        manifest = replace(manifest, target=replace(manifest.target, files=files))
        manifest = replace(manifest, files={**manifest.files, file: BundleFile("1" * 64, 1)})
    last_chat(manifest).keep(conversation(bundle, 2))
    again = conversation(bundle, 0)
    same = [changed(manifest, "README.md", "verify.json", "drafter/onnx-fp32/model.onnx")]
    others = [
        changed(manifest, file if gguf else graph),
        replace(manifest, pair={**manifest.pair, "tokenizer_sha256": "1" * 64}),
        replace(manifest, target=replace(manifest.target, name="other")),
        replace(manifest, drafter=replace(manifest.drafter, name="other")),
    ]
    if gguf:
        same.append(changed(manifest, graph))  # of another exporter
    for one in same:
        assert last_chat(one).resume(again).startswith("going on behind 2 turns")
    for one in others:
        assert last_chat(one).resume(again) == "there is no earlier chat of this bundle; this is a new one"


def test_a_long_chat_is_kept_without_its_oldest_turns(
    bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "MAX_BYTES", 3000)
    last = last_chat(manifest)
    last.keep(conversation(bundle, 200))
    assert last.path.stat().st_size <= 3000
    again = conversation(bundle, 0)
    last.resume(again)
    assert again.system == "Be kind."
    assert 0 < len(again.messages) < 400
    assert again.messages[0]["role"] == "user"
    assert again.messages[-2]["content"] == "199 word"


def test_a_chat_is_kept_also_where_the_cache_was_emptied_meanwhile(bundle: Path, manifest: Manifest) -> None:
    last = last_chat(manifest)
    shutil.rmtree(state_folder().parent)
    last.keep(conversation(bundle, 1))
    assert last.path.exists()
    for folder in (last.path.parent, last.path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_of_many_bundles_the_newest_chats_are_kept(
    bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "MOST_CHATS", 3)
    paths = []
    for number in range(5):
        last = last_chat(replace(manifest, pair={"tokenizer_sha256": str(number)}))
        last.keep(conversation(bundle, 1))
        os.utime(last.path, (number, number))
        paths.append(last.path)
    last_chat(manifest).keep(conversation(bundle, 1))
    assert [path.exists() for path in paths] == [False, False, False, True, True]


def test_a_damaged_chat_is_refused(bundle: Path, manifest: Manifest) -> None:
    last = last_chat(manifest)
    last.keep(conversation(bundle, 1))
    value = json.loads(last.path.read_text())
    last.path.write_text(json.dumps(value)[:-9])
    mine = conversation(bundle, 3)
    with pytest.raises(InputError, match="not valid JSON"):
        last.resume(mine)
    assert len(mine.messages) == 6


def test_a_chat_that_could_not_be_kept_is_kept_at_a_later_turn(
    pair: Pair, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    talking = new_chat(pair)
    talking.interactive = True
    folder = chat._remember(talking)
    assert folder is not None
    (folder / "last").write_text("a file, where a folder is wanted")
    for _ in range(2):
        talking.on_change()
    assert capsys.readouterr().err.count("(this chat could not be kept: ") == 1
    (folder / "last").unlink()
    talking.on_change()
    assert last_chat(pair.manifest).path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="what forbids writing differs there")
def test_a_folder_that_cannot_be_written_is_no_reason_not_to_talk(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file, where the cache folder would be")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))

    class Keys(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Keys(io.BytesIO()))
    monkeypatch.setattr("edgespec_runtime.chat.keyboard.Keyboard", lambda history: Once())

    class Once:
        texts = iter(["Hello"])

        def read(self, prefill: str = "") -> str | None:
            return next(self.texts, None)

    assert main(["chat", str(bundle), "--max-new-tokens", "4", "--draft-length", "2"]) == 0
    shown = capsys.readouterr()
    assert "(this chat is not kept: " in shown.err
    assert "4 tokens" in shown.err
    assert main(["chat", str(bundle), "--continue"]) == 2
