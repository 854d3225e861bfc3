"""The rehearsal at a tiny shape: every stage for real in a process of its own, cut and gone on, and what it refuses to start."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.synthetic.checkpoint import INDEX, write_checkpoint
from edgespec_recipes.models.low_memory import budgets, device_map
from edgespec_recipes.target_names import rehearsal_data
from edgespec_recipes.target_names.rehearsal_data import write_tokenizer
from edgespec_runtime.engines import llamacpp
from edgespec_runtime.text.tokenizer import ChatTokenizer

from edgespec.building import measured, rehearse
from edgespec.building.measured import Usage, run_measured
from edgespec.building.rehearse import MEASURED, STAGES, TALKS, TINY, needed_disk
from edgespec.building.rehearse_stages import RehearsalOptions, main
from edgespec.core.errors import CheckFailed, EdgespecError, InputError, MissingExtra
from edgespec.core.files import read_json, write_json
from edgespec.core.folder_lock import held
from edgespec.planning.plan import UNMEASURED

pytestmark = pytest.mark.training

SMALL = {
    "shape": "tiny",
    "context": 128,
    "pretrain_steps": 2,
    "distill_steps": 2,
    "responses": 2,
    "max_new_tokens": 6,
    "run_context": 128,
}


def rehearsed(out: Path, **options: Any) -> int:
    asked = RehearsalOptions(**{**SMALL, **options, "out": str(out)})
    return rehearse.run("llama-2-7b-chat", asked, "edgespec plan --rehearse")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rehearsal") / "out"
    assert rehearsed(out) == 0
    return out


def found(out: Path, stage: str) -> dict[str, Any]:
    counts: dict[str, Any] = read_json(out / stage / "stage.json")["counts"]
    return counts


def test_every_stage_ran_and_was_measured(finished: Path) -> None:
    talks = [f"{verb}-{precision}" for verb in TALKS for _, precision in UNMEASURED]
    for name in [*STAGES, *talks]:
        taken = read_json(finished / MEASURED / f"{name}.json")
        assert 10 * 2**20 < taken["peak"] < 4 * 2**30
        assert taken["own"] is None or taken["own"] <= taken["peak"]
    assert found(finished, "weights")["bytes"] == 2 * TINY.parameters
    assert found(finished, "generate")["responses"] == 2
    assert found(finished, "distill")["steps"] == 2
    checks = read_json(finished / "verify" / "verify.json")
    assert [check["broken"] for check in checks["files"]] == [[]] * 4
    assert all(0 < check["weights_relative"] < 0.2 for check in checks["files"])
    assert any("one layer at a time" in note for note in checks["notes"])
    own, packed = (finished / name / "gguf" / "target-q4_0.gguf" for name in ("", "export/target"))
    assert own.samefile(packed)  # written once
    assert read_json(finished / MEASURED / "bench-int4-report.json")
    assert "tok" in (finished / MEASURED / "chat-q4_0.txt").read_text()


def test_torch_reads_the_layers_from_the_disk(finished: Path) -> None:
    asked = RehearsalOptions(**SMALL)
    how, target = asked.recipe(finished, "tiny", TINY).inference, finished / "weights" / "tiny-random"
    places = device_map(target, torch.bfloat16, budgets(how.max_memory, torch.device("cpu")))
    assert sum(place == "disk" for place in places.values()) == TINY.layers


def test_what_is_done_is_not_done_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "gguf" / "stage.json").unlink()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("stage.json")}
    assert rehearsed(out) == 0
    assert {file: file.stat().st_mtime_ns for file in before} == before
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("▸")] == ["▸ gguf"]
    assert any(line.startswith("in all") for line in lines)
    assert any(
        line.startswith("target llama.cpp q4_0 ") for line in lines
    )  # how far each file is from the model
    assert sum(line.startswith("✓") for line in lines) == len(STAGES) + 4 - 1
    with pytest.raises(CheckFailed, match=r"a peak of .* MiB; 0.1 GiB at most"):
        rehearsed(out, memory=0.1)
    with pytest.raises(CheckFailed, match=r"ran through, and: .* in all; 0.0s at most"):
        rehearsed(out, minutes=0.0)
    with pytest.raises(InputError, match=r"something else \(context\); give another --rehearsal.out"):
        rehearsed(out, context=64)


def test_new_weights_have_no_files_of_old_ones(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "weights" / "inputs.json").unlink()
    (out / "weights" / "stage.json").unlink()
    shutil.rmtree(out / "weights" / "tiny-random")
    write_json(out / "weights" / "inputs.json", {"made": "anew", "files": {}, "stages": {}, "revisions": {}})
    old = (out / "gguf" / "inputs.json").read_text()
    with pytest.raises(SystemExit):
        main([str(out), "gguf"])
    assert read_json(out / "gguf" / "inputs.json")["stages"] == {"weights": "anew"}
    assert (out / "gguf" / "inputs.json").read_text() != old


def test_a_stage_whose_rehearsal_was_killed_works_alone(finished: Path, tmp_path: Path) -> None:
    """It goes on by itself. The next rehearsal starts no second one beside it, and says who is at work."""
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "gguf" / "stage.json").unlink()
    words = r"ended with 1: .*measured is in use by process .*; wait for its end"
    with held(out / MEASURED, "the rehearsal's stage gguf"), pytest.raises(EdgespecError, match=words):
        rehearsed(out)
    assert not (out / "gguf" / "stage.json").exists()


def test_a_stage_that_fails_names_its_log(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    shutil.rmtree(out / "distill")
    (out / "pretrain" / "model" / "config.json").unlink()
    with pytest.raises(
        EdgespecError, match=r"distill ... ended with 1: .*config.json.*its output is in .*distill.txt"
    ):
        rehearsed(out)
    assert not (out / "distill" / "stage.json").exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "free_disk",
            r"needs .* GiB more on the disk of .*; 1 GiB are free: make room or give another --rehearsal.out",
        ),
        ("free_memory", r"needs .* GiB of memory and 1 GiB are free; .* a smaller --rehearsal.shape"),
    ],
)
def test_too_little_room_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    monkeypatch.setattr(rehearse, "free_disk", lambda _: 2**40)
    monkeypatch.setattr(rehearse, "free_memory", lambda: 2**40)
    monkeypatch.setattr(rehearse, what, lambda *_: 2**30)
    with pytest.raises(InputError, match=words):
        rehearsed(tmp_path / "out", shape="")
    assert not (tmp_path / "out").exists()


def test_without_llama_cpp_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "_library", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingExtra, match="llama-cpp-python"):
        rehearsed(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match=r"other files and no rehearsal.json; .* with --rehearsal.out$"):
        rehearsed(tmp_path)


def test_what_a_seven_billion_target_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from edgespec.recipe.targets import shape_of_target

    shape = shape_of_target("llama-2-7b-chat")
    assert 21e9 < needed_disk(shape) < 35e9
    assert rehearsed(tmp_path / "out", check_only=True) == 0
    assert "MiB on the disk" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


HOLDS = """
import sys, time
from pathlib import Path
text, folder, size = sys.stdin.read(), Path(sys.argv[1]), int(sys.argv[2])
x = bytearray(size)
x[::4096] = b"1" * len(x[::4096])
(folder / "holds").touch()
end = time.monotonic() + 60
while not (folder / "seen").exists() and time.monotonic() < end:
    time.sleep(0.01)
