"""Bad input at the command line: one line that names the value and the cure, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from edgespec_runtime.rules.table import RULES
from repository import PYTHONPATH, REPOSITORY
from tiny_models import make_model_folder

from edgespec.cli import VERBS, main, parser_of
from edgespec.core.errors import (
    EXIT_CODES,
    BundleError,
    CheckFailed,
    InputError,
    MissingExtra,
    NoRoom,
    did_you_mean,
)
from edgespec.core.folder_lock import held
from edgespec.core.options import from_mapping, given, to_mapping
from edgespec.planning.hardware import CARDS
from edgespec.recipe.devices import ENGINES, profiles
from edgespec.recipe.precisions import PRECISIONS
from edgespec.recipe.schema import DIVERGENCES, Recipe
from edgespec.recipe.shipped import shipped_recipes
from edgespec.shell.environment import cache_folder
from edgespec.verbs.build import RECIPE_FILE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target") / "model")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error line of a command that must be refused."""
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("edgespec: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def no_build(capsys: pytest.CaptureFixture[str], target: object, *more: object) -> str:
    return refused(capsys, "build-drafter", "--target", target, *more)


def test_unknown_verb_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'bench'" in refused(capsys, "bnch")
    assert "did you mean '--json'" in refused(capsys, "targets", "--jsn")
    assert "did you mean '--rehearsal.out'?" in refused(capsys, "plan", "--rehearse", "--out", "x")


def test_a_value_stands_beside_its_flag_before_argparse_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12.8 and 3.13.1 changed the methods that a parser calls of itself."""
    seen: list[str] = []

    def parse(_: object, words: list[str], namespace: object) -> tuple[argparse.Namespace, list[str]]:
        seen.extend(words)
        return argparse.Namespace(), []

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_intermixed_args", parse)
    parser_of("targets")[1].parse_intermixed_args(["--json", "list"])
    assert seen == ["--json=-", "list"]


def test_an_unknown_home_is_one_line_with_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert "write paths without '~', and set EDGESPEC_HOME" in refused(capsys, "report", "~nosuchuser/x")


def test_what_cannot_be_written_in_the_cache_folder_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from edgespec.verbs import targets

    def run(_: object) -> int:
        with held(folder, "a command"):
            return 0

    monkeypatch.setattr(targets, "run", run)
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    folder = cache_folder() / "ready"
    assert "(EDGESPEC_HOME can name another place)" in refused(capsys, "targets")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "elsewhere"))
    assert "EDGESPEC_HOME" not in refused(capsys, "targets")


@pytest.mark.parametrize(
    ("old", "now", "command"),
    [
        ("rehearse", "plan --rehearse", "plan --rehearse"),
        (
            "rehearse --target T --shape=tiny --out x --plan-only",
            "plan --rehearse",
            "plan --rehearse --target T --rehearsal.shape=tiny --rehearsal.out x --rehearsal.check-only",
        ),
        ("devices", "plan --devices", "plan --devices"),
        ("devices list --json", "plan --devices", "plan --devices --json"),
        (
            "devices show raspberry-pi --target T",
            "plan --devices",
            "plan --devices --device raspberry-pi --target T",
        ),
        ("elsewhere BUNDLE --prompts 3", "other-engines", "other-engines BUNDLE --prompts 3"),
        (
            "build-drafter --target T --out x --dry-run --parallel=ddp --seed 1",
            "plan",
            "plan --target T --seed 1",
        ),
    ],
)
def test_an_old_name_answers_with_the_command_of_today(
    old: str, now: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = old.split()
    name = f"{words[0]} --dry-run" if "--dry-run" in words else words[0]
    assert refused(capsys, *words) == (
        f"edgespec: `edgespec {name}` is now `edgespec {now}`. Run: edgespec {command}\n"
    )
    verb, *rest = command.split()
    module, parser = parser_of(verb)
    from_mapping(module.Options, given(parser.parse_intermixed_args(rest)))  # it exists


def test_the_nearest_names_are_said_and_the_end_of_one_is_enough() -> None:
    names = ["lenient-lin", "first-of-two-x", "second-of-two-x"]
    assert did_you_mean("kfl", ["fkl", "rkl", "jsd"]) == "; did you mean 'fkl' or 'rkl'?"
    assert did_you_mean("lin", names) == "; did you mean 'lenient-lin'?"
    assert did_you_mean("x", names) == "; known: first-of-two-x, lenient-lin, second-of-two-x"


def test_unknown_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "did you mean 'tiny-chat'" in no_build(capsys, "tiny-chatt", "--out", out)
    assert not out.exists()


def test_hub_target_without_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    error = no_build(capsys, "llama-2-7b-chat", "--out", out, "--force")
    assert "meta-llama/Llama-2-7b-chat-hf" in error
    assert "local folder" in error
    assert not out.exists()


def damaged(target: Path, place: Path, **config: object) -> Path:
    place.mkdir()
    for file in target.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    values = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(values))
    return place


def test_folders_that_are_no_target(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in no_build(capsys, tmp_path / "empty", "--out", tmp_path / "a")
    encoder = damaged(target, tmp_path / "t5", is_encoder_decoder=True)
    assert "encoder-decoder" in no_build(capsys, encoder, "--out", tmp_path / "b")
    silent = damaged(target, tmp_path / "silent")
    (silent / "chat_template.jinja").unlink()
    tokenizer = json.loads((silent / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (silent / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "no chat template" in no_build(capsys, silent, "--out", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "silent", "t5"]


def test_recipe_keys_and_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distill: {learning_rat: 1.0e-3}\n")
    out = tmp_path / "out"
    for words, said in (
        (("--recipe", file), "did you mean 'learning_rate'"),
        (("--evaluate.draft-lengths", "0"), "draft_lengths is 0; it must be at least 1"),
        (("--generate.temperatures", "-0.5"), "temperatures is -0.5"),
        (("--recipe", "none.yaml"), "neither a file nor a shipped recipe"),
    ):
        assert said in no_build(capsys, "tiny-chat", "--out", out, *words)
    assert not out.exists()


def test_out_folder_of_another_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    out = tmp_path / "out"
    (out / "pretrain").mkdir(parents=True)
    (out / RECIPE_FILE).write_text(yaml.safe_dump(to_mapping(Recipe(target=str(target), seed=1))))
    assert "seed is 1 there and 0 here" in no_build(capsys, target, "--out", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    assert "holds other files" in no_build(capsys, target, "--out", tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_the_list_of_verbs_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) < columns for line in shown.splitlines())
    words = " ".join(shown.split())
    assert all(f"{name} {verb.help}" in words for name, verb in VERBS.items())
    assert f"\n  {'chat':<14}  talk to a bundle\n" in shown


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out
    helps = [action.help or "" for action in parser_of(verb)[1]._actions]
    assert not [text for text in helps if text.count("(default") > 1]


@pytest.mark.parametrize("verb", ["tradeoff", "other-engines"])
def test_a_verb_that_refuses_every_ready_pair_says_so(verb: str) -> None:
    bundle = next(action for action in parser_of(verb)[1]._actions if action.dest == "bundle")
    assert "no ready pair" in str(bundle.help)


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        ("plan", [*profiles(), *shipped_recipes(), *DIVERGENCES, *CARDS]),
        ("build-drafter", [*profiles(), *shipped_recipes(), *DIVERGENCES, *sum(PRECISIONS.values(), ())]),
        ("export", [*profiles(), *sum(PRECISIONS.values(), ())]),
        ("chat", [*RULES, *ENGINES, *sum(PRECISIONS.values(), ())]),
        ("tradeoff", RULES),
    ],
)
def test_help_lists_every_name_that_can_be_chosen(verb: str, names: list[str]) -> None:
    words = set(re.split(r"[\s,;:{}()]+", parser_of(verb)[1].format_help()))
    assert set(names) <= words


def test_targets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["targets", "list", "--json"]) == 0
    names = {row["alias"] for row in json.loads(capsys.readouterr().out)}
    assert {"tiny-chat", "llama-2-7b-chat", "smollm2-135m-instruct", "qwen3-0.6b"} <= names
    assert "tinyllama-1.1b-chat" in names
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert main(["targets", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "targets")
    assert "has not been made" in refused(capsys, "targets", "path", "tiny-chat")
    (tmp_path / "targets" / "tiny-chat-0123" / "model").mkdir(parents=True)
    assert main(["targets", "path", "tiny-chat"]) == 0
    assert capsys.readouterr().out.strip().endswith("tiny-chat-0123/model")


def test_a_missing_extra_is_one_sentence_with_the_command() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nsys.modules['transformers'] = None\n"
        "from edgespec.cli import main\nsys.exit(main(['build-drafter', '--target', 'tiny-chat', '--out', sys.argv[1]]))"
    )
    out = REPOSITORY / "build" / "never"
    command = [sys.executable, "-c", program, str(out)]
    environment = {**os.environ, "PYTHONPATH": ".:runtime:recipes:export"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 2
    assert 'pip install "edgespec[all]"' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("words", [["targets"], ["targets", "--help"]], ids=" ".join)
def test_a_reader_who_leaves_early_is_no_error_and_a_full_disk_is_one_line(words: list[str]) -> None:
    """Also where all of it waits in a buffer until the program ends."""
    command = [sys.executable, "-m", "edgespec", *words]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True)
        assert done.returncode == 2
        assert "cannot write standard output: no space left on the disk" in done.stderr
        assert done.stderr.count("\n") == 1


def test_one_of_several_processes_is_told_that_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.verbs import targets

    codes: list[int] = []
    processes = ModuleType("processes")
    vars(processes)["fail"] = codes.append
    monkeypatch.setitem(sys.modules, "edgespec_recipes.parallel.processes", processes)
    for run in (raising(InputError("no")), lambda _: 0):
        monkeypatch.setattr(targets, "run", run)
        main(["targets"])
    assert codes == [2]


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


def raising(error: BaseException) -> Callable[[object], int]:
    def run(_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("x is 1; give 2"), 2, "edgespec: x is 1; give 2\n"),
        (NoRoom("the disk is full"), 2, "edgespec: the disk is full\n"),
        (MissingExtra("torch", "train", "Training"), 2, 'pip install "edgespec[train]"\n'),
        (BundleError("a file was altered"), 2, "edgespec: a file was altered\n"),
        (CheckFailed("2 bounds are broken"), 1, "edgespec: 2 bounds are broken\n"),
        (ModuleNotFoundError("no torch", name="torch"), 2, 'pip install "edgespec[train]"\n'),
        (OSError(errno.ENOSPC, "full", "there"), 2, "no space left on the disk"),
        (
            InputError("it says '\x1b]0;owned\x07'\nand \x9b2J"),
            2,
            "edgespec: it says '\ufffd]0;owned\ufffd'\nand \ufffd2J\n",
        ),
        (OSError(errno.ENOSPC, "full", "a\x1b[2J"), 2, "cannot write a\ufffd[2J: no space left"),
        (
            OutOfMemoryError("CUDA out of memory. GPU 0 has 1 MiB free. Including more, it has 7 GiB."),
            2,
            "edgespec: CUDA out of memory. GPU 0 has 1 MiB free; end other programs on that GPU and run",
        ),
        (ZeroDivisionError("a \x1b[2J"), 70, "ZeroDivisionError: a \ufffd[2J\n"),
        (MemoryError("cannot allocate 9"), 2, "edgespec: no memory is left (cannot allocate 9)"),
        (MemoryError(), 2, "edgespec: no memory is left; end other programs and run the same command again"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, "no memory is left ([Errno 12] Cannot allocate"),
        (
            RuntimeError("[enforce fail at a.cpp:9] DefaultCPUAllocator: not enough memory: asked for 5.\n"),
            2,
            "edgespec: no memory is left (not enough memory: asked for 5); end other programs",
        ),
        (KeyboardInterrupt(), 130, "edgespec: interrupted\n"),
        (ZeroDivisionError("a bug"), 70, "please report it\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_codes(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from edgespec.verbs import targets

    monkeypatch.setattr(targets, "run", raising(error))
    assert main(["targets"]) == code
    said = capsys.readouterr().err
    assert words in said
    assert not re.search(r"[\x1b\x07\x9b]", said)
    assert ("Traceback" in said) == (code == 70)
    assert code in EXIT_CODES
    page = (REPOSITORY / "docs" / "shell.md").read_text(encoding="utf-8")
    assert f"\n| {code} | " in page


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use stays there")
def test_a_current_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a folder was made anew in another terminal."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = refused(capsys, "recipes", "copy", "tiny-chat", "x.yaml")
    assert "the current folder is gone; go to one that is there" in said
