"""build-drafter before its first stage: what each of several processes has room for, and whose folder it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_model_folder
from torchrun import torchrun

from edgespec.cli import main
from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.options import as_flags
from edgespec.recipe.read import RECIPE_FILE, resolve
from edgespec.recipe.schema import InferenceOptions, Recipe
from edgespec.recipe.targets import TARGETS
from edgespec.shell.environment import API_KEY
from edgespec.stages.stage import STAGE_FILE
from edgespec.verbs import build
from edgespec.verbs.build import _check_key, _room, check_packages, claim

GIB = 2**30
SMOL = "smollm2-135m-instruct"
# the second process finds less memory than the first one
PROGRAM = """
import os, sys
from edgespec.planning import preflight
if os.environ["RANK"] == "1":
    preflight.free_memory = lambda: 2**20
from edgespec.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("gpus", "rank", "processes", "memory", "sharing"),
    [(2, 1, 2, 2 * GIB, 1), (1, 1, 2, GIB, 2), (2, 3, 4, 2 * GIB, 2), (8, 0, 1, GIB, 1)],
)
def test_a_process_counts_its_own_gpu_and_who_shares_it(
    gpus: int,
    rank: int,
    processes: int,
    memory: int,
    sharing: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((device.index + 1) * GIB, 80 * GIB))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    room = _room(tmp_path, "ddp")
    assert (room.on_gpu, room.memory, room.sharing) == (True, memory, sharing)


def test_an_export_asks_for_no_package_that_only_training_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `export` is enough for it."""
    recipe = Recipe(target="tiny-chat")
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == "accelerate" else name)
    check_packages(recipe, trains=False)
    with pytest.raises(MissingExtra, match=r"Building a drafter needs accelerate, .*edgespec\[all\]"):
        check_packages(recipe)
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"Exporting a pair needs torch, .*edgespec\[export\]"):
        check_packages(recipe, trains=False)


@pytest.mark.training
def test_what_one_process_lacks_is_said_once(tmp_path: Path) -> None:
    target, out = make_model_folder(tmp_path / "target"), tmp_path / "out"
    program, log = tmp_path / "program.py", tmp_path / "log.txt"
    program.write_text(PROGRAM)
    run = torchrun(log, str(program), "build-drafter", "--target", str(target), "--out", str(out))
    assert run.wait(timeout=300) != 0
    said = [line for line in log.read_text().splitlines() if line.startswith("edgespec: ")]
    assert len(said) == 1, log.read_text()
    assert "of memory and 1 MiB are free on this machine" in said[0]
    assert not out.exists()


def test_a_build_goes_on_in_another_environment(tmp_path: Path) -> None:
    """The target's own file lies elsewhere there."""
    package = TARGETS[SMOL].package
    assert package is not None

    def begun(file: str) -> None:
        claim(tmp_path, Recipe(target=SMOL, inference=InferenceOptions(source="file", file=file)))

    begun(f"/old/site-packages/{package.file}")
    (tmp_path / "generate").mkdir()
    begun(f"/new/site-packages/{package.file}")
    with pytest.raises(InputError, match=r"inference.file is '/old/.*' there and '/new/mine.gguf' here"):
        begun("/new/mine.gguf")


