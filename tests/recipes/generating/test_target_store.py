"""The target's distributions on disk: right, resumed, shared, and found out when a shard is corrupt or of something else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edgespec_recipes.data.token_rows import Rows
from edgespec_recipes.generating import target_store as stage
from edgespec_recipes.generating.target_store import StoredTargets, store_error, store_targets
from edgespec_recipes.losses.losses import fkl, tvd
from edgespec_recipes.models.kept_positions import logits_at
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.parallel.precision import Precision
from stored_rows import ROWS, TOP_K, some_rows
from tiny_models import make_model_folder
from torch import Tensor
from torchrun import two_processes

from edgespec.core.errors import InputError
from edgespec.recipe.schema import InferenceOptions


@pytest.fixture(autouse=True)
def plain_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 everywhere, so that the references of these tests are exact."""
    monkeypatch.setattr(stage, "choose_precision", lambda _: Precision("float32", "for the test"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("stored") / "target")


@pytest.fixture
def store(tmp_path: Path, target: Path) -> Path:
    counts = store_targets(tmp_path / "store", target, some_rows(), TOP_K, shard_rows=2)
    assert counts["shards"] == 6
    assert counts["remade_shards"] == []
    return tmp_path / "store"


def live_logits(model: Any, rows: Rows, row_ids: list[int]) -> Tensor:
    """[n, V], each row on its own."""
    logits = []
    with torch.inference_mode():
        for row in row_ids:
            item = rows[row]
            for document in range(int(item["document_ids"].max()) + 1):
                here = item["document_ids"] == document
                ids, keep = (torch.from_numpy(item[name][here])[None] for name in ("input_ids", "compared"))
                logits.append(logits_at(model, keep, input_ids=ids))
    return torch.cat(logits)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_stored_is_the_live_target(store: Path, target: Path) -> None:
    rows, wanted = some_rows(), [7, 0, 10]
    live = torch.log_softmax(live_logits(load_model(target), rows, wanted), -1)
    target_rows = StoredTargets(store).rows(wanted, torch.device("cpu"))
    found = torch.cat([target_rows(slice(at, at + 40)) for at in range(0, len(live), 40)])
    values, ids = live.topk(TOP_K)
    torch.testing.assert_close(found.gather(-1, ids), values, rtol=2e-3, atol=1e-4)  # float16 has 11 bits
    rest = (found.exp().sum(-1) - found.gather(-1, ids).exp().sum(-1)).log()
    torch.testing.assert_close(rest, (1 - values.exp().sum(-1)).log(), rtol=5e-3, atol=2e-3)


def test_a_store_that_is_made_within_a_tick_of_the_clock_has_no_rate(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of Windows has one every 16 ms."""
    monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: 5.0))
    counts = store_targets(tmp_path, target, some_rows(), TOP_K)
    assert counts["tokens_per_second"] is None


def test_counts(store: Path, target: Path) -> None:
    rows = some_rows()
    counts = store_targets(store, target, rows, TOP_K, shard_rows=2)
    live = torch.softmax(live_logits(load_model(target), rows, list(range(ROWS))), -1)
    assert counts["stored_positions"] == len(live) == int(rows.arrays["compared"].sum())
    assert counts["mean_remainder"] == pytest.approx(
        float((1 - live.topk(TOP_K).values.sum(-1)).mean()), rel=1e-3
    )
    assert counts["bytes_per_position"] == pytest.approx(TOP_K * 4 + 2, abs=6)  # and six headers
    assert counts["tokens_per_second"] is None  # nothing was left to do


def test_killed_run_goes_on(
    store: Path, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = stage._write_shard, []

    def until_the_fourth(out: Path, number: int, *given: Any) -> None:
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        plain(out, number, *given)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_write_shard", until_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            store_targets(tmp_path / "cut", target, some_rows(), TOP_K, shard_rows=2)
    with pytest.raises(InputError, match="the store is not finished"):
        StoredTargets(tmp_path / "cut")
    (tmp_path / "cut" / "shard-00003.npy").write_bytes(b"half")  # killed between data and description
    monkeypatch.setattr(
        stage, "_write_shard", lambda out, number, *given: (calls.append(number), plain(out, number, *given))
    )
    counts = store_targets(tmp_path / "cut", target, some_rows(), TOP_K, shard_rows=2)
    assert calls == [0, 1, 2, 3, 3, 4, 5]
    assert counts["remade_shards"] == []  # nothing that was whole is lost
    assert contents(tmp_path / "cut") == contents(store)


def test_corrupt_shards_are_named_and_only_they_are_made_again(
    store: Path, target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store)
    flipped = bytearray(before["shard-00001.npy"])
    flipped[-5] ^= 1
    (store / "shard-00001.npy").write_bytes(flipped)
    (store / "shard-00002.npy").write_bytes(before["shard-00002.npy"][:-3])
    (store / "shard-00003.json").write_text("{")
    (store / "shard-00005.npy").unlink()
    with pytest.raises(InputError, match=r"shard-00001\.npy has the sha256 .*only this shard is made again"):
        StoredTargets(store).rows([2], torch.device("cpu"))
    made = []
    plain = stage._write_shard
    monkeypatch.setattr(
        stage, "_write_shard", lambda out, number, *given: (made.append(number), plain(out, number, *given))
    )
    counts = store_targets(store, target, some_rows(), TOP_K, shard_rows=2)
    assert made == [1, 2, 3, 5]
    assert counts["remade_shards"] == [f"shard-0000{number}.npy" for number in made]
    for words in (
        "shard-00001.npy has the sha256",
        "shard-00002.npy has",
        "shard-00003.json is not valid JSON",
        "shard-00005.npy is missing",
    ):
        assert words in caplog.text
    assert contents(store) == before


def test_shards_of_something_else_are_refused(store: Path, target: Path, tmp_path: Path) -> None:
    before = contents(store)
    with pytest.raises(
        InputError, match=r"stored for something else \(top_k 8 instead of 4\); give another folder"
    ):
        store_targets(store, target, some_rows(), 4, shard_rows=2)
    with pytest.raises(InputError, match=r"\(rows \w+ instead of \w+\)"):
        store_targets(store, target, some_rows(seed=1), TOP_K, shard_rows=2)
    other = make_model_folder(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=r"\(target \w+ instead of \w+\)"):
        store_targets(store, other, some_rows(), TOP_K, shard_rows=2)
    assert contents(store) == before


def test_a_part_of_the_vocabulary(store: Path, target: Path) -> None:
    """The stored tokens the draft knows keep their p; the others have no column."""
    ids = torch.arange(1, 512, 3)
    live = torch.log_softmax(live_logits(load_model(target), some_rows(), [4]), -1)
    found = StoredTargets(store).rows([4], torch.device("cpu"), ids)(slice(None))
    assert found.shape == (len(live), len(ids))
    kept = torch.zeros_like(live, dtype=torch.bool).scatter(-1, live.topk(TOP_K).indices, True)[:, ids]
    assert kept.any()
    torch.testing.assert_close(found[kept], live[:, ids][kept], rtol=2e-3, atol=1e-4)


def test_error_against_live(
    store: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = load_model(target), load_model(make_model_folder(tmp_path / "draft", seed=2))
    rows = some_rows()
    errors = store_error(StoredTargets(store), model, draft, rows, [3, 9], {"fkl": fkl, "tvd": tvd})
    live, q = live_logits(model, rows, [3, 9]), live_logits(draft, rows, [3, 9])
    assert errors["tvd"]["live"] == pytest.approx(float(tvd(q, live).mean()), rel=1e-4)
    assert 0 < errors["fkl"]["relative_error"] < 1
    store_targets(tmp_path / "more", target, rows, 512, shard_rows=4)
    exact = store_error(
        StoredTargets(tmp_path / "more"), model, draft, rows, [3, 9], {"fkl": fkl, "tvd": tvd}
    )
    for name in errors:
        assert exact[name]["relative_error"] < 1e-3 < errors[name]["relative_error"]
        assert exact[name]["gradient_cosine"] > 0.999
    first = live_logits(model, rows, [3]).shape[0] + 5  # one row, and of the other a little
    monkeypatch.setattr(stage, "MEASURED_LOGITS", first * 512 + 511)
    monkeypatch.setattr(stage, "PASS_TOKENS", 64)  # a row in each pass
    fewer = store_error(StoredTargets(store), model, draft, rows, [3, 9], {"tvd": tvd})
    assert fewer["tvd"]["live"] == pytest.approx(float(tvd(q[:first], live[:first]).mean()), rel=1e-4)


def test_folders_beside_the_files_of_a_target_are_none_of_it(tmp_path: Path) -> None:
    """As a download or git leaves them in an ONNX folder."""
    (tmp_path / "genai_config.json").write_text("{}")
    (tmp_path / "model.onnx").write_bytes(b"weights")
    how = InferenceOptions(source="file", file=str(tmp_path))
    before = stage.identity_of(tmp_path, how)
    (tmp_path / ".cache").mkdir()
    assert stage.identity_of(tmp_path, how) == before
    (tmp_path / "model.onnx").write_bytes(b"others")
    assert stage.identity_of(tmp_path, how) != before


def test_bad_input(store: Path, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stored_top_k is 513; the target's vocabulary has 512"):
        store_targets(tmp_path / "new", target, some_rows(), 513)
    with pytest.raises(InputError, match=r"row 11 was not stored: .* has 11 rows"):
        StoredTargets(store).rows([11], torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(InputError, match="7 processes share 6 shards of stored targets; start at most 6"):
        store_targets(store, target, some_rows(), TOP_K, shard_rows=2)


PROGRAM = """
import atexit, json, logging, sys
from pathlib import Path
from torch import distributed
from edgespec_recipes.parallel import processes
from edgespec_recipes.generating import target_store
from edgespec_recipes.parallel.precision import Precision
from stored_rows import TOP_K, some_rows

logging.disable()
target_store.choose_precision = lambda _: Precision("float32", "for the test")
made, plain = [], target_store._write_shard
target_store._write_shard = lambda out, number, *given: (made.append(number), plain(out, number, *given))
out, target = map(Path, sys.argv[1:])
# registered first, so it runs last
atexit.register(lambda: Path(f"{out}-left-{processes.rank()}").write_text(str(distributed.is_initialized())))
for turn in range(2):
    counts = target_store.store_targets(out, target, some_rows(), TOP_K, shard_rows=2)
    Path(f"{out}-{turn}-{processes.rank()}.json").write_text(json.dumps({"made": made, **counts}))
    made.clear()
    if not turn:
        if not processes.rank():
            (out / "shard-00001.npy").write_bytes(b"")
        processes.wait()
"""


@pytest.mark.training
def test_two_processes_share_the_shards(store: Path, target: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    two_processes(program, str(tmp_path / "pair"), str(target))
    told = {
        (turn, rank): json.loads((tmp_path / f"pair-{turn}-{rank}.json").read_text())
        for turn in range(2)
        for rank in range(2)
    }
    assert [told[0, 0]["made"], told[0, 1]["made"]] == [[0, 2, 4], [1, 3, 5]]
    assert [told[1, 0]["made"], told[1, 1]["made"]] == [[], [1]]
    assert told[1, 0]["remade_shards"] == told[1, 1]["remade_shards"] == ["shard-00001.npy"]
    assert told[0, 0]["stored_positions"] == told[0, 1]["stored_positions"]
    assert told[1, 0]["tokens_per_second"] == told[1, 1]["tokens_per_second"] > 0  # of both together
    assert contents(tmp_path / "pair") == contents(store)
    # a group still open at the interpreter's end aborts it now and then
    assert [(tmp_path / f"pair-left-{rank}").read_text() for rank in range(2)] == ["False", "False"]
