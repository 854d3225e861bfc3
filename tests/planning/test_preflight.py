"""What is looked at before a build starts: room on the disk and in memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.gguf_target.model_folder import folder_of
from huggingface_hub import constants
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core import free_space
from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.planning import costs, preflight
from edgespec.planning.devices_fit import fitting
from edgespec.planning.estimate import StageCost, estimate
from edgespec.planning.preflight import (
    RUNNING,
    Room,
    check_processes,
    disk_left,
    find_shortages,
    refuse,
    room_here,
    shortages,
)
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.targets import shape_of_target

GIB = 2**30
STAGES = [StageCost("pretrain", 1, 1.0, 2 * GIB, 3 * GIB), StageCost("evaluate", 1, 1.0, GIB, GIB)]
HERE = Path("/")
BF16, LARGER = "--inference.dtype bfloat16", "a larger machine"


def said(room: Room, done: tuple[str, ...] = ()) -> list[str]:
    return [str(one) for one in shortages([one for one in STAGES if one.stage not in done], room, HERE)]


def test_disk_counts_all_stages_and_memory_each() -> None:
    assert said(Room(4 * GIB, 2 * GIB + RUNNING)) == []
    [disk] = said(Room(4 * GIB - 1, 2 * GIB + RUNNING))
    assert disk.startswith("the build (of it pretrain 3 GiB) needs 4 GiB of disk and 4 GiB are free in /")
    [memory] = said(Room(4 * GIB, 2 * GIB))
    assert memory == "pretrain needs 2.39 GiB of memory and 2 GiB are free on this machine"
    assert len(said(Room(0, 0))) == 3
    assert said(Room(4 * GIB, None)) == []


def test_what_is_done_needs_nothing() -> None:
    assert said(Room(GIB, GIB + RUNNING), ("pretrain",)) == []
    assert said(Room(0, 0), ("pretrain", "evaluate")) == []


def test_processes_of_one_machine_share_its_memory() -> None:
    room = Room(4 * GIB, 2 * (2 * GIB + RUNNING), processes=2, sharing=2)
    assert said(room) == []
    [one] = said(Room(4 * GIB, 4 * GIB, processes=2, sharing=2))
    assert one.startswith("pretrain in 2 processes needs 4.78 GiB")


def test_a_gpu_is_not_asked_for_what_the_machine_does() -> None:
    stages = [*STAGES, StageCost("export", 0, 0.0, 50 * GIB, 0)]
    assert shortages(stages, Room(4 * GIB, 3 * GIB, on_gpu=True), HERE) == []
    [gpu] = shortages(stages, Room(4 * GIB, GIB + RUNNING, on_gpu=True), HERE)
    assert str(gpu).endswith("on the GPU")
    assert len(shortages(stages, Room(4 * GIB, 3 * GIB), HERE)) == 1


def test_a_gpu_is_not_asked_for_what_runs_on_the_processor() -> None:
    stages = [StageCost("evaluate", 0, 0.0, 50 * GIB, 0, on_host=True)]
    assert shortages(stages, Room(GIB, GIB, on_gpu=True), HERE) == []
    assert len(shortages(stages, Room(GIB, GIB), HERE)) == 1


def test_a_gpu_takes_more_for_a_training() -> None:
    stages = [StageCost("distill", 0, 0.0, GIB, 0, on_gpu=GIB)]
    assert shortages(stages, Room(GIB, GIB + RUNNING), HERE) == []
    assert shortages(stages, Room(GIB, 2 * GIB + RUNNING, on_gpu=True), HERE) == []
    assert len(shortages(stages, Room(GIB, 2 * GIB, on_gpu=True), HERE)) == 1


def test_refusal_names_every_shortage_and_the_way_on() -> None:
    refuse([])
    with pytest.raises(InputError) as seen:
        refuse(shortages(STAGES, Room(GIB, GIB), HERE))
    text = str(seen.value)
    assert text.count("needs") == 3
    for words in ("of disk", "of memory", "edgespec plan", "--force"):
        assert words in text
    cures = "--out on another disk, fewer --pretrain.steps, fewer precisions, a smaller --pretrain.micro-batch-size"
    assert (
        f"Try {cures}, a larger machine, a smaller --evaluate.batch-size, --inference.dtype bfloat16;" in text
    )


@pytest.mark.parametrize(
    ("stage", "cures"),
    [
        *((name, (f"a smaller --{name}.micro-batch-size", LARGER)) for name in ("tune", "pretrain")),
        *(
            (name, (f"a smaller --{name}.micro-batch-size", BF16, LARGER))
            for name in ("reference", "distill")
        ),
        *((name, ("a smaller --generate.batch-size", BF16, LARGER)) for name in ("generate", "self-text")),
        ("evaluate", ("a smaller --evaluate.batch-size", BF16, LARGER)),
        *((name, (BF16, LARGER)) for name in ("store", "states", "read")),
        *((name, (LARGER,)) for name in ("target tiny-chat, once", "rounded-target")),
        *((name, ("fewer precisions", LARGER)) for name in ("export", "verify")),
    ],
)
def test_a_stage_without_memory_names_its_own_cures(stage: str, cures: tuple[str, ...]) -> None:
    [one] = shortages([StageCost(stage, 1, 1.0, GIB, 0)], Room(GIB, GIB), HERE)
    assert one.cures == cures


def test_work_that_does_not_divide_is_said_before_it_starts() -> None:
    recipe = resolve({"target": "x", "pretrain": {"batch_size": 496}, "distill": {"batch_size": 40}}, {})
    for processes in (1, 2, 4, 8):
        check_processes(recipe, processes)
    with pytest.raises(
        InputError, match=r"distill.batch_size is 40; it must be a multiple of the 16 processes: start 8"
    ):
        check_processes(recipe, 16)
    parts = resolve({"target": "x", "distill": {"batch_size": 40, "micro_batch_size": 8}}, {})
    check_processes(parts, 1)
    with pytest.raises(InputError, match=r"distill.micro_batch_size is 8; .* of distill.batch_size, 20 seq"):
        check_processes(parts, 2)
    few = resolve({"target": "x", "generate": {"prompts": 300}}, {})
    check_processes(few, 2)
    with pytest.raises(InputError, match=r"4 processes cannot share 2 shards .*--generate.shard-size 75"):
        check_processes(few, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target") / "model", tied=False)


def small_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_build_is_refused_before_it_starts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["build-drafter", "--target", str(target), "--out", str(out), "--export.gguf", "q4_0"]
    small_disk(monkeypatch, 2**20)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "of disk and 1 MiB are free" in error
    assert error.count("\n") == 1
    assert not out.exists()
    # with --force it goes on, up to the prompts file that is not there
    assert main([*words, "--force", "--generate.instructions", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl" in capsys.readouterr().err


def test_a_build_from_a_checkpoint_needs_room_too(target: Path, tmp_path: Path) -> None:
    """It is counted with the checkpoint's shape, and a checkpoint that is none is said."""
    made = make_model_folder(tmp_path / "made", hidden=32, intermediate=96, tied=False)

    def left(checkpoint: Path) -> int:
        drafter = {"init": "checkpoint", "checkpoint": str(checkpoint)}
        return disk_left(resolve({"target": str(target), "drafter": drafter}, {}), tmp_path / "out")

    other = make_model_folder(tmp_path / "other", hidden=64, intermediate=192, tied=False)
    assert 0 < left(made) < left(other)
    with pytest.raises(InputError, match=r"drafter\.checkpoint .* has no config\.json"):
        left(tmp_path / "gone")


