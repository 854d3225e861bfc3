"""What a person types: several lines, pastes, history across starts, completion; and messages from a pipe."""

from __future__ import annotations

import io
import json
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edgespec_runtime.chat import keyboard as keyboard_module
from edgespec_runtime.chat import terminal
from edgespec_runtime.chat.commands import COMMANDS
from edgespec_runtime.chat.keyboard import ChatHistory, Commands, Keyboard
from edgespec_runtime.chat.terminal import Read
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgespec.core.errors import InputError

UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b\r", "\x03", "\x04"
CTRL_G, CTRL_R, CTRL_Z = "\x07", "\x12", "\x1a"
PASTE, END = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as opened:
        yield opened


@pytest.fixture
def keyboard(keys: PipeInput, tmp_path: Path) -> Callable[[], Keyboard]:
    """A keyboard as a new start of the chat has it."""
    return lambda: Keyboard(tmp_path / "history.jsonl", input=keys, output=DummyOutput())


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("Hello\r", "Hello"),
        ('"""\rone\r/two\r"""\r', '"""\none\n/two\n"""'),
        ('"""one\rtwo"""\r', '"""one\ntwo"""'),
        ('/system """one\rtwo"""\r', '/system """one\ntwo"""'),
        ('/set """\r', '/set """'),
        (f"one{ALT_ENTER}two\r", "one\ntwo"),
        (f"{PASTE}one\r\n  two\nthree{END}\r", "one\n  two\nthree"),
        (f"thrown away{CTRL_C}", ""),
        (CTRL_D, None),
    ],
)
def test_what_is_typed_is_read(
    keys: PipeInput, keyboard: Callable[[], Keyboard], typed: str, read: str | None
) -> None:
    keys.send_text(typed)
    assert keyboard().read() == read


def test_ctrl_c_at_an_empty_prompt_and_a_message_to_edit(
    keys: PipeInput, keyboard: Callable[[], Keyboard]
) -> None:
    keys.send_text(CTRL_C)
    with pytest.raises(KeyboardInterrupt):
        keyboard().read()
    keys.send_text(" and more\r")
    assert keyboard().read("Hello") == "Hello and more"


def test_a_search_of_the_history_ends_and_the_prompt_lives_on(
    keys: PipeInput, keyboard: Callable[[], Keyboard]
) -> None:
    for typed, read in (
        ("one\r", "one"),
        (f"{CTRL_R}on\r\r", "one"),
        (f"half{CTRL_R}on{CTRL_C} done\r", "half done"),
    ):
        keys.send_text(typed + CTRL_G + CTRL_D)  # so that a prompt that still waits ends too
        prompt = keyboard()
        assert prompt.read() == read
        assert prompt.read() is None


def test_ctrl_z_hands_the_terminal_to_the_shell(
    keys: PipeInput, keyboard: Callable[[], Keyboard], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("termios")
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *given: sent.append(given))  # it would stop the test run too
    keys.send_text(f"be{CTRL_Z}fore\r")
    assert keyboard().read() == "before"
    assert sent == [(0, signal.SIGTSTP)]


def test_bytes_that_are_no_text_are_refused_and_what_follows_is_read(
    keys: PipeInput, keyboard: Callable[[], Keyboard]
) -> None:
    keys.send_bytes(b"caf\xe9\r")
    with pytest.raises(InputError, match="what was typed: the text has 'caf"):
        keyboard().read()
    keys.send_text(f"{UP}\x7f\x7fke\r")  # it can be had again and put right
    assert keyboard().read() == "cake"


def test_what_was_typed_comes_back_after_a_new_start(
    keys: PipeInput, keyboard: Callable[[], Keyboard], tmp_path: Path
) -> None:
    for text in ("first\r", '"""\rsecond\r"""\r'):
        keys.send_text(text)
        keyboard().read()
    file = tmp_path / "history.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys.send_text(f"{UP}\r")
    assert keyboard().read() == '"""\nsecond\n"""'
    assert [json.loads(line) for line in file.read_text().splitlines()] == ["first", '"""\nsecond\n"""']


