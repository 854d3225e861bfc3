"""The chat in a pseudo-terminal: Ctrl-C, Ctrl-D, colours, escape codes."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from edgespec_runtime.chat.terminal import dim, harmless, has_colour
from repository import PYTHONPATH, REPOSITORY

# The real program on the real engine, only slower, so that there is time to press Ctrl-C.
# A terminal's programs start with Ctrl-C in force; the test run itself may have been started with it ignored (nohup, CI).
SLOW = """
import fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
forward = OnnxRuntimeEngine.forward
def slowly(self, tokens):
    time.sleep(0.01)
    return forward(self, tokens)
OnnxRuntimeEngine.forward = slowly
from edgespec.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.master, slave = os.openpty()
        variables = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "TERM": "xterm",
            "INPUTRC": "/dev/null",
            **environment,
        }
        command = [sys.executable, "-c", SLOW, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=REPOSITORY,
            env=variables,
        )
        os.close(slave)
        self.text = ""

    def send(self, text: str) -> None:
        time.sleep(
            0.3
        )  # a key pressed in the instant between the prompt and readline's first read would be held back
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """Read until the pattern shows; returns what came up to its end and forgets it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # the program has ended
                raise AssertionError(f"ended without {pattern!r}: {self.text!r}") from None
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def end(self) -> int:
        """Exit code, once everything the program wrote has been read."""
        while True:
            ready, _, _ = select.select([self.master], [], [], 20)
            assert ready, "the program does not end"
            try:
                data = os.read(self.master, 65536)
            except OSError:
                break
            if not data:
                break
            self.text += data.decode("utf-8", "replace")
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(bundle: Path) -> Iterator[Terminal]:
    pytest.importorskip("termios")
    opened = Terminal("chat", str(bundle), "--draft-length", "3", "--max-new-tokens", "200", NO_COLOR="1")
    yield opened
    opened.close()


def test_ctrl_c_stops_the_reply_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.send("Hello there\n")
    terminal.wait_for(r"Hello there\r\n[^\r]")  # the reply has begun
    terminal.send("\x03")
    stats = terminal.wait_for(r"stopped by Ctrl-C\]")
    emitted = int(re.search(r"\[(\d+) tokens", stats).group(1))  # type: ignore[union-attr]
    assert 0 < emitted < 200
    terminal.wait_for("> ")
    terminal.send("/set max_new_tokens 5\n")
    terminal.wait_for("> ")
    terminal.send("And now?\n")
    stats = terminal.wait_for(r"\[5 tokens [^\]]*\]")
    computed, of = map(int, re.search(r"\((\d+) of (\d+) prompt tokens", stats).groups())  # type: ignore[union-attr]
    assert computed < 40 < of  # the cache survived the interruption
    terminal.wait_for("> ")
    terminal.send("/quit\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_ctrl_c_or_ctrl_d_twice_at_the_prompt_leaves(terminal: Terminal, key: str) -> None:
    terminal.wait_for("> ")
    terminal.send(key)
    terminal.wait_for("to leave")
    terminal.wait_for("> ")
    terminal.send("/reset\n")  # something else in between: not twice
    terminal.wait_for("empty")
    terminal.wait_for("> ")
    terminal.send(key)
    terminal.wait_for("to leave")
    terminal.wait_for("> ")
    terminal.send(key)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_colours_only_where_they_are_wanted(bundle: Path, terminal: Terminal) -> None:
    coloured = Terminal(
        "chat", str(bundle), "--draft-length", "3", "--max-new-tokens", "20", "--colour", NO_COLOR=""
    )
    try:
        coloured.wait_for("> ")
        coloured.send("Hello\n")
        seen = coloured.wait_for(r"tok/s")
        assert "\x1b[2m" in seen
    finally:
        coloured.close()
    terminal.wait_for("> ")
    terminal.send("/set colour on\n")
    terminal.wait_for("> ")
    terminal.send("/set max_new_tokens 20\n")
    terminal.wait_for("> ")
    terminal.send("Hello\n")
    assert "\x1b[2m" not in terminal.wait_for(r"tok/s")


def test_escape_codes_of_a_model_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert harmless("a\x1b[31mb\x07\r\n\té\u009b") == "a\ufffd[31mb\ufffd\ufffd\n\té\ufffd"
    assert dim("") == ""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert has_colour(Screen())
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Screen())
