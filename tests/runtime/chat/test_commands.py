"""Every command of a chat, on a real bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import new_chat, said
from edgespec_runtime.chat import saved
from edgespec_runtime.chat.commands import BY_NAME, COMMANDS, handle
from edgespec_runtime.chat.settings import SETTABLE
from edgespec_runtime.chat.terminal import TEXT_COMMANDS
from edgespec_runtime.pair.bundle import Pair

from edgespec.core.errors import EdgespecError, InputError


def test_every_command_and_every_knob_is_in_the_help(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    handle(chat, "/help")
    shown = capsys.readouterr().err
    for command in COMMANDS:
        assert f"{command.usage} " in shown
        assert command.help in shown
    assert "Ctrl-C" in shown
    handle(chat, "/set")
    shown = capsys.readouterr().err
    assert all(f"  {name} = " in shown for name in SETTABLE)
    assert "temperature = 0.0" in shown
    assert {"temperature", "top_p", "max_new_tokens", "seed", "rule", "colour", "markdown", "draft"} <= set(
        SETTABLE
    )
    assert not {"bundle", "engine", "system", "continue_"} & set(SETTABLE)


def test_set_checks_as_the_command_line_does(pair: Pair) -> None:
    chat = new_chat(pair)
    for line in ("/set temperature 0.7", "/set top-k = 5", "/set colour off", "/set draft_length auto"):
        handle(chat, line)
    options = chat.options
    assert (options.temperature, options.top_k, options.colour, options.draft_length) == (0.7, 5, False, None)
    for line, words in (
        ("/set temperature -1", "temperature is -1.0; it must be at least 0.0"),
        ("/set draft_length 0", "draft_length is 0; it must be at least 1"),
        ("/set top_p x", "top_p is 'x'; it must be a number"),
        ("/set temprature 1", "unknown knob 'temprature'; did you mean 'temperature'?"),
        ("/set bundle x", "unknown knob 'bundle'"),
        ("/set options", "unknown knob 'options'"),  # an argument of ours has that name
        ("/set self x", "unknown knob 'self'"),
        ("/sett seed 1", "unknown command '/sett'; did you mean '/set'?"),
        ("/etc/hosts what is it?", '""" before and behind a message sends it as it is'),
        ("/draft of", "/draft is 'of'; did you mean 'off'"),
        ("/gamma x", "draft_length is 'x'; it must be a whole number"),
        ("/rule losless", "did you mean 'lossless'"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            handle(chat, line)
    assert chat.options == options


def test_who_drafts_how_much_and_by_which_rule(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    for line, (draft, drafter, length, rule) in {
        "/draft off": (False, None, 3, None),
        "/draft lookup": (True, "lookup", 3, None),
        "/draft model": (True, "model", 3, None),
        "/draft on": (True, None, 3, None),
        "/gamma auto": (True, None, None, None),
        "/gamma 2": (True, None, 2, None),
        "/rule block": (True, None, 2, "block"),
        "/rule auto": (True, None, 2, None),
        "/rule": (True, None, 2, None),
    }.items():
        handle(chat, line)
        options = chat.options
        assert (options.draft, options.drafter) == (draft, drafter)
        assert (options.draft_length, options.rule) == (length, rule)
    shown = capsys.readouterr().err
    assert "no drafts" in shown
    assert "drafter lookup, γ 3, rule lossless" in shown
    assert "drafter model, γ 3, rule lossless" in shown
    assert "drafter hybrid, γ auto" in shown
    assert "there are: auto, " in shown
    handle(chat, "/draft off")
    handle(chat, "Hello")
    assert "drafts are off" in capsys.readouterr().err
    assert chat.totals.drafted == 0


def test_system_clear_stats_exit(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    handle(chat, "/stats")
    assert "no replies yet" in capsys.readouterr().err
    handle(chat, '/system """\nBe kind.\nBe brief.\n"""')
    assert chat.conversation.system == "Be kind.\nBe brief."
    handle(chat, "Hello")
    assert "Be kind." in pair.tokenizer.decode(chat.conversation.ids)
    handle(chat, "/stats")
    shown = capsys.readouterr().err
    assert "replies 1, tokens 12" in shown
    assert f"/{chat.totals.drafted} drafted accepted" in shown
    assert "τ" in shown
    chat.totals.blocks = 0  # as where the drafter wrote alone
    handle(chat, "/stats")
    alone = capsys.readouterr().err
    assert "α" in alone
    assert "τ" not in alone
    handle(chat, "/clear")
    assert chat.conversation.messages == []
    assert chat.conversation.system == "Be kind.\nBe brief."
    assert not chat.leaving
    handle(chat, "/quit")
    assert chat.leaving
    assert BY_NAME["/quit"] is BY_NAME["/exit"]


def test_texts_of_commands_stand_in_quotes_or_without(pair: Pair) -> None:
    chat = new_chat(pair)
    handle(chat, "Hello")
    for text in ('"""\nAnd\nlater?\n"""', "And\nlater?"):
        handle(chat, f"/edit {text}")
        assert said(chat)[::2] == ["And\nlater?"]
        handle(chat, f"/system {text}")
        assert chat.conversation.system == "And\nlater?"
    assert {command.names[0] for command in COMMANDS if "TEXT" in command.argument} == set(TEXT_COMMANDS)


def test_stats_leave_out_a_context_that_is_not_known(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    handle(chat, "Hello")
    handle(chat, f"/save {tmp_path / 'a.json'}")
    assert "1 turn to" in capsys.readouterr().err
    for line, shown in (
        ("", f"context {len(chat.conversation.ids)} of 256 tokens"),
        ("/system Be kind.", ""),
        ("And now?", " of 256 tokens"),
        (f"/load {tmp_path / 'a.json'}", ""),
        ("/clear", "context 0 of 256 tokens"),
    ):
        handle(chat, line)
        capsys.readouterr()
        handle(chat, "/stats")
        stats = capsys.readouterr().err
        assert shown in stats
        assert ("\ncontext" in stats) is bool(shown)


def test_what_stands_between_quotes_is_one_message(pair: Pair) -> None:
    chat = new_chat(pair)
    handle(chat, '"""\n/set is a command,\nand this is none\n"""')
    handle(chat, '"""one line"""')
    handle(chat, '"""\n"""')
    assert said(chat)[::2] == ["/set is a command,\nand this is none", "one line"]


def test_regenerate_takes_the_last_turn_back(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair)
    with pytest.raises(InputError, match="there is no message yet"):
        handle(chat, "/regenerate")
    handle(chat, "Hello")
    handle(chat, "And now?")
    before, ids = said(chat), list(chat.conversation.ids)
    handle(chat, "/regenerate")
    assert "greedy, so the same words come again" in capsys.readouterr().err
    assert said(chat) == before
    assert chat.conversation.ids == ids
    assert chat.last.computed == 0  # the cache holds all of the prompt
    chat.change(temperature="1.0", seed="3")
    handle(chat, "/regenerate")
    drawn = said(chat)
    handle(chat, "/regenerate")
    assert drawn[:3] == before[:3] == said(chat)[:3]
    assert len({before[3], drawn[3], said(chat)[3]}) == 3


def test_edit_answers_another_message_instead(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = new_chat(pair)
    handle(chat, "Hello")
    handle(chat, "And now?")
    with pytest.raises(InputError, match="/edit TEXT"):
        handle(chat, "/edit")
    handle(chat, "/edit And later?")
    assert said(chat)[::2] == ["Hello", "And later?"]
    chat.interactive = True
    handle(chat, "/edit")
    assert chat.prefill == "And later?"
    handle(chat, "/stats")  # something else: the next message is a new one
    assert chat.prefill is None
    handle(chat, "/edit")
    chat.interactive = False
    handle(chat, "And then?")
    assert said(chat)[::2] == ["Hello", "And then?"]


@pytest.mark.parametrize("message", ["/etc/hosts holds what?", '"""a docstring""" is what?', " /x\n/y"])
def test_a_message_that_looks_like_a_command_is_edited_in_its_quotes(pair: Pair, message: str) -> None:
    chat = new_chat(pair)
    handle(chat, f'"""{message}"""')
    chat.interactive = True
    handle(chat, "/edit")
    chat.interactive = False
    handle(chat, chat.prefill or "")  # Enter, with nothing changed
    assert said(chat)[::2] == [message]


def test_a_turn_stays_where_its_new_answer_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = new_chat(pair)
    handle(chat, "Hello")
    before = said(chat)
    with pytest.raises(EdgespecError, match="the message takes"):
        handle(chat, "/edit " + "word " * 400)
    assert said(chat) == before
    handle(chat, "And now?")
    assert said(chat)[:2] == before


def test_save_says_which_turns_a_file_has_no_room_for(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    one = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}]
    chat.conversation.reset(one * 10)
    monkeypatch.setattr(saved, "MAX_BYTES", 3000)
    handle(chat, f"/save {tmp_path / 'a.json'}")
    written = len(json.loads((tmp_path / "a.json").read_text())["messages"]) // 2
    assert 0 < written < 10
    shown = capsys.readouterr().err
    assert f"wrote {written} turns to " in shown
    assert f"the oldest {10 - written} are not in it" in shown


def test_save_and_load(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair, system="Be kind.")
    handle(chat, "Hello")
    handle(chat, "Zażółć 🙂")
    file = tmp_path / "a chat.json"
    handle(chat, f"/save {file}")
    handle(chat, f"/save {file}")  # over itself
    other = new_chat(pair)
    handle(other, f"/load {file}")
    assert said(other) == said(chat)
    assert other.conversation.system == "Be kind."
    assert "going on behind 2 turns; the last message was: Zażółć 🙂" in capsys.readouterr().err
    replies = []
    for one in (chat, other):
        handle(one, "And now?")
        replies.append(said(one)[-1])
    assert replies[0] == replies[1]
    handle(chat, "/clear")
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(InputError, match="is no saved chat"):
        handle(chat, f"/save {tmp_path / 'mine.json'}")
    assert (tmp_path / "mine.json").read_text() == "{}"
    for line in ("/save", "/load"):
        with pytest.raises(InputError, match="takes a file"):
            handle(chat, line)
        for name in (
            "~nobody-of-this-name/x.json",
            f"{tmp_path}/mine.json/x.json",
            f"{tmp_path}/{'x' * 300}",
        ):
            with pytest.raises(InputError):
                handle(chat, f"{line} {name}")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "is no saved chat of schema 1"),
        ({"schema": 2, "messages": []}, "is no saved chat of schema 1"),
        ({"schema": 1}, "has no list of messages"),
        ({"schema": 1, "messages": [{"role": "assistant", "content": "a"}]}, "message 1 is .* a user's"),
        ({"schema": 1, "messages": [{"role": "user", "content": 3}]}, "message 1 is"),
        ({"schema": 1, "messages": ["user"]}, "message 1 is 'user'"),
        ({"schema": 1, "messages": [{"role": "user", "content": "a"}]}, "the assistant's answer is missing"),
        (
            {"schema": 1, "messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "message 2 is .* an? assistant's",
        ),
        ({"schema": 1, "messages": [{"role": "user", "content": "\ud83d"}]}, "half a character"),
    ],
)
def test_a_file_that_is_no_chat_changes_nothing(pair: Pair, tmp_path: Path, value: Any, words: str) -> None:
    chat = new_chat(pair)
    handle(chat, "Hello")
    before = said(chat)
    (tmp_path / "f.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=words):
        handle(chat, f"/load {tmp_path / 'f.json'}")
    assert said(chat) == before


def test_compare_shows_both_replies_and_leaves_the_conversation(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair)
    with pytest.raises(InputError, match="there is no message yet"):
        handle(chat, "/compare")
    handle(chat, "Hello")
    reply = capsys.readouterr().out
    turns, ids = said(chat), list(chat.conversation.ids)
    handle(chat, "/compare")
    shown = capsys.readouterr()
    assert shown.out == reply * 2
    assert re.search(r"plain: \d+\.\d\d s, [\d.]+ tok/s\n", shown.err)
    assert re.search(r"speculative: .*, \d+/\d+ drafted accepted", shown.err)
    assert re.search(r"[\d.]+x plain · the same 12 tokens", shown.err)
    handle(chat, "/compare And now?")
    assert (said(chat), chat.conversation.ids) == (turns, ids)
    handle(chat, "And now?")
    assert (
        capsys.readouterr().out.splitlines()[0] == chat.conversation.messages[-1]["content"].splitlines()[0]
    )
    chat.change(temperature="1.0")
    handle(chat, "/compare")
    assert "other words, as of any two draws" in capsys.readouterr().err
