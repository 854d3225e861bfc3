"""Which bundles `edgespec chat` finds by itself, and how a person chooses one."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.manifest import MANIFEST
from edgespec.core.options import shell_line
from edgespec.core.output import next_step
from edgespec.recipe.targets import TARGETS
from edgespec.shell.environment import READY, as_typed
from edgespec.verbs import chat, found_bundles
from edgespec.verbs.found_bundles import Found, found
from edgespec.verbs.ready import folder_of, ready_folders

NAME = "smollm2-135m-instruct"


@pytest.fixture
def here(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a bundle pulled, one built and one broken; an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache" / "home"))
    for place in ("pulled", "build/mine/bundle"):
        shutil.copytree(bundle, tmp_path / place)
    (tmp_path / "build" / "broken").mkdir()
    (tmp_path / "build" / "broken" / MANIFEST).write_text("{}")
    return tmp_path


def test_bundles_are_found_here_in_build_folders_and_among_the_ready_pairs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [one.name for one in found()]
    assert set(names[:-1]) == {"pulled", "build/mine/bundle"}
    assert names[-1] == NAME
    assert "target" in found()[0].about
    assert "onnxruntime fp32" in found()[0].about
    monkeypatch.chdir(here / "pulled")
    assert [one.name for one in found()] == [".", NAME]


def test_a_ready_pair_says_what_it_still_needs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> None:
        return None

    monkeypatch.setattr(found_bundles, "gguf_of", no_package)
    assert found()[-1].missing == f"first: {TARGETS[NAME].package.command}"

    def other_version(name: str) -> None:
        raise InputError("another version is installed")

    monkeypatch.setattr(found_bundles, "gguf_of", other_version)
    assert found()[-1].missing == "another version is installed"
    file = here / "target.gguf"
    file.touch()
    monkeypatch.setattr(found_bundles, "gguf_of", lambda name: file)
    pair = folder_of(NAME, ready_folders()[NAME], file)
    for made, words in ((pair.with_name(f"{NAME}-0123456789ab"), "its bundle is made once"), (pair, "")):
        assert made.parent == here / "cache" / "home" / READY
        assert as_typed(made / "bundle") == NAME
        (made / "bundle").mkdir(parents=True)
        (made / "bundle" / MANIFEST).touch()
        assert found()[-1].missing == ""
        assert found()[-1].about.partition("; ")[2].startswith(words)
        assert bool(words) == ("; " in found()[-1].about)


def test_a_bundle_that_goes_while_it_is_looked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a build packs it anew."""
    real = Path.resolve

    def resolve(file: Path, strict: bool = False) -> Path:
        (here / "pulled" / MANIFEST).unlink(missing_ok=True)
        return real(file, strict)

    monkeypatch.setattr(Path, "resolve", resolve)
    assert [one.name for one in found()] == ["build/mine/bundle", NAME]


def test_names_that_would_write_to_the_terminal_are_left_out(here: Path, bundle: Path) -> None:
    shutil.copytree(bundle, here / "\x1b[2J")
    assert "\x1b[2J" not in [one.name for one in found()]


def test_a_pipe_is_told_what_was_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat"]) == 2
    error = capsys.readouterr().err
    assert "no bundle was named; found: " in error
    for name in ("pulled", "build/mine/bundle", NAME):
        assert name in error
    assert len(error.splitlines()) == 1


def test_the_command_in_a_message_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(InputError, match=r"Name one: edgespec chat 'my bundle'$"):
        chat.choose([Found("my bundle", "a pair")])


def test_a_folder_that_begins_with_a_dash_is_no_flag_of_a_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pulled").rename(here / "-p")
    assert {one.name for one in found()} == {"./-p", "build/mine/bundle", NAME}
    assert as_typed(Path("./-p")) == "./-p"
    assert shell_line("edgespec", "chat", Path("-p") / "bundle", "-x") == "edgespec chat ./-p/bundle -x"
    next_step("edgespec", "chat", Path("-p"))
    assert capsys.readouterr().out == "Next: edgespec chat ./-p\n"


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "chosen"),
    [
        (b"\n", "one"),
        (b"2\n", "two"),
        (b"two\n", "two"),
        (b"0\n99\n\xff\n-1\n3\n1\n", "one"),  # no such number, no text, and one that needs something first
        (b"", None),
    ],
)
def test_a_person_chooses_by_number(
    typed: bytes, chosen: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles = [Found("one", "a"), Found("two", "b"), Found("three", "c", "first: pip install c")]
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO(typed)))
    if chosen is None:
        with pytest.raises(InputError, match="no bundle was chosen"):
            chat.choose(bundles)
    else:
        assert chat.choose(bundles) == chosen
    shown = capsys.readouterr().err
    assert "Which one? [1-3, Enter for 1]" in shown
    assert ("first: pip install c" in shown) is (b"3" in typed)
    with pytest.raises(InputError, match="in this folder and its build folders, and there is no ready pair"):
        chat.choose([])
