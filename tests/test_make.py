"""make.py: the last lines of the demo say what the bench found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import REPOSITORY

import make
from edgespec.cli import main

CHILD = """
import os, signal, sys, time
seen, end = [], time.monotonic() + 60
# print would fail within the print below
signal.signal(signal.SIGINT, lambda *_: seen.append(os.write(1, b'stopped\\n')))
print('ready', flush=True)
while not seen and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(1.5)  # goes on behind the signal
sys.exit(7)
"""


pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")

# The test run itself may have been started with Ctrl-C ignored, as a shell's script does it for what it starts with an `&`.
IN_FORCE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def stopped(program: str) -> tuple[str, int]:
    """(what it writes after Ctrl-C, its exit code) of a Python program that says when it is ready."""
    words = [sys.executable, "-c", IN_FORCE + program]
    with subprocess.Popen(
        words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        while process.stdout.readline() != "ready\n":
            pass
        os.killpg(process.pid, signal.SIGINT)
        return process.stdout.read(), process.wait(60)


def test_ctrl_c_is_the_commands_own() -> None:
    """A terminal sends it to both; the command goes on, and its exit code comes back."""
    program = f"import sys, make; sys.exit(make.run(sys.executable, '-c', {CHILD!r}))"
    assert stopped(program) == ("stopped\n", 7)


def test_a_command_that_ends_by_ctrl_c_ends_the_program() -> None:
    """What would come next, another pip for example, does not begin."""
    child = "import sys, time\ntry: print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(130)"
    program = f"import sys, make; make.run(sys.executable, '-c', {child!r}); print('next')"
    assert stopped(program) == ("", 130)


def test_what_a_command_reads_can_be_given(capfd: pytest.CaptureFixture[str]) -> None:
    assert make.run(sys.executable, "-c", "print(input()[::-1])", typed="abc\n") == 0
    assert capfd.readouterr().out.endswith("cba\n")


def test_what_the_output_cannot_encode_does_not_end_the_program() -> None:
    """As where Windows writes to a file: the demo's last lines have a Greek letter, and a folder may have any."""
    program = (
        "import make\nmake.COMMANDS['demo'] = lambda words: print('with \\u03b3 chosen', *words) or 3\n"
        "raise SystemExit(make.main(['demo', '\\u738b']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "with ? chosen ?\n", "")


def write_program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_an_environment_without_its_python_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that was replaced, or a checkout that was moved, leaves programs that do not start beside a good stamp."""
    venv, said = tmp_path / ".venv", tmp_path / "said"
    pip = write_program(venv / make.SCRIPTS / "pip", "#!/bin/sh\n")
    make.stamp_of("all", venv).write_text(make.wanted("constraints.txt"))
    assert make.is_set_up("all", venv)
    monkeypatch.setattr(make, "install_torch", lambda *_: 0)
    monkeypatch.setattr(make, "pip", lambda *_: 0)
    python = write_program(tmp_path / "python", f'#!/bin/sh\necho "$@" >> {said}\n')
    monkeypatch.setattr(sys, "executable", str(python))
    make.set_up("all", venv)
    assert not said.exists()
    pip.write_text(f"#!{tmp_path}/gone/bin/python\n")
    assert not make.is_set_up("all", venv)
    make.set_up("all", venv)
    assert said.read_text() == f"-m venv --clear {venv}\n"


def test_what_stops_an_installation_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "works", lambda _: True)
    monkeypatch.setattr(make, "without_amx", lambda: None)
    monkeypatch.setattr(make, "install_torch", lambda *_: 1)
    with pytest.raises(SystemExit, match=r"run the same command again; without .* compiler: test --fast$"):
        make.set_up("test", tmp_path)
    with pytest.raises(
        SystemExit, match=rf"remove {tmp_path.name} first\), then run the same command again$"
    ):
        make.set_up("all", tmp_path)
    monkeypatch.setattr(make, "works", lambda _: False)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"could not make place; see the message above, and where ensurepip"):
        make.set_up("all", tmp_path / "file" / "place")
    older = SimpleNamespace(version_info=(3, 10, 12), version="3.10.12 (main)", exit=sys.exit)
    monkeypatch.setattr(make, "sys", older)
    with pytest.raises(SystemExit, match=r"3\.11 or newer; this is 3\.10\.12: .* python3\.13 make\.py demo$"):
        make.set_up("all", tmp_path)


def test_from_another_folder_paths_are_those_of_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is given to chat and optimum, what a chat saves, and the command that the demo prints at its end."""
    program = write_program(tmp_path / make.SCRIPTS / "edgespec", "#!/bin/sh\npwd -P\n")
    monkeypatch.setattr(make, "BIN", program.parent)
    monkeypatch.setattr(make, "OPTIMUM", tmp_path)
    monkeypatch.setattr(make, "set_up", lambda *_: None)
    monkeypatch.setattr(make, "has_smollm2", lambda: True)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert make.chat([]) == make.optimum(["model", "out"]) == make.demo_tiny_chat([]) == 0
    printed = capfd.readouterr().out
    assert printed.count(f"\n{here}\n") == 2
    assert printed.count(f"\n{REPOSITORY}\n") == 2  # a build and its bench are the checkout's
    bundle = REPOSITORY / "build" / "tiny-chat" / "bundle"
    assert printed.endswith(f"\nTalk to the pair: {program} chat {bundle}\n")
    monkeypatch.chdir(REPOSITORY)
    assert make.shown(bundle) == Path("build", "tiny-chat", "bundle")


def test_replies_that_are_the_same_are_counted_over_all_draft_lengths() -> None:
    """Each draft length changed other replies than the others did."""
    fixed = [{"draft_length": length, "identical": 11, "acceptance_rate": 0.5} for length in (1, 2)]
    bench = {
        "engine": "onnxruntime",
        "precision": "int8",
        "verdict": "Speculation pays here.",
        "summaries": fixed,
    }
    runs = [{"prompt": prompt} for prompt in range(14)]
    assert "at every draft length: 8 of 14." in make.in_short({**bench, "runs": runs, "identical_prompts": 8})


def test_the_demos_last_lines_are_the_benchs(
    small_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    few = ["--max-prompts", "2", "--max-new-tokens", "8", "--seconds", "1", "--draft-lengths", "1,2"]
    assert main(["bench", str(small_build / "out" / "bundle"), *few, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = make.in_short(json.loads(file.read_text(encoding="utf-8")))
    assert found.startswith(f"{make.PAIR} on onnxruntime fp32: ")
    assert printed.strip().splitlines()[-1] in found
    same = "Replies with the same tokens as plain decoding, at every draft length: "
    assert f"at every draft length: {printed.partition(same)[2].splitlines()[0]}" in found
    assert "--mode exact" not in found  # an fp32 pair keeps every token
