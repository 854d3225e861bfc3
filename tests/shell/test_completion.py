"""Completions in the shells themselves: verbs, flags, values, names, files with odd names. PowerShell: form only."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from edgespec.cli import VERBS, main, parser_of
from edgespec.completion import SHELLS, grammar
from edgespec.shell.grammar import FOLDERS, FREE

PATIENCE = 60  # seconds for a shell to show a completion on a busy machine


@cache
def script(shell: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["completion", shell]) == 0
    return said.getvalue()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts below `made`, and with odd names."""
    (tmp_path / "made").mkdir()
    for shell in SHELLS:
        (tmp_path / "made" / shell).write_text(script(shell))
    (tmp_path / "odd names").mkdir()
    (tmp_path / "odd names" / "some prompts.jsonl").touch()
    (tmp_path / "$(touch run)").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bash(*words: str) -> list[str]:
    """What bash offers for the last word."""
    asked = " ".join(map(shlex.quote, words))
    program = (
        f"source made/bash; COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _edgespec; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return list(filter(None, done.stdout.splitlines()))


def fish(*words: str) -> list[str]:
    asked = shlex.quote(" ".join(words))
    command = ["fish", "--private", "-c", f"source made/fish; complete -C {asked}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "HOME": os.getcwd()}
    )
    assert not done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "shell", [bash, pytest.param(fish, marks=pytest.mark.skipif(not shutil.which("fish"), reason="no fish"))]
)
def test_what_may_stand_at_a_place_is_offered(shell: object, place: Path) -> None:
    def offered(*words: str) -> set[str]:
        return set(shell(*words))  # type: ignore[operator]

    assert offered("edgespec", "c") == {"chat", "config", "completion"}
    assert offered("edgespec", "chat", "--rul") == {"--rule"}
    assert offered("edgespec", "chat", "--rule", "lo") == {"lossless", "lossy", "lossy-star"}
    assert offered("edgespec", "tradeoff", "x", "--metric", "rouge-2,ag") == {"rouge-2,agreement"}
    assert offered("edgespec", "targets", "") == {"list", "show", "path"}
    assert offered("edgespec", "targets", "--json", "show", "llama") == {
        "llama-2-7b-chat",
        "llama-2-13b-chat",
    }
    assert offered("edgespec", "targets", "--json", "--qu") == {"--quiet"}
    assert offered("edgespec", "plan", "--target", "qwen3-0") == {"qwen3-0.6b"}
    assert offered("edgespec", "chat", "smol") == {"smollm2-135m-instruct"}
    assert offered("edgespec", "recipes", "check", "quick", "tv") == {"tvdpp"}
    assert offered("edgespec", "completion", "") == set(SHELLS)
    assert not offered("edgespec", "generate", "x", "--system", "")
    assert not offered("edgespec", "generate", "x", "--seed", "")


def test_bash_offers_paths_and_runs_no_names(place: Path) -> None:
    assert bash("edgespec", "verify", "--prompts", "odd") == ["odd names"]
    assert bash("edgespec", "verify", "--prompts", "odd names/") == ["odd names/some prompts.jsonl"]
    assert bash("edgespec", "targets", "--json", "odd") == ["odd names"]
    assert bash("edgespec", "chat", "od") == ["odd names"]
    assert not bash("edgespec", "chat", "odd names/")  # a bundle is a folder, and there is a file
    assert "$(touch run)" in bash("edgespec", "verify", "--prompts", "")
    assert bash("edgespec", "chat", "--rule", "=", "lossl") == ["lossless"]
    assert bash("edgespec", "chat", "$(touch run)") == []
    assert not (place / "run").exists()


TYPED = {
    "edgespec othe": "edgespec other-engines ",
    "edgespec chat --ru": "edgespec chat --rule=",
    "edgespec chat --rule lossl": "--rule lossless ",
    "edgespec targets show llama-2-7": "show llama-2-7b-chat ",
    "edgespec chat smol": "chat smollm2-135m-instruct ",
    "edgespec tradeoff x --metric rouge-2,ag": "rouge-2,agreement",
    "edgespec recipes check quick tv": "quick tvdpp ",
    "edgespec verify --prompts odd": r"--prompts odd\ names/",
}


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_completes_what_is_typed(place: Path) -> None:
    """In a terminal, as zsh completes nowhere else."""
    child, terminal = pty.fork()
    if not child:
        os.environ.update(TERM="dumb", COLUMNS="300", HOME=str(place), ZDOTDIR=str(place))
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        start = "autoload -Uz compinit; compinit -u -D; source made/zsh; PROMPT=; print rea''dy\n"
        os.write(terminal, start.encode())
        assert "ready" in read_until(terminal, r"\bready")
        for typed, wanted in TYPED.items():
            os.write(terminal, f"{typed}\t".encode())
            assert wanted in read_until(terminal, re.escape(wanted))
            os.write(terminal, b"\x15")  # ^U: the line is gone
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def read_until(terminal: int, pattern: str) -> str:
    """What a terminal has shown when the pattern is in it, or when time is over."""
    shown, end = "", time.monotonic() + PATIENCE
    while not re.search(pattern, shown) and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return shown


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_flag_is_in_every_script(shell: str) -> None:
    words = set(re.split(r"[\s'\[\]=(){};:|]+", script(shell)))
    mark = {"fish": lambda flag: flag.removeprefix("--")}.get(shell, lambda flag: flag)
    for verb in VERBS:
        assert verb in words
        flags = [flag for action in parser_of(verb)[1]._actions for flag in action.option_strings]
        assert not [flag for flag in flags if flag.startswith("--") and mark(flag) not in words]


def test_brackets_and_quotes_of_the_powershell_script_close() -> None:
    text = re.sub(r"'(?:[^']|'')*'", "''", re.sub(r"^\s*#.*$", "", script("powershell"), flags=re.MULTILINE))
    text = re.sub(r'"(?:\$\([^)]*\)|[^"])*"', '""', text)
    assert "'" not in text.replace("''", "")
    open_ones: list[str] = []
    for letter in text:
        if letter in "([{":
            open_ones.append(letter)
        elif letter in ")]}":
            assert open_ones.pop() + letter in ("()", "[]", "{}")
    assert not open_ones


def test_names_of_options_that_a_shell_treats_apart_are_options() -> None:
    slots = {slot.name for verb in grammar() for slot in verb.places}
    slots |= {flag.slot.name for verb in grammar() for flag in verb.flags if flag.slot}
    dotted = {action.dest for verb in VERBS for action in parser_of(verb)[1]._actions}
    assert slots | dotted >= (FREE | FOLDERS)
