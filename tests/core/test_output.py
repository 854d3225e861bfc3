"""One --json and one --quiet for every verb, and how far a step is in a log."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import fields
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.cli import VERBS, main, parser_of
from edgespec.core import progress as progress_module
from edgespec.core.files import compact_json
from edgespec.core.options import given
from edgespec.core.output import check_place, next_step, note, step, verb_output, write_result
from edgespec.core.progress import progress

NO_TABLE = {"chat", "serve", "completion", "report"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_with_a_table_has_the_same_json(verb: str) -> None:
    module, parser = parser_of(verb)
    assert ("json" in {one.name for one in fields(module.Options)}) == (verb not in NO_TABLE)
    if verb in NO_TABLE:
        return
    needed = {
        "targets": [], "recipes": [], "config": [], "plan": ["--target", "t"], "build-drafter": ["--target", "t"],
        "export": ["b"], "study": ["s"], "push": ["b", "o/n"], "export-optimum": ["m", "o"],
    }.get(verb, ["b"])  # fmt: skip
    for words, value in (
        (["--json", *needed], "-"),
        ([*needed, "--json"], "-"),
        ([*needed, "--json", "a.json"], "a.json"),
        (["--json=out.json", *needed], "out.json"),
        (["--json", "--quiet", *needed], "-"),
    ):
        options = given(parser.parse_intermixed_args(words))
        assert options.pop("json") == value
        assert options.pop("quiet", False) == ("--quiet" in words)
        assert options == given(parser.parse_intermixed_args(needed))


@pytest.mark.parametrize("words", [["targets"], ["recipes"], ["plan", "--devices"], ["config"]], ids=" ".join)
def test_json_replaces_the_table_and_a_file_does_not(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    table = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    file = tmp_path / "found.json"
    assert main([*words, "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (table, f"wrote {file}\n")
    assert json.loads(file.read_text(encoding="utf-8")) == found
    assert main([*words, "--json", str(file), "--quiet"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (table, "")


@pytest.mark.parametrize(
    ("place", "why"), [("file/found", "a file stands where a folder is wanted"), ("folder", "it is a folder")]
)
@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        (["targets", "--json"], ".json"),
        (["bench", "smollm2-135m-instruct", "--plot"], ".png"),
        (["tradeoff", "bundle", "--markdown"], ".md"),
        (["report", "bundle", "--out"], ".html"),
        (["study", "--results"], ".md"),
    ],
    ids=lambda words: "".join(words[:1]),
)
def test_a_file_that_has_no_place_is_refused_before_anything_is_measured(
    words: list[str], suffix: str, place: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / f"folder{suffix}").mkdir()
    file = tmp_path / f"{place}{suffix}"
    assert main([*words, str(file)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"edgespec: cannot write {file}: {why} ")


def test_a_place_that_is_looked_at_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("", "-", str(tmp_path / "new" / "below" / "found.json"), str(tmp_path / "found.json")):
        check_place(name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_where(capsys: pytest.CaptureFixture[str]) -> None:
    def verb(json: str, quiet: bool) -> tuple[str, str]:
        with verb_output(json, quiet=quiet):
            step("a step")
            print("a table")
            note("a note")
            write_result(json, {"a": 1})
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    assert verb("", False) == ("a step\na table\n", "a note\n")
    assert verb("", True) == ("a table\n", "")
    assert verb("-", False) == ('{\n  "a": 1\n}\n', "a step\na note\n")
    assert verb("-", True) == ('{\n  "a": 1\n}\n', "")
    step("a \x1b[2Jstep")
    note("a \x1b[2Jnote")  # a stranger's words may be in them
    assert capsys.readouterr() == ("a \ufffd[2Jstep\n", "a \ufffd[2Jnote\n")
    print("as before")
    assert capsys.readouterr().out == "as before\n"


def test_a_file_of_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    for form in (None, compact_json):
        write_result(str(file), {"rows": [{"rate": math.nan}]}, form)
        assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"rows": [{"rate": None}]}


def test_the_next_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    next_step("edgespec", "chat", Path("my builds/bundle"))
    assert capsys.readouterr().out == "Next: edgespec chat 'my builds/bundle'\n"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_has_a_line_for_each_tenth_and_ends_at_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "SHOWN_AFTER", 0.0)
    with progress("count", 250, "things", done=50) as bar:
        for _ in range(200):
            bar.set_postfix_str("9 tok/s", refresh=False)
            bar.update(1)
    said = lines(capsys)
    assert 9 <= len(said) <= 12
    assert said[-1].startswith("count: 100 %, 250 of 250 things, ")
    assert said[-1].endswith(", 9 tok/s")
    assert all(" left" in line for line in said[1:-1])
    with progress("count", None, "things") as bar:
        for _ in range(1000):
            bar.update(1)
    said = lines(capsys)
    assert len(said) <= 2
    assert said[-1].startswith("count: 1,000 things, ")


def test_a_step_that_was_less_than_was_thought_ends_at_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "SHOWN_AFTER", 0.0)
    with progress("count", 10, "things") as bar:
        bar.update(6)
    assert lines(capsys)[-1].startswith("count: 100 %, 6 of 6 things, ")
    with contextlib.suppress(KeyError), progress("count", 10, "things") as bar:
        bar.update(6)
        raise KeyError
    assert lines(capsys)[-1].startswith("count: 60 %, 6 of 10 things, ")


def test_what_is_short_or_unwanted_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("count", 2) as bar:
        bar.update(2)
    assert lines(capsys) == []
    monkeypatch.setattr(progress_module, "SHOWN_AFTER", 0.0)
    with verb_output(quiet=True), progress("count", 2) as bar:
        bar.update(2)
    monkeypatch.setenv("RANK", "1")
    with progress("count", 2) as bar:
        bar.update(2)
    assert lines(capsys) == []


def test_a_program_without_a_console_has_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for its standard error, as in a Windows program that loads a large bundle."""
    monkeypatch.setattr(sys, "stderr", None)
    with progress("load the models", 10, "MiB") as bar:
        bar.update(4)
    assert bar.n == 4


