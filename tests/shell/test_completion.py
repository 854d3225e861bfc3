"""What may stand at the cursor, and what the shells make of it: bash, zsh and fish run here. PowerShell: form only."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from repository import PYTHONPATH, REPOSITORY

from edgespec.cli import VERBS, main, parser_of
from edgespec.completion import FOLDERS, FREE, grammar
from edgespec.recipe.shipped import launch_files, shipped_recipes
from edgespec.recipe.targets import TARGETS
from edgespec.shell import offers
from edgespec.shell.offers import GRAMMAR, Offer, offered
from edgespec.shell.stubs import STUBS

PATIENCE = 60  # seconds for a shell to show a completion on a busy machine


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts and the program below `made`, and with odd names."""
    (tmp_path / "made").mkdir()
    for shell, stub in STUBS.items():
        (tmp_path / "made" / shell).write_text(stub)
    program = tmp_path / "made" / "edgespec"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgespec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / "odd names").mkdir()
    (tmp_path / "odd names" / "some prompts.jsonl").touch()
    (tmp_path / "$(touch run)").touch()
    (tmp_path / "*").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bash(*words: str) -> list[str]:
    """What bash offers for the last word."""
    asked = " ".join(map(shlex.quote, words))
    program = (
        f"source made/bash; COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _edgespec {shlex.quote(words[0])}; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return list(filter(None, done.stdout.splitlines()))


def fish(*words: str) -> list[str]:
    asked = shlex.quote(" ".join(words))
    command = ["fish", "--private", "-c", f"source made/fish; complete -C {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
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
    assert offered("edgespec", "completion", "") == set(STUBS)
    assert not offered("edgespec", "generate", "x", "--system", "")
    assert not offered("edgespec", "generate", "x", "--seed", "")


def test_bash_offers_paths_and_runs_no_names(place: Path) -> None:
    assert bash("edgespec", "verify", "--prompts", "odd") == ["odd names"]
    assert bash("edgespec", "verify", "--prompts", "odd names/") == ["odd names/some prompts.jsonl"]
    assert bash("edgespec", "targets", "--json", "odd") == ["odd names"]
    assert bash("edgespec", "chat", "od") == ["odd names"]
    assert not bash("edgespec", "chat", "odd names/")  # a bundle is a folder, and there is a file
    assert {"$(touch run)", "*"} <= set(bash("edgespec", "verify", "--prompts", ""))
    assert bash("edgespec", "chat", "--rule", "=", "lossl") == ["lossless"]
    assert bash("edgespec", "chat", "--rule=lossl") == ["lossless"]  # bash 3.2 does not part it
    assert bash("edgespec", "verify", "--prompts=odd") == ["odd names"]
    assert bash("~/made/edgespec", "cha") == ["chat"]
    assert bash("nowhere/edgespec", "cha") == []
    assert bash("edgespec", "recipes", "check", "$(touch run)", "tv") == ["tvdpp"]
    assert bash("edgespec", "chat", "$(touch run)") == []
    assert not (place / "run").exists()


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish")
def test_fish_offers_paths_and_runs_no_names(place: Path) -> None:
    assert fish("edgespec", "verify", "--prompts", "odd") == ["odd names/"]
    assert fish("edgespec", "verify", "--prompts=odd") == ["--prompts=odd names/"]
    assert fish("edgespec", "chat", "--rule=lossl") == ["--rule=lossless"]
    assert fish("edgespec", "recipes", "check", "(touch run)", "tv") == ["tvdpp"]
    assert fish("nowhere/edgespec", "cha") == []
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
    "edgespec verify --prompts=odd": r"--prompts=odd\ names/",
    "~/made/edgespec cha": "edgespec chat ",
    "edgespec recipes check $(touch run) tv": "tvdpp ",
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
        assert not (place / "run").exists()
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


def offer(words: Iterable[str], paths: str = "", taken: int = 0, more: bool = False) -> Offer:
    return Offer(dict.fromkeys(words, ""), paths, taken, more)


OFFERS = {
    "targets ": offer({"list", "show", "path"}),
    "targets _": offer({"list", "show", "path"}),  # PowerShell asks so for a new word
    "targets show ": offer(TARGETS),
    "targets --json ": offer({"list", "show", "path"}, "file"),
    "targets --json=": offer({}, "file", len("--json=")),
    "targets --json show ": offer(TARGETS),
    "targets --json out.json show ": offer(TARGETS),
    "targets --quiet show ": offer(TARGETS),
    "plan --target ": offer(TARGETS, "file"),
    "plan --target=": offer(TARGETS, "file", len("--target=")),
    "plan --target = ": offer(TARGETS, "file"),  # as bash parts it
    "plan --target =": offer(TARGETS, "file", 1),
    "plan --rehearsal.shape ": offer(TARGETS, "file"),
    "recipes check ": offer([*shipped_recipes(), *launch_files()], "file"),
    "recipes check quick tvdpp ": offer([*shipped_recipes(), *launch_files()], "file"),
    "chat ": offer({"smollm2-135m-instruct"}, "directory"),
    "chat --rule opt : a = 0.3 ": offer({"smollm2-135m-instruct"}, "directory"),
    "export --target ": offer({}, "file"),
    "generate x --system ": offer({}),
    "generate x --seed ": offer({}),
    "verify x --prompts ": offer({}, "file"),
    "tradeoff x --metric rouge-2,": offer({"agreement", "exact-match"}, "", len("rouge-2,"), True),
    "tradeoff x --metric=rouge-2,exact-match,a": offer(
        {"agreement"}, "", len("--metric=rouge-2,exact-match,"), True
    ),
}


@pytest.mark.parametrize("line", OFFERS)
def test_what_is_offered(line: str) -> None:
    assert offered(line.split(" ")) == OFFERS[line]


def test_flags_are_offered_where_no_argument_stands() -> None:
    assert offered(["completion", "bash", ""]) == offered(["completion", "-"])


def test_the_grammar_is_that_of_the_parsers() -> None:
    assert (
        GRAMMAR.read_text(encoding="utf-8") == grammar()
    )  # python -m edgespec.completion > edgespec/shell/grammar.json
    for verb in VERBS:
        assert len(offered([""]).words[verb]) <= len(VERBS[verb].help)
        flags = offered([verb, "-"]).words
        options = [name for one in parser_of(verb)[1]._actions for name in one.option_strings if name != "-h"]
        assert {name.rstrip("=") for name in flags} == set(options)
        assert all(flags.values())


def test_an_answer_is_a_line_for_each_word_and_a_broken_question_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offers, "offered", lambda _: Offer({"a": "b c", "--c=": ""}, "file", 2, True))
    assert main(["__complete", "x"]) == 0
    first, *words = capsys.readouterr().out.splitlines()
    assert (first, *words) == ("file 2 more", "a\tb c", "--c=\t")
    monkeypatch.undo()
    for broken in (["no-verb", ""], ["", ""], ["--version", ""], ["chat", "--no-quiet="]):
        assert main(["__complete", *broken]) == 1
    assert not any(capsys.readouterr())


@pytest.mark.parametrize("verb", ["targets", "build-drafter", "chat", "other-engines"])
def test_an_answer_imports_nothing_heavy(verb: str) -> None:
    slow = ("numpy", "torch", "onnxruntime", "edgespec_runtime", "rich", "yaml", "importlib.metadata")
    program = (
        f"import sys\nfrom edgespec.cli import main\nmain(['__complete', {verb!r}, '-'])\n"
        f"heavy = [name for name in sys.modules if name.startswith({slow!r})]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_brackets_and_quotes_of_the_powershell_script_close() -> None:
    text = re.sub(r"'(?:[^']|'')*'", "''", re.sub(r"^\s*#.*$", "", STUBS["powershell"], flags=re.MULTILINE))
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
    dotted = {action.dest for verb in VERBS for action in parser_of(verb)[1]._actions}
    assert {name.rpartition(".")[2] for name in dotted} | dotted >= FREE | FOLDERS


@pytest.mark.parametrize("words", [["completion", "bash"], ["__complete", "ch"]])
def test_lines_end_as_bash_reads_them_on_windows_too(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", newline="\r\n"))
    assert main(words) == 0
    assert b"\n" in written.getvalue()
    assert b"\r" not in written.getvalue()
