"""A build whose inputs changed: what follows from them runs again, with one line that says why; nothing else does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_build import command, write_data

from edgespec.building.pipeline import Build
from edgespec.building.pipeline_export import Source
from edgespec.cli import main
from edgespec.core.errors import BundleError
from edgespec.recipe.read import RECIPE_FILE, resolve
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.targets import FoundTarget
from edgespec.stages.record import RECORD
from edgespec.stages.stage import STAGE_FILE, Processes

ALL = ("data", "target", "plan", "pretrain", "generate", "distill", "evaluate", "export", "verify", "pack")


@dataclass
class Place:
    """The data of a build, the build, and what it printed last."""

    data: Path
    out: Path
    capture: pytest.CaptureFixture[str]

    def build(self, code: int = 0) -> list[str]:
        """Run the command; the names of the stages that ran."""
        self.capture.readouterr()
        assert main([*command(self.data), "--out", str(self.out)]) == code
        self.printed, self.errors = self.capture.readouterr()
        return re.findall(r"^▸ (\w+):", self.printed, re.MULTILINE)

    def why(self) -> dict[str, str]:
        return dict(re.findall(r"^! (\w+): (.*): running again$", self.printed, re.MULTILINE))


@pytest.fixture
def place(small_build: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Place]:
    """A copy of the finished build; its data are as they were before the next test."""
    weights = small_build / "target" / "model.safetensors"
    before = weights.read_bytes()
    yield Place(small_build, shutil.copytree(small_build / "out", tmp_path / "out"), capfd)
    write_data(small_build)
    weights.write_bytes(before)


def edit(file: Path, change: Callable[[str], str]) -> None:
    file.write_text(change(file.read_text()))


def test_nothing_changed(place: Place) -> None:
    (place.data / "asked.jsonl").touch()
    (place.data / "target" / "model.safetensors").touch()
    assert place.build() == []
    assert place.why() == {}
    assert place.printed.splitlines()[-1] == f"Next: edgespec chat {place.out / 'bundle'}"


def test_instructions_changed_in_place(place: Place) -> None:
    edit(place.data / "asked.jsonl", lambda text: text.replace("Say", "Please say"))
    assert place.build() == ["data", "generate", "distill", "evaluate", "export", "verify", "pack"]
    assert place.why()["generate"] == "asked.jsonl changed (208 -> 264 bytes)"
    assert place.why()["distill"] == "generate ran again"
    rows = (place.out / "generate" / "shard-00000.jsonl").read_text().splitlines()
    assert all("Please say" in row for row in rows)
    assert place.build() == []


def test_held_out_prompts_changed_in_place(place: Place) -> None:
    edit(place.data / "held.jsonl", lambda text: text.replace("Tell", "tell"))
    assert place.build() == ["data", "evaluate", "verify", "pack"]
    assert all("held.jsonl changed" in why for why in place.why().values())


def test_text_changed_in_place(place: Place) -> None:
    """What the target wrote stays."""
    edit(place.data / "text.jsonl", lambda text: text.replace("words", "lines"))
    assert place.build() == ["data", "pretrain", "distill", "evaluate", "export", "verify", "pack"]
    assert place.why()["pretrain"].startswith("text.jsonl changed")
    assert place.why()["distill"] == "pretrain ran again"


def test_the_targets_weights_changed(place: Place) -> None:
    """As many bytes as before, and one number of them another: only the content tells."""
    file = place.data / "target" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.full_like(
        weights["model.norm.weight"], 1.5
    )
    save_file(weights, file, metadata={"format": "pt"})
    ran = place.build()
    assert ran == [stage for stage in ALL if stage not in ("data", "pretrain")]
    assert "model.safetensors changed" in place.why()["generate"]


def test_a_half_finished_stage_is_not_mixed(place: Place) -> None:
    """Killed in `generate`, then the instructions were edited: no row of the old ones is left."""
    for later in ("distill", "evaluate", "export", "verify", "pack"):
        shutil.rmtree(place.out / later)
    (place.out / "generate" / "stage.json").unlink()
    for half in (place.out / "generate").glob("shard-00001.*"):
        half.unlink()
    edit(place.data / "asked.jsonl", lambda text: text.replace("Say 7", "Sing 7"))  # of the second shard
    before = (place.out / "generate" / "shard-00000.jsonl").stat().st_mtime_ns
    assert "generate" in place.build()
    assert "asked.jsonl changed" in place.why()["generate"]
    assert (place.out / "generate" / "shard-00000.jsonl").stat().st_mtime_ns != before


def test_a_build_of_before_there_were_records_is_kept(place: Place) -> None:
    for record in place.out.rglob(RECORD):
        record.unlink()
    shutil.rmtree(place.out / "data")
    file = place.out / "recipe.resolved.yaml"
    recipe = yaml.safe_load(file.read_text())
    del recipe["data"]  # a knob it did not know
    file.write_text(yaml.safe_dump(recipe))
    assert place.build() == ["data"]
    assert len(list(place.out.rglob(RECORD))) == len(ALL)
    assert place.build() == []


def test_data_that_are_gone_after_the_build_are_not_missed(place: Place) -> None:
    for name in ("asked.jsonl", "held.jsonl", "text.jsonl"):
        (place.data / name).unlink()
    assert place.build() == []
    for record in place.out.rglob(RECORD):
        record.unlink()
    shutil.rmtree(place.out / "data")
    assert place.build() == []


def test_an_edit_that_cannot_be_read_leaves_the_results(place: Place) -> None:
    edit(place.data / "text.jsonl", lambda text: text + '{"text": "half \\ud83d"}\n')
    place.build(code=2)
    assert "text.jsonl:61: text has 'half \\ud83d'" in place.errors
    assert (place.out / "pretrain" / "model" / "model.safetensors").exists()
    write_data(place.data)
    assert place.build() == ["data"]


def test_another_process_leaves_the_record_of_the_pack_alone(small_build: Path, tmp_path: Path) -> None:
    """The first process removes it, and may have done so already."""
    out = shutil.copytree(small_build / "out", tmp_path / "out")
    shutil.rmtree(out / "bundle")
    build = Build(resolve(load_recipe(out / RECIPE_FILE), {}), out, Processes(rank=1))
    target = FoundTarget("t", small_build / "target", "s")
    build.source = Source(target, out / "distill" / "model", build.recipe)
    with pytest.raises(BundleError, match=r"manifest.json"):
        build._pack()
    assert (out / "pack" / STAGE_FILE).exists()