print(text)
"""


def test_memory_of_a_program_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program waits with what it holds until it was looked at."""
    look = measured._look

    def usage_of(name: str, size: int) -> Usage:
        folder = tmp_path / name
        folder.mkdir()

        def looked(pid: int, seen: dict[str, int]) -> None:
            holds = (folder / "holds").exists()
            look(pid, seen)
            if holds:
                (folder / "seen").touch()

        monkeypatch.setattr(measured, "_look", looked)
        command = [sys.executable, "-c", HOLDS, str(folder), str(size)]
        return run_measured(command, tmp_path / "log.txt", "hello")

    usage, little = usage_of("much", 80 * 2**20), usage_of("little", 0)
    assert 80 * 2**20 < usage.peak < 200 * 2**20
    assert little.peak < 60 * 2**20
    assert usage.own is None or usage.own > 80 * 2**20
    assert "hello" in (tmp_path / "log.txt").read_text()
    with pytest.raises(EdgespecError, match=r"ended with 3: no\n? ?/? ?.*its output is in"):
        run_measured([sys.executable, "-c", "print('no'); raise SystemExit(3)"], tmp_path / "other.txt")


def test_a_program_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a model that was fetched; the installed edgespec itself does not look there either."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    run_measured([sys.executable, "-c", "import json"], tmp_path / "log.txt")


