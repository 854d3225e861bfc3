"""Flag over environment over config file over default; what a config file must not say; every variable in one table."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

from edgespec.cli import VERBS, main, parser_of, settings
from edgespec.core.errors import InputError, NoRoom
from edgespec.core.options import from_mapping
from edgespec.shell.environment import VARIABLES, cache_folder, config_file
from edgespec.shell.settings import MOST_BYTES, Settings


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.yaml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    return file


def chosen(verb: str, **flags: object) -> Settings:
    return settings(verb, parser_of(verb)[0], flags)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen("chat").values == {}
    config.write_text(
        "quiet: true\nchat: {temperature: 0.1, max-new-tokens: 9, top_p: 0.5}\nserve: {port: 81}\n"
    )
    monkeypatch.setenv("EDGESPEC_CHAT_TEMPERATURE", "0.2")
    monkeypatch.setenv("EDGESPEC_CHAT_MAX_NEW_TOKENS", "8")
    found = chosen("chat", temperature="0.3")
    options = from_mapping(parser_of("chat")[0].Options, {"bundle": "b", **found.values})
    assert (options.temperature, options.max_new_tokens, options.top_p) == (0.3, 8, 0.5)
    assert found.every.quiet
    assert found.origins == {"max_new_tokens": "EDGESPEC_CHAT_MAX_NEW_TOKENS", "top_p": str(config)}
    assert not chosen("chat", quiet=False).every.quiet
    monkeypatch.setenv("EDGESPEC_QUIET", "0")
    assert not chosen("chat").every.quiet
    assert chosen("serve").values == {"port": 81}


def test_dotted_options_lists_and_verbs_that_begin_alike(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        "plan: {alphas: [0.5, 0.9], rehearsal: {minutes: 3}}\nexport-optimum: {new_tokens: 4}\n"
    )
    assert chosen("plan").values == {"alphas": (0.5, 0.9), "rehearsal": {"minutes": 3.0}}
    monkeypatch.setenv("EDGESPEC_PLAN_REHEARSAL_MINUTES", "5")
    monkeypatch.setenv("EDGESPEC_EXPORT_OPTIMUM_NEW_TOKENS", "6")
    monkeypatch.setenv("EDGESPEC_EXPORT_PRECISIONS", "fp32,int8")
    assert chosen("plan").values["rehearsal"] == {"minutes": 5.0}
    assert chosen("export").values == {"precisions": ("fp32", "int8")}
    assert chosen("export-optimum").values == {"new_tokens": 6}


def test_an_option_whose_name_python_keeps_for_itself(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("chat: {continue: true}")
    assert chosen("chat").values == {"continue_": True}
    assert main(["config", "show"]) == 0
    assert "chat --continue  True" in capsys.readouterr().out
    config.unlink()
    monkeypatch.setenv("EDGESPEC_CHAT_CONTINUE", "1")
    found = chosen("chat")
    assert (found.values, found.origins) == ({"continue_": True}, {"continue_": "EDGESPEC_CHAT_CONTINUE"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chta: {temperature: 1}", "unknown key 'chta'; did you mean 'chat'?"),
        ("chat: {temprature: 1}", "chat: unknown option 'temprature'; did you mean 'temperature'?"),
        ("chat: {bundle: here}", "chat: unknown option 'bundle'"),
        ("chat: {temperature: hot}", "chat.temperature is 'hot'; it must be a number"),
        ("chat: {temperature: -1}", "chat.temperature is -1.0; it must be at least 0"),
        ("chat: {top-p: 1, top_p: 0.5}", "chat.top_p is given twice, once with - and once with _"),
        ("chat: 3", "chat is 3; it must be a mapping"),
        ("- chat", "holds list; it must map verbs"),
        ("quiet: perhaps", "quiet is 'perhaps'; it must be true or false"),
        ("chat: [", "is not valid YAML"),
        ("chat: {temperature: !!python/object/apply:os.getcwd []}", "is not valid YAML"),
        ("a: &a [1]\nchat: *a", "has a YAML alias"),
        ("#" * (MOST_BYTES + 1), f"at most {MOST_BYTES} are read"),
        (f"chat: {'[' * 5000}", "opens 5000 brackets"),
    ],
)
def test_what_a_config_file_cannot_say(
    text: str, words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    assert main(["chat", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_recipe_says_what_a_recipe_says(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("build-drafter: {distill: {steps: 3}}")
    with pytest.raises(InputError, match=r"distill.steps is set in .*config.yaml and belongs in a recipe"):
        chosen("build-drafter")
    config.write_text("build-drafter: {out: there, force: true}")
    assert chosen("build-drafter").values == {"out": "there", "force": True}
    monkeypatch.setenv("EDGESPEC_BUILD_DRAFTER_SEED", "3")
    with pytest.raises(
        InputError, match="seed is set in EDGESPEC_BUILD_DRAFTER_SEED and belongs in a recipe"
    ):
        chosen("build-drafter")


def test_misspelt_variables_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOEM", "x")
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().err
    assert "EDGESPEC_HOEM is set, and edgespec reads none of that name; did you mean" in said
    monkeypatch.setenv("EDGESPEC_CHAT_TEMPERATUR", "1")
    assert main(["chat", "nowhere"]) == 2
    assert "did you mean 'EDGESPEC_CHAT_TEMPERATURE'?" in capsys.readouterr().err


def test_a_complaint_says_where_the_option_came_from(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("plan: {mfu: 0.5}")
    assert main(["plan", "--devices"]) == 2
    assert capsys.readouterr().err == (
        f"edgespec: --mfu has no effect with --devices; leave one of them out (mfu comes from {config})\n"
    )


def test_config_show_says_what_is_set_and_no_secrets(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("quiet: false\nchat: {temperature: 0.7}\nbench: {draft-lengths: [1, 2]}\n")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("EDGESPEC_BENCH_SECONDS", "3")
    assert main(["config", "show", "--json"]) == 0
    said = capsys.readouterr().out
    assert "hf_secret" not in said
    found = json.loads(said)
    assert {row["option"]: (row["value"], row["set_in"]) for row in found["options"]} == {
        "quiet": (False, str(config)),
        "chat --temperature": (0.7, str(config)),
        "bench --draft-lengths": ([1, 2], str(config)),
        "bench --seconds": (3.0, "EDGESPEC_BENCH_SECONDS"),
    }
    assert set(found["variables"]) == set(VARIABLES)
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{config}\n"


@pytest.mark.parametrize(
    ("system", "variables", "cache", "file"),
    [
        ("linux", {}, "home/.cache/edgespec", "home/.config/edgespec/config.yaml"),
        ("linux", {"XDG_CACHE_HOME": "c", "XDG_CONFIG_HOME": "d"}, "c/edgespec", "d/edgespec/config.yaml"),
        (
            "darwin",
            {},
            "home/Library/Caches/edgespec",
            "home/Library/Application Support/edgespec/config.yaml",
        ),
        ("win32", {"APPDATA": "a", "LOCALAPPDATA": "b"}, "b/edgespec", "a/edgespec/config.yaml"),
        ("win32", {}, "home/AppData/Local/edgespec", "home/AppData/Roaming/edgespec/config.yaml"),
    ],
)
def test_folders_of_each_system(
    system: str,
    variables: dict[str, str],
    cache: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert cache_folder() == tmp_path / cache
    assert config_file() == tmp_path / file


@pytest.mark.parametrize(
    ("variable", "below"), [("EDGESPEC_HOME", "kept"), ("XDG_CACHE_HOME", "kept/edgespec")]
)
def test_a_cache_folder_that_is_named_from_here_is_the_same_elsewhere(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build's record names its target there, and goes on from another folder."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("EDGESPEC_HOME", raising=False)
    monkeypatch.setenv(variable, "kept")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == Path.cwd() / below


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_folders_that_are_named_need_no_home(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", homeless)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cache_folder() == config_file().parent == tmp_path / "edgespec"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert main(["targets"]) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    for folder in (cache_folder, config_file):  # also in Python, where nobody turns an error into a line
        with pytest.raises(InputError, match="set EDGESPEC_HOME to a folder, and EDGESPEC_CONFIG"):
            folder()


def test_what_cannot_be_written_is_said_also_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that there is no home."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def run(_: object) -> int:
        raise NoRoom("the disk is full")

    monkeypatch.setattr(Path, "home", homeless)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setattr("edgespec.verbs.targets.run", run)
    assert main(["targets"]) == 2
    assert capsys.readouterr().err == "edgespec: the disk is full\n"


def read_variables(file: Path) -> set[str]:
    """The names that a file gives to os.environ itself."""
    text = file.read_text(encoding="utf-8")
    return set(re.findall(r"""environ(?:\.\w+)?[(\[]["'](\w+)["']""", text))


def test_every_variable_that_is_read_is_in_the_table() -> None:
    folders = ("edgespec", "runtime", "recipes", "export")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    read = set().union(*map(read_variables, files))
    assert {"RANK", "LOCAL_RANK", "NO_COLOR"} <= read
    assert read <= set(VARIABLES)
    page = (REPOSITORY / "docs" / "shell.md").read_text(encoding="utf-8")
    assert "EDGESPEC_VERB_OPTION" in page
    assert VERBS["config"].module == "edgespec.config"


@pytest.mark.parametrize(
    ("own", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_a_build_wait_asleep_unless_the_user_says_how(
    own: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert main(["config"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == own.get("GOMP_SPINCOUNT")
    assert main(["export", "--target", "no such folder"]) == 2
    assert os.environ.get("GOMP_SPINCOUNT") == spins