def test_a_step_that_is_silent_says_after_a_while_that_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "SHOWN_AFTER", 0.05)
    with contextlib.suppress(KeyError), progress("learn", 1, "models"):
        end, said = time.monotonic() + 30, ""
        while not said and time.monotonic() < end:
            time.sleep(0.05)
            said = capsys.readouterr().err
        raise KeyError
    assert said.startswith("learn: 0 %, 0 of 1 models, ")
    assert lines(capsys) == []  # it did not come to its end, and nobody says so


@pytest.fixture
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is ten seconds old, and not some milliseconds more: that much a busy machine takes between two looks."""
    looks = chain([0.0], repeat(10.0))
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: next(looks)))


def test_what_was_done_before_says_nothing_of_the_time_left(ten_seconds: None) -> None:
    bar = progress_module.Bar("count", 100, "things", 0)
    bar.skip(80)
    assert "left" not in str(bar)
    bar.update(10)
    assert ", 10.0s left" in str(bar)


def test_tokens_have_a_rate_since_the_step_began(ten_seconds: None) -> None:
    bar = progress_module.Bar("evaluate", 4, "parts", 0)
    bar.update(1)
    assert "tok/s" not in str(bar)
    bar.set_postfix_str("distilled")
    bar.add_tokens(200)
    bar.add_tokens(300)
    assert str(bar).endswith(", distilled, 50 tok/s")


def test_a_terminal_has_a_bar_and_keeps_what_is_printed(tmp_path: Path) -> None:
    import os
    import pty

    program = (
        "from edgespec.core import progress as p; p.SHOWN_AFTER = 0\n"
        "with p.progress('outer', 2, 'files') as bar:\n"
        "    with p.progress('inner', 3, 'layers') as inner: inner.update(3)\n"
        "    print('a line of the verb'); bar.update(2)\n"
        "with p.progress('again', 1) as bar: bar.update(1)\n"
        "with p.progress('read a[/b].txt', 1) as bar: bar.update(1)\n"
    )
    child, terminal = pty.fork()
    if not child:
        os.environ.update(TERM="xterm", COLUMNS="60")
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(terminal, 65536):
            shown += data
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = shown.decode()
    assert "a line of the verb\r\n" in text
    assert "100 %, 2 of 2 files" in text
    assert "again" in text
    assert "read a[/b].txt" in text  # rich would take it for markup, and end with an error