def test_the_history_is_bounded_and_forgives_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyboard_module, "MOST_LINES", 3)
    monkeypatch.setattr(keyboard_module, "MAX_BYTES", 200)
    file = tmp_path / "history.jsonl"
    file.write_bytes(b'{"a": 1}\n\xff\xfe\n"cut\n' + b'"old"\n' * 40 + b'"one"\n"two"\n"three"\n')
    assert list(ChatHistory(file).load_history_strings()) == ["three", "two", "one"]
    assert file.read_text() == '"one"\n"two"\n"three"\n'
    history = ChatHistory(file)
    history.store_string("x" * (keyboard_module.MAX_ENTRY + 1))
    assert file.read_text() == '"one"\n"two"\n"three"\n'
    nowhere = ChatHistory(tmp_path / "none" / "history.jsonl")
    nowhere.store_string("lost with the chat")
    assert list(nowhere.load_history_strings()) == []
    (tmp_path / "folder").mkdir()
    assert list(ChatHistory(tmp_path / "folder").load_history_strings()) == []


def completed(text: str) -> list[str]:
    found = Commands().get_completions(Document(text, len(text)), CompleteEvent())
    return [text[: len(text) + one.start_position] + one.text for one in found]


def test_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat one.json").touch()
    (tmp_path / "chats").mkdir()
    assert completed("/") == [command.names[0] for command in COMMANDS]
    assert completed("/re") == ["/regenerate"]
    assert completed("/set temp") == ["/set temperature"]
    assert completed("/set drafter ") == [
        f"/set drafter {name}" for name in ("model", "lookup", "hybrid", "auto")
    ]
    assert completed("/set colour o") == ["/set colour on", "/set colour off"]
    assert completed("/rule bl") == ["/rule block"]
    assert completed("/gamma ") == ["/gamma auto"]
    assert completed("/load ch") == ["/load chat one.json", "/load chats"]
    assert completed(f"/save {tmp_path}/chats") == [f"/save {tmp_path}/chats"]
    for text in ("", "Hello", "see /re", "/nothing ", "/stats ", "/re\nsecond line"):
        assert completed(text) == []


# From a pipe


def piped(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    return terminal.piped


def test_lines_of_a_pipe_are_messages_and_quotes_hold_several(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = piped(b'\xef\xbb\xbfone\r\n\n"""\ntwo\n\nthree\n"""\n"""four"""\n"""\nopen', monkeypatch)
    assert [pipe("") for _ in range(4)] == ["one", "", '"""\ntwo\n\nthree\n"""', '"""four"""']
    with pytest.raises(InputError, match=r'opens a message with """ that does not end'):
        pipe("")
    assert pipe("") is None


@pytest.mark.parametrize("command", ["/system", "/edit ", "/compare"])
def test_quotes_behind_a_command_hold_several_lines_of_a_pipe(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'{command} """You are a pirate.\nSay arr."""'
    pipe = piped(f'{text}\n{command}\n{command} """one"""\n/load """\nnext'.encode(), monkeypatch)
    assert [pipe("") for _ in range(5)] == [text, command, f'{command} """one"""', '/load """', "next"]


def test_a_line_or_a_message_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MAX_MESSAGE", 20)
    pipe = piped(b"x" * 70 + b"\nnext\n" + b'"""\n' + b"12345678\n" * 3 + b"last\n", monkeypatch)
    with pytest.raises(InputError, match="a line of standard input exceeds 20 bytes"):
        pipe("")
    assert pipe("") == "next"
    with pytest.raises(InputError, match="a message exceeds 20 bytes"):
        pipe("")
    assert pipe("") is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b'"""\nfirst\ncaf\xe9\nlast\n"""', "is not UTF-8"),
        (b'"""caf\xe9\nlast\n"""', "is not UTF-8"),
        (b'"""\nfirst\ncaf\xe9"""', "is not UTF-8"),
        (b'"""\nfirst\n' + b"x" * 70 + b'\nlast\n"""', "a line of standard input exceeds 20 bytes"),
        (b'"""' + b"x" * 70 + b'\nlast\n"""', "a line of standard input exceeds 20 bytes"),
        (b'/compare """' + b"x" * 70 + b'\nlast\n"""', "a line of standard input exceeds 20 bytes"),
        (b'"""\nfirst\n' + b"x" * 38 + b'"""', "a line of standard input exceeds 20 bytes"),
        (b'"""\n' + b"12345678\n" * 3 + b'last\n"""', "a message exceeds 20 bytes"),
        (b"caf\xe9 and x", "is not UTF-8"),
    ],
)
def test_a_message_that_is_refused_ends_where_its_quotes_do(
    message: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "MAX_MESSAGE", 20)
    pipe = piped(message + b"\nSecond?\nThird?\n", monkeypatch)
    with pytest.raises(InputError, match=words):
        pipe("")
    assert [pipe("") for _ in range(3)] == ["Second?", "Third?", None]
