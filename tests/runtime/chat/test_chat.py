"""The chat on a real bundle: cache across turns, drafters, a pipe. Commands: test_commands.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chats import new_chat, piped, said
from edgespec_runtime.chat.commands import handle
from edgespec_runtime.chooser.expected_acceptance import UNKNOWN
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.options import MODEL
from edgespec_runtime.decoding.speed import plain_step_seconds
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from simulated_machine import STEEP, costs_of

from edgespec.cli import main
from edgespec.core.errors import InputError

# Turns and the cache


def test_a_second_turn_computes_only_what_is_new(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    chat.reply("Hello there")
    first = len(chat.conversation.ids)
    assert chat.last.computed == first - 12 - 1  # all but the prompt's last token: the first block reads it
    kept = list(chat.conversation.ids)
    chat.reply("And now?")
    assert chat.conversation.ids[:first] == kept
    new = len(chat.conversation.ids) - 12 - first
    assert chat.last.computed == new  # the reply's last token and the message, less the one the block reads
    assert chat.last.computed < 30 < first
    assert f"({new} of {first + new} prompt tokens computed)" in capsys.readouterr().err


def test_a_turn_answered_from_the_cache_is_answered_as_from_scratch(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    for text in ("Hello there", "And now?", "Why?"):
        chat.reply(text)
    ids = chat.conversation.ids
    fresh = new_chat(pair)
    fresh.conversation.messages, fresh.conversation.ids = chat.conversation.messages[:4], []
    prompt = ids[:-12]
    fresh.conversation.prompt = lambda text: prompt  # type: ignore[method-assign]
    fresh.reply("Why?")
    assert fresh.last.computed == len(prompt) - 1
    assert fresh.conversation.ids == ids


def test_speculation_gives_the_plain_reply(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    replies = []
    for draft in (True, False):
        chat = new_chat(pair, draft=draft, max_new_tokens=60)
        for text in ("Hello there", "And now?"):
            chat.reply(text)
        replies.append(chat.conversation.messages)
        assert (chat.totals.drafted > 0) is draft
    assert replies[0] == replies[1]
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) >= 4
    assert all("est. " in line and "τ" in line and "tok/s" in line for line in errors[:2])
    assert not any("est. " in line or "τ" in line for line in errors[2:])


def test_timing_plain_steps_leaves_the_cache_as_it_was(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    chat.reply("Hello")
    tokens = list(pair.target.tokens)
    seconds = plain_step_seconds(pair.target, chat.options)
    assert seconds is not None
    assert 0 < seconds < 1
    assert pair.target.tokens == tokens
    assert pair.target.engine.n_past == len(tokens)
    pair.target.rewind(0)
    assert plain_step_seconds(pair.target, chat.options) is None


def test_the_conversation_goes_on_beyond_the_context(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair, max_new_tokens=40, system="Be brief.")
    for number in range(12):
        chat.reply(f"Question number {number}, please answer it")
        assert len(chat.conversation.ids) <= pair.target.engine.context_length
    assert re.search(
        r"context of 256 tokens is full: the model no longer reads the oldest (turn|\d+ turns)\)",
        capsys.readouterr().err,
    )
    assert chat.conversation.messages[0]["content"] == "Question number 0, please answer it"
    assert len(chat.conversation.messages) == 24
    read = pair.tokenizer.decode(chat.conversation.ids)
    assert "Be brief." in read
    assert "number 0" not in read


def test_sampled_replies_differ_from_turn_to_turn_and_repeat_with_the_seed(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    def replies(seed: int) -> list[str]:
        chat = new_chat(pair, temperature=1.0, seed=seed)
        said = []
        for _ in range(2):
            chat.reply("Hello")
            chat.conversation.reset()
            said.append(capsys.readouterr().out)
        return said

    assert replies(1) == replies(1)
    assert len({*replies(1), *replies(9)}) == 4


def test_a_drafter_that_was_not_loaded_cannot_be_switched_on(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        chat = new_chat(opened, draft=False, max_new_tokens=8)
        with pytest.raises(InputError, match=r"draft is on.*start the chat without --no-draft"):
            handle(chat, "/set draft on")
        assert not chat.options.draft
        handle(chat, "/set drafter lookup")
        handle(chat, "/set draft on")
        chat.reply("one two one two one two")
        with pytest.raises(InputError, match=r"drafter is hybrid.*start the chat without --no-draft"):
            handle(chat, "/set drafter hybrid")
        assert chat.options.drafter == "lookup"
    finally:
        opened.close()


def test_every_drafter_gives_the_plain_reply(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    replies = []
    for drafter in ("model", "lookup", "hybrid"):
        chat = new_chat(pair, drafter=drafter, max_new_tokens=40)
        for text in ("Hello there", "And now?", "Hello there"):
            chat.reply(text)
        replies.append(said(chat))
        assert chat.totals.drafted > 0
    assert replies[0] == replies[1] == replies[2]


def test_a_rule_that_needs_the_drafters_distribution_is_refused_beside_lookup(pair: Pair) -> None:
    chat = new_chat(pair, drafter="lookup")
    with pytest.raises(InputError, match=r"rule 'chow:a=0\.3' weighs the drafter model's own distribution"):
        handle(chat, "/set rule chow:a=0.3")
    assert chat.options.rule is None
    handle(chat, "/set drafter model")
    handle(chat, "/set rule chow:a=0.3")
    with pytest.raises(InputError, match="drafter 'hybrid' copies tokens without one"):
        handle(chat, "/set drafter hybrid")


def test_a_reply_says_why_there_are_no_drafts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Schedules, "_costs", costs_of(STEEP, 0.1))
    chat = new_chat(pair, draft_length=None, max_new_tokens=30, drafter=MODEL)
    chat.reply("Hello")
    shown = capsys.readouterr().err
    needed, has = re.search(  # type: ignore[union-attr]
        r"off: a draft of 1 token and its pass cost [\d.]+ plain steps here; "
        r"the drafter would need α ([\d.]+), it has ([\d.]+) · context",
        shown,
    ).groups()
    assert float(needed) > float(has) == UNKNOWN
    assert chat.last.off in shown
    assert "x plain" not in shown


# In a pipe


def test_a_pipe_gets_replies_and_nothing_else(
    bundle: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    chat.reply("Hello there")
    chat.reply("And now?")
    wanted = capsys.readouterr().out
    done = piped("chat", bundle, b"Hello there\n\n/set seed 3\nAnd now?\n", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == wanted
    assert b"\x1b" not in done.stderr
    assert done.stderr.count(b"tok/s") == 2
    assert b"Traceback" not in done.stderr


def test_quiet_leaves_the_replies_and_what_was_asked_for(bundle: Path) -> None:
    """Errors stay too; confirmations and the figures of a reply do not."""
    lines = b"\n".join([b"Hello", b"/gamma 2", b"/set temperature -1", b"/gamma", b"/stats"])
    loud, quiet = (
        piped("chat", bundle, lines, "--max-new-tokens", "12", *flags) for flags in ((), ("--quiet",))
    )
    assert loud.returncode == quiet.returncode == 2
    assert quiet.stdout == loud.stdout != b""
    assert b"tok/s \xc2\xb7" in loud.stderr
    first, second, third, *_ = quiet.stderr.decode().splitlines()
    assert first.startswith("temperature is -1")
    assert "drafter hybrid, γ 2, rule" in second
    assert third.startswith("replies 1, tokens 12")


def test_what_a_pipe_cannot_answer_is_said_and_the_rest_is_answered(bundle: Path) -> None:
    """A message beyond the context, a wrong knob, bytes that are no text: each one line, and exit code 2 at the end."""
    long = b"word " * 400 + b"\n" + b"word " * 10**6 + b"\n"
    rest = b"/set temperature -1\ncaf\xe9\nHello\n/quit\nnever"
    done = piped("chat", bundle, long + rest, "--max-new-tokens", "4", "--no-draft")
    assert done.returncode == 2
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 5
    assert re.search(r"message takes \d+ tokens and the context has room for 252", errors[0])
    assert re.search(r"message takes more than \d{4,5} tokens and the context has room for 252", errors[1])
    assert "temperature is -1.0" in errors[2]
    assert "a line of standard input is not UTF-8: 'utf-8' codec can't decode byte 0xe9" in errors[3]
    assert "tok/s" in errors[4]


def test_a_folder_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path)]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err