def test_a_budget_without_a_mixed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be ignored. A build that was begun with one goes on."""
    budgets = ({"bits": 5.0}, {"size": "90MB"}, {"quality": 0.0})
    for budget in budgets:
        flags = as_flags({"target": "no/such/place", "out": str(tmp_path / "out"), "export": budget})
        assert main(["build-drafter", *flags]) == 2
        assert f"export.{next(iter(budget))} is " in (said := capsys.readouterr().err)
        assert "add mixed to --export.onnx or q_mixed to --export.gguf" in said
        assert not (tmp_path / "out").exists()
        assert main(["build-drafter", *flags, "--export.onnx", "int4,mixed"]) == 2
        assert "unknown target 'no/such/place'" in capsys.readouterr().err


def test_a_pair_that_a_device_has_no_room_for_is_refused_before_its_target_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--target", "llama-2-13b-chat", "--device", "raspberry-pi", "--out", str(out), "--force"]
    assert main(["build-drafter", *flags]) == 2
    said = capsys.readouterr().err
    assert "llama-2-13b-chat does not fit on raspberry-pi: target's weights " in said
    assert "its memory budget is 5 GiB; " in said
    assert not out.exists()


def test_a_head_that_is_done_is_not_refused_for_what_trained_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older edgespec ignored knobs that a head does not have. A head that is still to be trained is refused with them."""
    values = {
        "target": "no/such/place",
        "drafter": {"kind": "head", "init": "subclone"},
        "generate": {"features": True},
        "distill": {"target_side": "stored", "text_fraction": 0.0, "keep_steps": 500},
    }
    flags = as_flags({**values, "out": str(tmp_path / "out")})
    claim(tmp_path / "out", resolve(values, {}, made=True))
    done = tmp_path / "out" / "distill" / STAGE_FILE
    done.parent.mkdir()
    assert main(["build-drafter", *flags]) == 2
    assert "distill.keep_steps 0 (it is 500)" in capsys.readouterr().err
    done.write_text("{}")
    assert main(["build-drafter", *flags]) == 2
    assert "unknown target 'no/such/place'" in capsys.readouterr().err
    assert main(["build-drafter", *flags, "--distill.keep-steps", "400"]) == 2
    assert "holds a build of another recipe" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["", "http://127.0.0.1:9"])
def test_a_key_goes_to_no_server_that_only_a_recipe_names(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    recipe = tmp_path / "recipe.yaml"
    server = "inference: {source: server, url: 'http://127.0.0.1:9'}"
    recipe.write_text(f"{server}\ndistill: {{target_side: stored, text_fraction: 0.0}}\n")
    values = {"target": "no/such/place", "recipe": str(recipe), "out": str(tmp_path / "out")}
    flags = as_flags({**values, **({"inference": {"url": flag}} if flag else {})})
    assert main(["build-drafter", *flags]) == 2
    said = capsys.readouterr().err
    assert ("unknown target" if flag else "add --inference.url http://127.0.0.1:9 if") in said
    assert "secret" not in said


def test_a_section_without_options_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `edgespec.build(..., inference=None)` in Python."""
    monkeypatch.setenv(API_KEY, "secret")
    _check_key(Recipe(target="t"), {"inference": None})


def test_a_servers_address_is_no_command_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe may be a stranger's, and the flag in the message is there to be copied."""
    monkeypatch.setenv(API_KEY, "secret")
    recipe = tmp_path / "recipe.yaml"
    server = "inference: {source: server, url: 'http://a;touch b'}"
    recipe.write_text(f"{server}\ndistill: {{target_side: stored, text_fraction: 0.0}}\n")
    assert main(["build-drafter", "--target", "no/such/place", "--recipe", str(recipe)]) == 2
    assert "add --inference.url 'http://a;touch b' if it is meant" in capsys.readouterr().err


def test_a_folder_in_which_nothing_was_made_takes_another_recipe(tmp_path: Path) -> None:
    """A recipe that was refused at its plan has looked at the target and the data, no more."""
    first, second = Recipe(target="tiny-chat", seed=1), Recipe(target="tiny-chat", seed=2)
    claim(tmp_path, first)
    for stage in ("target", "data", "plan"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "stage.json").write_text("{}")
    claim(tmp_path, first)
    assert (tmp_path / "target" / "stage.json").exists()
    claim(tmp_path, second)  # whose target and data may be others
    assert [path.name for path in tmp_path.iterdir()] == [RECIPE_FILE]
    (tmp_path / "pretrain").mkdir()  # begun, its plan stale
    claim(tmp_path, second)
    with pytest.raises(InputError, match="seed is 2 there and 1 here"):
        claim(tmp_path, first)
    assert (tmp_path / "pretrain").is_dir()
