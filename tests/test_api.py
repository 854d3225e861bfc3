"""The public Python interface: what it gives is what the verbs and the loop give."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from altered_bundle import change_manifest
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from repository import REPOSITORY

import edgespec
from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.metrics import RawCounts

QUESTION = "What is a list?"


def greedy_text(bundle: Path, tokens: int) -> str:
    """The target's own reply, by the loop alone."""
    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    prompt = pair.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    how = plain(DecodingOptions(max_new_tokens=tokens))
    blocks = decode(pair.target, None, prompt, how, pair.tokenizer.stop_ids, RawCounts())
    text = pair.tokenizer.decode([token for block in blocks for token in block.tokens])
    pair.close()
    return text


def test_pieces_are_the_targets_greedy_reply(bundle: Path) -> None:
    with edgespec.load(bundle) as pair:
        pieces = list(pair.generate(QUESTION, max_new_tokens=24, draft_length=3))
        stats = pair.stats
    assert all(isinstance(piece, edgespec.Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == greedy_text(bundle, 24)
    assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    accepted = sum(len(piece.tokens) for piece in pieces if piece.accepted)
    assert accepted == sum(stats["counts"]["accepted"]) > 0
    assert sum(len(piece.tokens) for piece in pieces) == stats["counts"]["emitted"]


def test_without_a_drafter_every_token_is_the_targets(bundle: Path) -> None:
    with edgespec.load(bundle) as pair:
        pieces = list(pair.generate(QUESTION, draft=False, max_new_tokens=8))
        assert not any(piece.accepted for piece in pieces)
        assert "acceptance_rate" not in pair.stats


def test_a_stop_string_ends_the_reply(bundle: Path) -> None:
    whole = greedy_text(bundle, 24)
    stop = whole[7:11]
    with edgespec.load(bundle) as pair:
        for given in (stop, [stop], ("not in it", stop)):
            pieces = list(pair.generate(QUESTION, stop=given, max_new_tokens=24, draft_length=3))
            assert "".join(piece.text for piece in pieces) == whole[: whole.find(stop)]
            assert [piece.finish for piece in pieces] == [""] * (len(pieces) - 1) + ["stop"]
        with pytest.raises(InputError, match="stop is ''; an empty text"):
            next(pair.generate(QUESTION, stop=""))


def test_a_chat_remembers_its_turns_also_one_that_was_left(bundle: Path) -> None:
    with edgespec.load(bundle) as pair:
        chat = pair.chat("Be brief.")
        first = "".join(piece.text for piece in chat.send(QUESTION, max_new_tokens=8, draft_length=2))
        left = chat.send("And a tuple?", max_new_tokens=8, draft_length=2)
        next(left)
        left.close()
        again = list(chat.send("Thanks.", max_new_tokens=4, draft_length=2))
    assert again[-1].finish
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant"] * 3
    assert chat.messages[1]["content"] == first
    assert chat.messages[2]["content"] == "And a tuple?"


def test_who_changes_the_messages_of_a_chat_changes_a_copy(bundle: Path) -> None:
    """Else the next prompt would have turns that are gone, or none to go on from."""
    with edgespec.load(bundle) as pair:
        chat = pair.chat()
        list(chat.send(QUESTION, max_new_tokens=4, draft_length=2))
        turns = chat.messages
        chat.messages.clear()
        chat.messages[0]["content"] = "another"
        list(chat.send("And a tuple?", max_new_tokens=4, draft_length=2))
        assert chat.messages[:2] == turns
        assert len(chat.messages) == 4


@pytest.mark.parametrize(
    "another",
    [
        lambda pair, chat: list(chat.send("SECOND", max_new_tokens=4, draft_length=2)),
        lambda pair, chat: list(pair.chat().send("SECOND", max_new_tokens=4, draft_length=2)),
        lambda pair, chat: list(pair.generate("SECOND", max_new_tokens=4, draft_length=2)),
        lambda pair, chat: pair.close(),
    ],
)
def test_a_turn_that_was_left_but_is_held_stands_before_the_next(
    bundle: Path, another: Callable[[edgespec.Pair, edgespec.Chat], None]
) -> None:
    with edgespec.load(bundle) as pair:
        chat = pair.chat()
        held = chat.send("FIRST", max_new_tokens=8, draft_length=2)
        reply = pair._pair.tokenizer.decode(next(held).tokens)
        another(pair, chat)
        read = pair._pair.tokenizer.decode(pair._pair.target.tokens)
        if len(chat.messages) > 2:
            assert 0 <= read.find("FIRST") < read.find("SECOND")
        turns = [message["content"] for message in chat.messages]
        assert turns[:2] == ["FIRST", reply]
        assert turns[2::2] in ([], ["SECOND"])
        del held
        assert [message["content"] for message in chat.messages] == turns
        assert pair.stats["counts"]["emitted"] >= 1


def test_another_thread_is_refused_while_a_piece_is_computed(bundle: Path) -> None:
    how: dict[str, Any] = {"max_new_tokens": 12, "draft_length": 2}
    with edgespec.load(bundle) as pair:
        alone = list(pair.generate(QUESTION, **how))
        chat, waits, goes_on = pair.chat(), Event(), Event()

        def before_pass() -> None:
            waits.set()
            assert goes_on.wait(60)

        pair._pair.target.before_pass = before_pass
        found: list[Any] = []
        thread = Thread(target=lambda: found.extend(pair.generate(QUESTION, **how)))
        thread.start()
        assert waits.wait(60)
        try:
            for other in (pair.generate(QUESTION, **how), chat.send(QUESTION, **how)):
                with pytest.raises(InputError, match="giving another reply in another thread; wait"):
                    next(other)
            with pytest.raises(InputError, match="giving another reply in another thread; wait"):
                pair.close()
        finally:
            goes_on.set()
            thread.join(60)
        assert found == alone
        assert chat.messages == []
        assert list(pair.generate(QUESTION, **how)) == alone


def test_a_reply_that_was_left_does_no_harm_to_the_next(bundle: Path) -> None:
    """Left open, gone on with, or thrown away: the reply that began last is as if it were alone."""
    how = {"max_new_tokens": 12, "draft_length": 2}
    with edgespec.load(bundle) as pair:
        alone = [piece.tokens for piece in pair.generate("And a tuple?", **how)]
        left = pair.generate(QUESTION, **how)
        next(left)
        last = pair.generate("And a tuple?", **how)
        found = [next(last).tokens]
        with pytest.raises(InputError, match="another reply of this pair has begun"):
            next(left)
        del left
        found += [piece.tokens for piece in last]
    assert found == alone


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pair_that_nobody_has_is_closed_and_none_twice(
    bundle: Path, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where a cell that loads a pair runs again."""
    pair = edgespec.load(bundle)
    next(pair.generate(QUESTION, max_new_tokens=4, draft_length=2))
    freed: list[str] = []
    for model in pair._pair.models:
        monkeypatch.setattr(model.engine, "close", lambda: freed.append("model"))
    if by_hand:
        pair.close()
    del pair
    gc.collect()
    assert freed == ["model", "model"]


def test_a_closed_pair_says_so(bundle: Path) -> None:
    pair = edgespec.load(bundle)
    begun, waiting = pair.generate(QUESTION), pair.generate(QUESTION)
    next(begun)
    pair.close()
    pair.close()
    for reply in (begun, waiting):
        with pytest.raises(InputError, match="this pair is closed"):
            next(reply)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("\ud83d", "half a character"),
        (["hi"], "the prompt has the message 'hi'; it needs a role"),
        ([{"role": "user", "content": None}], "it needs a role"),
        ([], "it needs 'messages'"),
    ],
)
def test_prompts_of_another_form(bundle: Path, prompt: Any, message: str) -> None:
    with edgespec.load(bundle) as pair, pytest.raises(InputError, match=message):
        next(pair.generate(prompt))


def test_a_system_prompt_with_half_a_character_is_named(bundle: Path) -> None:
    """And not a bundle that is said to be broken."""
    words = r"the system prompt: .*half a character"
    with edgespec.load(bundle) as pair, pytest.raises(InputError, match=words):
        next(pair.chat("\ud83d").send(QUESTION))


def test_a_shift_keeps_the_system_prompt(bundle: Path) -> None:
    system = "You are a pirate who says arr."
    how: dict[str, Any] = {"max_new_tokens": 90, "when_full": "shift", "draft_length": 2}
    with edgespec.load(bundle, context=64) as pair:
        list(pair.chat(system).send("Hi", **how))
        shown = pair._pair.tokenizer.decode(pair._pair.target.tokens)
        assert system in shown
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
        list(pair.generate(chat, **how))
        assert system in pair._pair.tokenizer.decode(pair._pair.target.tokens)


BEYOND = r"takes more than \d+ tokens and the context has room for \d+; shorten it"
HUGE = "x" * 4_000_100  # beyond the bound of a chat template


@pytest.mark.parametrize("prompt", [HUGE, [{"role": "user", "content": HUGE[:2_000_050]}] * 2])
def test_a_prompt_far_beyond_the_context(bundle: Path, prompt: Any) -> None:
    with edgespec.load(bundle) as pair, pytest.raises(InputError, match=f"the prompt {BEYOND}"):
        next(pair.generate(prompt))


@pytest.mark.parametrize(
    ("system", "message", "words"),
    [
        ("word " * 300, "hi", r"the system prompt takes \d+ tokens .* 248; shorten it, .* max_new_tokens"),
        ("word", "word " * 300, r"the message takes \d+ tokens .* 248; shorten it, .* max_new_tokens"),
        (HUGE, "hi", f"the system prompt {BEYOND}"),
    ],
)
@pytest.mark.parametrize("when_full", ["stop", "shift"])
def test_what_leaves_a_chat_no_room_is_named(
    bundle: Path, system: str, message: str, words: str, when_full: str
) -> None:
    with edgespec.load(bundle) as pair, pytest.raises(InputError, match=words):
        next(pair.chat(system).send(message, max_new_tokens=8, draft_length=2, when_full=when_full))


def test_a_devices_context_and_draft_length_stand_below_those_given(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "device")
    device = {"name": "intel-npu", "draft_length": 3, "max_draft_length": 4, "context": 64}
    change_manifest(tmp_path / "device", lambda value: value.update(device=device))
    with edgespec.load(tmp_path / "device") as pair:
        assert pair._pair.target.engine.context_length == 64
        assert pair._how(True, {}, "").draft_length == 3
        assert pair._how(True, {}, "").max_draft_length == 4
        assert pair._how(True, {"draft_length": 2}, "").draft_length == 2
        assert pair._how(True, {"rule": "bild"}, "").draft_length is None
        for options, words in (({"context": 32}, "context"), ({"rule": 3}, "rule is 3")):
            with pytest.raises(InputError, match=words):
                next(pair.generate(QUESTION, **options))
    for context, length in ((32, 32), (None, 64)):
        with edgespec.load(tmp_path / "device", context=context) as pair:
            assert pair._pair.target.engine.context_length == length


def test_unknown_options_are_refused_by_name(bundle: Path) -> None:
    with pytest.raises(InputError, match="thread"):
        edgespec.load(bundle, thread=1)
    with edgespec.load(bundle) as pair, pytest.raises(InputError, match="temprature"):
        list(pair.generate(QUESTION, temprature=1.0))


def test_export_and_verify_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_bundle import disturbed
    from tiny_models import make_model_folder

    target = make_model_folder(tmp_path / "target")
    drafter = disturbed(target, tmp_path / "drafter", 0.07)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = edgespec.export(target, drafter, out="~/out", precisions=["fp32"], formats=["onnx"])
    assert made == tmp_path / "out" / "bundle"
    file, models = tmp_path / "verify.json", [str(target), str(drafter)]
    found = edgespec.verify(made, models=models, acceptance_prompts=0, json=str(file))
    assert found["broken"] == []
    assert json.loads(file.read_text())["hashes"] == found["hashes"]
    with edgespec.load(made) as pair:
        assert list(pair.generate(QUESTION, max_new_tokens=2, draft_length=1))


def test_a_plan_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = edgespec.plan("tiny-chat", gpus="1xH100", device="laptop-cpu-x86", json=str(file))
    assert len(json.loads(file.read_text())["stages"]) == len(found["stages"]) > 0


def test_an_extra_that_is_not_installed_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install .`, which brings the runtime alone."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("gguf", "edgespec_export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        MissingExtra, match=r'edgespec.verify needs gguf, .* pip install "edgespec\[export\]"'
    ):
        edgespec.verify(bundle)


def test_every_public_name_can_be_had_and_no_other() -> None:
    assert all(getattr(edgespec, name) for name in edgespec.__all__)
    with pytest.raises(AttributeError, match="laod"):
        edgespec.laod("x")  # type: ignore[attr-defined]


def test_type_checkers_know_the_public_names(tmp_path: Path) -> None:
    """One that is misspelt is an error, not a value of any type."""
    program = tmp_path / "program.py"
    program.write_text("import edgespec\n\npieces: list[edgespec.Piece] = []\nedgespec.laod('x')\n")
    flags = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, "edgespec/__init__.py", str(program)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert ["program.py:4:" in line and '"laod"' in line for line in errors] == [True], done.stdout


def test_import_is_instant() -> None:
    """Nothing but the standard library is loaded until something is used."""
    program = "import sys, json, edgespec; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"numpy", "yaml", "torch", "onnxruntime", "edgespec_runtime", "edgespec_recipes"}
