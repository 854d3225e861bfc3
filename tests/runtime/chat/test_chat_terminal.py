"""The whole program in a pseudo-terminal: Ctrl-C, Ctrl-D, several lines, history and conversation across starts, colours."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
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


PROMPT = r">(?: |\x08\x1b\[2C)"
BEGUN = r"\?2004l[^\x1b\r]"  # the prompt has let go of the terminal, and a plain reply has begun


class Terminal:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.master, slave = os.openpty()
        variables = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "TERM": "xterm",
            "NO_COLOR": "",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
            **environment,
        }
        command = [sys.executable, "-c", SLOW, *arguments]
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(
            command, **ends, start_new_session=True, cwd=REPOSITORY, env=variables
        )
        os.close(slave)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def type(self, text: str) -> None:
        """What a person types once the prompt shows."""
        self.wait_for(PROMPT)
        self.send(text)

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
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
            ready, _, _ = select.select([self.master], [], [], 60)
            assert ready, "the program does not end"
            try:
                data = os.read(self.master, 65536)
            except OSError:
                break
            if not data:
                break
            self.text += data.decode("utf-8", "replace")
        return self.process.wait(60)


def opened(bundle: Path, *flags: str, **environment: str) -> Terminal:
    pytest.importorskip("termios")
    return Terminal(
        "chat", str(bundle), "--draft-length", "3", "--max-new-tokens", "200", *flags, **environment
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own: no chat and no history is there yet."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def terminal(bundle: Path, home: Path) -> Iterator[Terminal]:
    """As plain text: without colours nothing is drawn twice, so that what is written can be read."""
    with opened(bundle, NO_COLOR="1") as one:
        yield one


@pytest.mark.parametrize("colour", ["", "1"])
def test_ctrl_c_stops_the_reply_and_not_the_chat(bundle: Path, home: Path, colour: str) -> None:
    with opened(bundle, NO_COLOR=colour) as terminal:
        terminal.type("Hello there\r")
        terminal.wait_for("tok/s" if not colour else BEGUN)  # the reply has begun
        terminal.send("\x03")
        stats = terminal.wait_for(r"stopped by Ctrl-C; once more leaves")
        emitted = int(re.findall(r"(\d+) tokens ·", stats)[-1])
        assert 0 < emitted < 200
        terminal.type("/set max_new_tokens 5\r")
        terminal.wait_for("max_new_tokens = 5")
        terminal.type("And now?\r")
        stats = " ".join(terminal.wait_for(r"prompt\s+tokens\s+computed").split())
        computed, of = map(int, re.search(r"\((\d+) of (\d+) prompt tokens", stats).groups())  # type: ignore[union-attr]
        assert computed < 40 < of  # the cache survived the interruption
        terminal.type("/exit\r")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text


def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal) -> None:
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again, Ctrl-D or /exit leaves")
    terminal.type("/clear\r")  # something else in between: not twice
    terminal.wait_for("is empty")
    terminal.type("thrown away\x03")
    terminal.wait_for(f"2004l.*{PROMPT}")
    terminal.send("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.type("\x03")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_ctrl_d_leaves_and_a_reply_that_was_stopped_is_the_first_ctrl_c(
    terminal: Terminal, bundle: Path
) -> None:
    terminal.type("Hello\r")
    terminal.wait_for(BEGUN)
    terminal.send("\x03")
    terminal.wait_for("once more leaves")
    terminal.type("\x03")
    assert terminal.end() == 0
    with opened(bundle) as other:
        other.type("\x04")
        assert other.end() == 0


def test_several_lines_and_what_a_new_start_remembers(bundle: Path, home: Path, terminal: Terminal) -> None:
    terminal.type("/set max_new_tokens 4\r")
    terminal.wait_for("max_new_tokens = 4")
    terminal.type('"""\rone\r/two\r"""\r')
    terminal.wait_for("tok/s")
    terminal.type("\x1b[200~pasted\ntext\x1b[201~\r")
    terminal.wait_for("tok/s")
    terminal.type("/edit\r")
    terminal.wait_for("text")
    terminal.send(" changed\r")
    terminal.wait_for("tok/s")
    terminal.type("\x04")
    assert terminal.end() == 0
    (file,) = (home / "chat" / "last").glob("*.json")
    messages = json.loads(file.read_text())["messages"]
    assert [one["content"] for one in messages[::2]] == ["one\n/two", "pasted\ntext changed"]
    with opened(bundle, "--continue", NO_COLOR="1") as again:
        again.wait_for("going on behind 2 turns; the last message was: pasted text changed")
        again.type("\x1b[A\r")  # the newest line of the history
        stats = again.wait_for("prompt tokens computed")
        assert int(re.search(r"of (\d+) prompt", stats).group(1)) > 30  # type: ignore[union-attr]
        again.type("/regenerate\r")
        again.wait_for("tok/s")
        again.type("\x04")
        assert again.end() == 0
    messages = json.loads(file.read_text())["messages"]
    assert [one["content"] for one in messages[4::2]] == ["pasted\ntext changed"]


def test_colours_only_where_they_are_wanted(bundle: Path, home: Path) -> None:
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with opened(bundle, "--max-new-tokens", "20", **environment) as terminal:
            terminal.type("Hello\r")
            seen = terminal.wait_for("first token after")
            terminal.type("/exit\r")
            assert terminal.end() == 0
        assert ("\x1b[32m" in seen) is coloured
        assert ("drafted accepted" in seen.partition("Hello")[2].partition("20 tokens ·")[0]) is coloured


def test_ctrl_c_ends_a_piped_chat_that_waits(bundle: Path) -> None:
    """As any program in a pipe ends by it: with the code of a signal."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    flags = ("--max-new-tokens", "2", "--draft-length", "1")
    words = [sys.executable, "-c", program, "chat", str(bundle), *flags]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, cwd=REPOSITORY, env=environment, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("Hi\n")
        process.stdin.flush()
        assert process.stdout.readline()  # it has answered, and waits for more
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