def test_a_build_that_goes_on_counts_what_is_left(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "shares_blocks", lambda place: False)
    recipe = resolve({"target": str(target)}, {})
    stages = {stage.stage: stage for stage in estimate(recipe, *shapes(target))}
    room = Room(sum(stage.disk for stage in stages.values()) - stages["pretrain"].disk, None)
    [short] = find_shortages(recipe, tmp_path, room)
    assert short.what == "disk"
    (tmp_path / "pretrain").mkdir()
    with open(tmp_path / "pretrain" / "half", "wb") as half:
        half.truncate(stages["pretrain"].disk)
    assert find_shortages(recipe, tmp_path, room) == []  # all of it is written, although it is not done
    (tmp_path / "pretrain" / "half").rename(tmp_path / "pretrain" / "stage.json")
    assert find_shortages(recipe, tmp_path, room) == []


def test_a_bundle_takes_no_room_where_copies_share_their_blocks(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolve({"target": str(target)}, {})
    stages = estimate(recipe, *shapes(target))
    files = next(stage.disk for stage in stages if stage.stage == "pack")
    room = Room(sum(stage.disk for stage in stages) - files, None)
    for shared, lacking in ((True, 0), (False, 1)):
        monkeypatch.setattr(preflight, "shares_blocks", lambda place, shared=shared: shared)
        assert len(find_shortages(recipe, tmp_path, room)) == lacking


def shapes(target: Path) -> tuple[ModelShape, Any]:
    shape = ModelShape.from_config(read_json(target / "config.json"))
    return shape, derive(shape, resolve({"target": "x"}, {}).drafter)


def test_a_download_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = resolve({"target": "llama-2-7b-chat"}, {})
    small_disk(monkeypatch, 10 * GIB)
    monkeypatch.setattr(preflight, "on_one_disk", lambda *places: False)
    [short] = find_shortages(recipe, tmp_path, Room(2**50, None))
    assert str(short).startswith(
        "the download of meta-llama/Llama-2-7b-chat-hf needs 12.6 GiB of disk and 10 GiB"
    )
    assert short.cures == ("HF_HOME on another disk",)
    snapshot = tmp_path / "hub" / "models--meta-llama--Llama-2-7b-chat-hf" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model-00001-of-00002.safetensors").touch()
    assert find_shortages(recipe, tmp_path, Room(2**50, None)) == []
    tune = {"steps": 1, "conversations": "hub:a/b", "teacher": "some/where"}
    for unknown in ({"target": "some/where"}, {"target": "llama-2-7b-chat", "tune": tune}):  # shapes
        assert find_shortages(resolve(unknown, {}), tmp_path, Room(0, 0)) == []


def test_a_download_and_the_build_share_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits alone, and the two do not."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe, out = resolve({"target": "llama-2-7b-chat"}, {}), tmp_path / "out"
    build, download = disk_left(recipe, out), 2 * shape_of_target(recipe.target).parameters
    small_disk(monkeypatch, build + download)
    assert find_shortages(recipe, out, replace(room_here(out), memory=None)) == []
    small_disk(monkeypatch, build + download - 1)
    [short] = find_shortages(recipe, out, replace(room_here(out), memory=None))
    assert short.needed == build + download
    assert str(short).startswith("the build (of it ")
    assert " with the download of meta-llama/Llama-2-7b-chat-hf (12.6 GiB) needs " in str(short)
    assert {"HF_HOME on another disk", "--out on another disk"} < {*short.cures}
    monkeypatch.setattr(preflight, "on_one_disk", lambda *places: False)
    assert find_shortages(recipe, out, replace(room_here(out), memory=None)) == []


def test_temporary_files_are_counted_while_they_are_there() -> None:
    """The second stage leaves 1 GiB and has 2 beside it; the third takes the room of these."""
    three = [STAGES[0], replace(STAGES[1], passing=2 * GIB), replace(STAGES[1], stage="pack")]
    assert shortages(three, Room(6 * GIB, None), HERE) == []
    [disk] = shortages(three, Room(6 * GIB - 1, None), HERE)
    assert disk.needed == 6 * GIB


def test_files_that_the_device_has_no_memory_for_are_not_counted(tmp_path: Path) -> None:
    """As `plan` counts: of a laptop's int4 and int8 a 7B target gets int4 alone."""
    asked = resolve({"target": "llama-2-7b-chat", "device": "laptop-cpu-x86"}, {})
    target = shape_of_target(asked.target)
    written = fitting(asked, target, derive(target, asked.drafter))
    assert set(written.export.onnx) < set(asked.export.onnx)
    room = Room(2**50, 0)
    [here], [there] = (
        [one for one in find_shortages(recipe, tmp_path, room) if one.stage == "export"]
        for recipe in (asked, replace(written, device=""))
    )
    assert here.needed == there.needed
    plain = disk_left(replace(written, device=""), tmp_path)
    assert plain - disk_left(asked, tmp_path) == costs.weight_bytes(derive(target, asked.drafter))


def test_a_targets_own_file_is_counted_as_it_is(target: Path, tmp_path: Path) -> None:
    """And not the f16 and q8_0 of its weights, once as files and once in the bundle."""
    file, [shape, drafter] = tmp_path / "tiny.gguf", shapes(target)
    export_gguf(target, file, "q8_0")
    whole, own = (disk_left(resolve({"target": str(one)}, {}), tmp_path / "out") for one in (target, file))
    unwritten = [(shape, "f16"), (shape, "q8_0"), (drafter, "f16")]
    fewer = sum(costs.file_bytes(model, "llama.cpp", name) for model, name in unwritten)
    assert whole - own == 2 * (fewer - file.stat().st_size)


def test_weights_that_were_expanded_before_need_no_room(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    export_gguf(target, file, "q8_0")
    small_disk(monkeypatch, 1024)
    recipe = resolve({"target": str(file)}, {})
    monkeypatch.setattr(preflight, "on_one_disk", lambda *places: False)
    [short] = find_shortages(recipe, tmp_path / "out", Room(2**50, None))
    assert short.what == "disk"
    assert "the expanded weights of" in short.stage
    assert short.cures == ("EDGESPEC_HOME on another disk",)
    small_disk(monkeypatch, GIB)
    folder_of(file)
    small_disk(monkeypatch, 1024)
    assert find_shortages(recipe, tmp_path / "out", Room(2**50, None)) == []