def test_random_weights_resume_shard_by_shard(tmp_path: Path) -> None:
    total = write_checkpoint(TINY, tmp_path / "whole", shard_bytes=2**20)
    shards = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert len(shards) > 3
    assert total == 2 * TINY.parameters == read_json(tmp_path / "whole" / INDEX)["metadata"]["total_size"]
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    kept = (cut / shards[0].name).stat().st_mtime_ns
    (cut / shards[2].name).unlink()
    write_checkpoint(TINY, cut, shard_bytes=2**20)
    assert (cut / shards[2].name).read_bytes() == shards[2].read_bytes()
    assert (cut / shards[0].name).stat().st_mtime_ns == kept
    checkpoint = Checkpoint(tmp_path / "whole")
    gate = np.concatenate(list(checkpoint.pieces("model.layers.1.mlp.gate_proj.weight")))
    assert gate.std() == pytest.approx(TINY.hidden**-0.5, rel=0.02)
    other = np.concatenate(list(checkpoint.pieces("model.layers.2.mlp.gate_proj.weight")))
    assert abs(np.corrcoef(gate.ravel(), other.ravel())[0, 1]) < 0.02


def test_half_a_tokenizer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was cut while it wrote tokenizer.json leaves no part of it, which the next run would take for the whole."""

    class Cut:
        @property
        def backend_tokenizer(self) -> Cut:
            return self

        def save(self, file: str) -> None:
            Path(file).write_text('{"version": ')
            raise KeyboardInterrupt

    source, folder = tmp_path / "source", tmp_path / "made"
    for place in (source, folder):
        place.mkdir()
    (source / "tokenizer.model").touch()
    monkeypatch.setattr(rehearsal_data, "load_tokenizer", lambda folder: Cut())
    with pytest.raises(KeyboardInterrupt):
        write_tokenizer(folder, 1000, source)
    assert sorted(file.name for file in folder.iterdir()) == ["tokenizer.model", "tokenizer_config.json"]


def test_the_real_llama_2_tokenizer(shared: Path, tmp_path: Path) -> None:
    words = write_tokenizer(tmp_path, 32_000, shared / "data" / "tokenizer_llama2")
    assert words == "tokenizer_llama2, 32000 tokens"
    tokenizer = ChatTokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "Hello world"}]) == [
        *(1, 518, 25580, 29962, 15043, 3186, 518, 29914, 25580, 29962),
    ]
    with pytest.raises(InputError, match="has 32000 tokens and the model 1000"):
        write_tokenizer(tmp_path, 1000, shared / "data" / "tokenizer_llama2")


def test_a_program_that_the_system_killed_is_told_with_the_likely_reason(tmp_path: Path) -> None:
    kills = "import os; print('begun', flush=True); os.kill(os.getpid(), 9)"
    words = (
        r"was killed, as the system does where no memory is left \(close .*\): begun; its output is in .*log"
    )
    with pytest.raises(EdgespecError, match=words):
        run_measured([sys.executable, "-c", kills], tmp_path / "log.txt")
