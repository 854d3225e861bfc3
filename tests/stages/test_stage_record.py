"""A stage knows what it read by content: what changed runs again, with what follows from it, and nothing else does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.core.files import read_json, write_json, write_text
from edgespec.stages import record as stage_record
from edgespec.stages import sources as stage_sources
from edgespec.stages.record import BEFORE_RECORDS, RECORD, Reads, Source, clear_if_inputs_changed, run_id
from edgespec.stages.stage import CHECKPOINTS, STAGE_FILE, reopen, run_stage

OLD, NEW = "a row\n", "another row\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_text(tmp_path / "rows.jsonl", OLD)
    return tmp_path / "rows.jsonl"


def of(*files: Path, root: Path | None = None) -> Reads:
    return Reads(files={"data": Source(root or files[0], files)})


def ran(folder: Path, reads: Reads, text: str = "made") -> str:
    """Settle and run a stage that writes one file; the reason for running again."""
    why = clear_if_inputs_changed(folder, reads)
    run_stage(folder, {}, lambda place: write_text(place / "made.txt", text) or {})  # type: ignore[func-returns-value]
    return why


def test_nothing_is_hashed_or_written_again_where_nothing_changed(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "stage"
    assert ran(stage, of(file)) == ""
    before = (stage / RECORD).stat().st_mtime_ns
    stage_record._known.clear()
    monkeypatch.setattr(stage_record, "_sha256", lambda *_: pytest.fail("hashed"))
    assert ran(stage, of(file), "again") == ""
    assert (stage / "made.txt").read_text() == "made"
    assert (stage / RECORD).stat().st_mtime_ns == before


def test_an_edited_file_is_told_by_its_content(tmp_path: Path, file: Path) -> None:
    stage = tmp_path / "stage"
    ran(stage, of(file))
    name = run_id(stage)
    os.utime(file, ns=(1, 1))  # touched, copied, unpacked: the same content
    assert ran(stage, of(file), "again") == ""
    write_text(file, NEW)
    assert ran(stage, of(file), "again") == "rows.jsonl changed (6 -> 12 bytes)"
    assert (stage / "made.txt").read_text() == "again"
    assert run_id(stage) != name
    write_text(file, NEW.upper())  # as long as before
    assert ran(stage, of(file)) == "rows.jsonl changed (12 -> 12 bytes)"
    assert ran(stage, of(file)) == ""


def test_checkpoints_stay_until_a_stage_is_done(tmp_path: Path) -> None:
    checkpoint = tmp_path / CHECKPOINTS / "checkpoint-1" / "weights"

    def body(counts: dict[str, object]) -> Callable[[Path], dict[str, object]]:
        return lambda place: write_text(checkpoint, "") or counts  # type: ignore[func-returns-value]

    with pytest.raises(TypeError):  # the body has ended, and its marker cannot be written
        run_stage(tmp_path, {}, body({"odd": object()}))
    assert checkpoint.exists()
    run_stage(tmp_path, {}, body({}))
    assert not checkpoint.exists()
    write_text(checkpoint, "")  # what a kill behind the marker leaves
    run_stage(tmp_path, {}, body({}))
    assert not (tmp_path / CHECKPOINTS).exists()


def test_half_of_a_stage_is_not_mixed_with_another_half(tmp_path: Path, file: Path) -> None:
    stage = tmp_path / "stage"
    clear_if_inputs_changed(stage, of(file))
    write_text(stage / "shard-0", "of the old rows")
    assert clear_if_inputs_changed(stage, of(file)) == ""
    assert (stage / "shard-0").exists()
    write_text(file, NEW)
    assert clear_if_inputs_changed(stage, of(file)) == "rows.jsonl changed (6 -> 12 bytes)"
    assert [path.name for path in stage.iterdir()] == [RECORD]


def test_what_follows_runs_again_and_nothing_else(tmp_path: Path, file: Path) -> None:
    write_text(tmp_path / "text", "text")
    stages: dict[str, Callable[[], Reads]] = {
        "learn": lambda: of(tmp_path / "text"),
        "write": lambda: of(file),
        "distil": lambda: stage_sources.stages(tmp_path, "learn", "write"),
        "export": lambda: stage_sources.model("drafter", tmp_path / "distil" / "model", tmp_path),
    }

    def build() -> dict[str, str]:
        return {name: why for name, reads in stages.items() if (why := ran(tmp_path / name, reads()))}

    assert build() == {}
    assert build() == {}
    write_text(file, NEW)
    assert build() == {
        "write": "rows.jsonl changed (6 -> 12 bytes)",
        "distil": "write ran again",
        "export": "distil ran again",
    }
    assert build() == {}
    (tmp_path / "write" / "stage.json").unlink()  # how a damaged shard is mended: it is the same result
    assert build() == {}


def test_files_that_come_and_go(tmp_path: Path) -> None:
    root, stage = tmp_path / "texts", tmp_path / "stage"
    for name in "ab":
        write_text(root / f"{name}.txt", name)

    def reads() -> Reads:
        return stage_sources.text("pretrain.text", str(root))

    ran(stage, reads())
    write_text(root / "c.txt", "c")
    write_text(root / "notes.md", "not read")
    assert ran(stage, reads()) == "pretrain.text: c.txt is new"
    (root / "a.txt").unlink()
    assert ran(stage, reads()) == "pretrain.text: a.txt is gone"
    root.rename(tmp_path / "elsewhere")  # all of it: the result is kept
    assert ran(stage, reads()) == ""
    (tmp_path / "elsewhere").rename(root)
    assert ran(stage, reads()) == ""


def test_a_file_that_was_not_there_before(tmp_path: Path) -> None:
    """A result that was made without it is made again with it."""
    stage, file = tmp_path / "stage", tmp_path / "evaluation.json"
    assert ran(stage, of(file)) == ""
    write_text(file, "{}")
    assert ran(stage, of(file)) == "data: evaluation.json is new"


def test_results_of_before_there_were_records_are_kept(tmp_path: Path, file: Path) -> None:
    for name in ("write", "distil"):
        run_stage(tmp_path / name, {}, lambda place: {})

    def build() -> list[str]:
        after = stage_sources.stages(tmp_path, "write")
        return [ran(tmp_path / "write", of(file)), ran(tmp_path / "distil", after)]

    assert build() == ["", ""]
    assert run_id(tmp_path / "write") == BEFORE_RECORDS
    write_text(file, NEW)
    assert build() == ["rows.jsonl changed (6 -> 12 bytes)", "write ran again"]


def test_a_result_without_a_record_is_older_than_a_stage_with_one(tmp_path: Path, file: Path) -> None:
    """A build of before, whose first stage ran again before the second one was looked at."""
    run_stage(tmp_path / "distil", {}, lambda place: {})
    ran(tmp_path / "write", of(file))
    assert ran(tmp_path / "distil", stage_sources.stages(tmp_path, "write")) == "write ran again"


@pytest.mark.parametrize("content", ["{", "[]", '{"made": 3}', '{"made": "x", "files": []}'])
def test_a_damaged_record_is_none(tmp_path: Path, file: Path, content: str) -> None:
    stage = tmp_path / "stage"
    ran(stage, of(file))
    (stage / RECORD).write_text(content)
    assert ran(stage, of(file)) == ""
    assert read_json(stage / RECORD)["files"]["data"]["rows.jsonl"]["bytes"] == 6


def test_hub_datasets_are_told_by_revision(tmp_path: Path) -> None:
    stage, now = tmp_path / "stage", ["1" * 40]

    def reads() -> Reads:
        return Reads(revisions={"hub:o/n": lambda: now[0] or None})

    clear_if_inputs_changed(stage, reads())
    assert clear_if_inputs_changed(stage, reads()) == ""
    now[0] = ""  # no network
    assert clear_if_inputs_changed(stage, reads()) == ""
    now[0] = "2" * 40
    assert clear_if_inputs_changed(stage, reads()) == "hub:o/n changed (revision 11111111 -> 22222222)"
    run_stage(stage, {}, lambda place: {})
    now[0] = "3" * 40  # a finished stage keeps what it read
    assert clear_if_inputs_changed(stage, reads()) == ""
    assert read_json(stage / RECORD)["revisions"] == {"hub:o/n": "2" * 40}


def test_a_file_can_be_the_whole_result(tmp_path: Path, file: Path) -> None:
    result, record = tmp_path / "counts.json", tmp_path / "counts.inputs.json"
    assert clear_if_inputs_changed(result, of(file), record) == ""
    write_json(result, 1)
    assert clear_if_inputs_changed(result, of(file), record) == ""
    write_text(file, NEW)
    assert clear_if_inputs_changed(result, of(file), record) == "rows.jsonl changed (6 -> 12 bytes)"
    assert not result.exists()


def test_a_model_folder_is_its_config_tokenizer_and_weights(tmp_path: Path) -> None:
    model, out = tmp_path / "target", tmp_path / "out"
    template, weights = "additional_chat_templates/tool_use.jinja", "model.safetensors"
    for name in ("config.json", "tokenizer.json", template, weights, "README.md", "pytorch_model.bin"):
        write_text(model / name, name)
    whole = stage_sources.model("target", model, out).files["target"]
    assert sorted(whole.names()) == [template, "config.json", weights, "tokenizer.json"]
    without = stage_sources.model("target", model, out, weights=False).files["target"]
    assert sorted(without.names()) == [template, "config.json", "tokenizer.json"]
    inside = stage_sources.model("drafter", out / "distill" / "model", out)
    assert (inside.files, inside.stages) == ({}, {"distill": out / "distill"})


def test_a_killed_removal_is_finished_by_the_next_run(tmp_path: Path, file: Path) -> None:
    write_text(tmp_path / ".stage.123.stale" / "big", "x")
    clear_if_inputs_changed(tmp_path / "stage", of(file))
    assert not list(tmp_path.glob(".*.stale"))


def test_a_stage_opened_again_for_a_damaged_file_counts_its_seconds_on(tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    reopen(stage)  # what has not begun stays as it is
    assert not stage.exists()
    run_stage(stage, {}, lambda place: {})
    write_json(stage / STAGE_FILE, {**read_json(stage / STAGE_FILE), "seconds": 7200.0})
    reopen(stage)
    assert run_stage(stage, {}, lambda place: {"shards": 1}) == {"shards": 1}
    assert read_json(stage / STAGE_FILE)["seconds"] >= 7200.0
    assert [file.name for file in stage.iterdir()] == [STAGE_FILE]


def test_a_folder_that_cannot_be_moved_is_deleted_where_it_is(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a build that came with a container's image: an overlay file system moves no folder of a lower layer."""

    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    stage, why = tmp_path / "stage", "rows.jsonl changed (6 -> 12 bytes)"
    ran(stage, of(file))
    write_text(stage / "model" / "weights", "of the old rows")
    write_text(file, NEW)
    monkeypatch.setattr(stage_record, "put_in_place", refused)
    with monkeypatch.context() as patch:
        patch.setattr(stage_record.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clear_if_inputs_changed(stage, of(file))
    assert not (stage / STAGE_FILE).exists()
    assert clear_if_inputs_changed(stage, of(file)) == why
    assert [path.name for path in stage.iterdir()] == [RECORD]
