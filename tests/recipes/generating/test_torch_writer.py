"""The target in torch that writes and keeps what it computed: what one pass over the text gives, in whatever batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_recipes.generating import choose_writer, target_store, torch_writer
from edgespec_recipes.generating.batch_writer import BatchWriter
from edgespec_recipes.generating.choose_writer import writer_of
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.response_shards import Request, read_responses
from edgespec_recipes.generating.torch_writer import TorchWriter
from edgespec_recipes.models.loading import load_model, load_tokenizer
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.written_states import WrittenRows
from edgespec_recipes.training.distill import responses_of
from stored_rows import read_states
from writing_target import (
    FILE,
    SEED_FILE,
    TARGET,
    make_writing_target,
    near,
    near_records,
    one_pass,
    shards,
)

from edgespec.core.errors import InputError, NoNumbers
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.stages.own_gguf import OwnFile
from edgespec.stages.record import sha256_of

TOP_K, SEED = 8, 3
FLOATS, BF16 = Precision("float32", "said by a test"), Precision("bf16", "said by a test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_writing_target(tmp_path_factory.mktemp("torch-writer"), context=256)


@pytest.fixture(scope="module")
def options(folder: Path) -> GenerateOptions:
    return GenerateOptions(
        instructions=(str(folder / SEED_FILE),),
        prompts=22,
        max_new_tokens=20,
        shard_size=12,
        batch_size=5,
        features=True,
    )


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device multiplies in float32, whatever it can: then a batch is one pass up to float32's rounding.

    One token in ten ends a text: the random model would never end one.
    """
    monkeypatch.setattr(torch_writer, "choose_precision", lambda device: FLOATS)
    monkeypatch.setattr(torch_writer, "stop_ids_of", lambda folder, tokenizer: list(range(0, 512, 10)))


@pytest.fixture
def written(folder: Path, options: GenerateOptions, tmp_path: Path, floats: None) -> Path:
    out = tmp_path / "written"
    counts = generate(out, folder / TARGET, options, SEED, top_k=TOP_K)
    assert counts["state_bytes"] == sum(path.stat().st_size for path in out.glob("*.npy")) > 0
    return out


def test_records_and_features_are_those_of_one_pass(written: Path, folder: Path) -> None:
    model = load_model(folder / TARGET)
    lengths = set()
    for shard in sorted(written.glob("shard-*.jsonl")):
        for row, records, features in read_states(shard):
            hidden, kept = one_pass(model, row["prompt_ids"], row["response_ids"], TOP_K)
            near(features, hidden)
            near_records(records, kept)
            lengths.add(len(row["response_ids"]))
    assert len(lengths) > 1  # texts ended at different times, and left the batch


def test_keeping_changes_no_answer(
    written: Path, folder: Path, options: GenerateOptions, tmp_path: Path, floats: None
) -> None:
    generate(tmp_path / "plain", folder / TARGET, replace(options, features=False), SEED, top_k=TOP_K)
    assert read_responses(tmp_path / "plain") == read_responses(written)
    assert not list((tmp_path / "plain").glob("*.npy"))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_nan_from_the_target_is_an_error(folder: Path, options: GenerateOptions, heat: float) -> None:
    """Also where nothing is kept: else hours of one token are written."""
    keeping_nothing = replace(options, features=False)
    writer = writer_of(
        folder / TARGET, load_tokenizer(folder / TARGET), keeping_nothing, 0, InferenceOptions()
    )
    assert isinstance(writer, TorchWriter)
    writer.model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(NoNumbers, match="the target gives logits that are no numbers"):
        list(writer.answers(0, [Request(0, [], [1, 2, 3], heat)]))


def test_a_shard_made_again_is_the_same(
    written: Path, folder: Path, options: GenerateOptions, floats: None
) -> None:
    before = shards(written)
    path = written / "shard-00001.features.npy"
    path.write_bytes(path.read_bytes()[:-1])
    counts = generate(written, folder / TARGET, options, SEED, top_k=TOP_K)
    assert counts["remade_shards"] == ["shard-00001.jsonl"]
    assert shards(written) == before


def test_a_head_reads_it(written: Path) -> None:
    rows = WrittenRows(written, 64)
    assert len(rows) > 0
    assert len(rows.records(0)) == int(rows[0]["compared"].sum())


def test_the_store_takes_what_was_kept(
    written: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_store, "choose_precision", lambda device: FLOATS)
    rows = responses_of(written, 64)
    target_store.store_targets(tmp_path / "again", folder / TARGET, rows, TOP_K)
    monkeypatch.setattr(target_store, "_open_target", lambda *_: pytest.fail("the target was opened"))
    counts = target_store.store_targets(tmp_path / "taken", folder / TARGET, rows, TOP_K, written=written)
    assert counts["stored_positions"] == sum(int(row["compared"].sum()) for row in rows)
    again, taken = (
        np.concatenate([np.load(shard) for shard in sorted((tmp_path / name).glob("shard-*.npy"))])
        for name in ("again", "taken")
    )
    near_records(taken, again)


def test_bf16_weights_where_the_device_has_units_for_them(
    folder: Path, options: GenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision, dtype in ((BF16, torch.bfloat16), (FLOATS, torch.float32)):
        monkeypatch.setattr(torch_writer, "choose_precision", lambda device, found=precision: found)
        writer = writer_of(folder / TARGET, load_tokenizer(folder / TARGET), options, 0, InferenceOptions())
        assert isinstance(writer, TorchWriter)
        assert (writer.model.dtype, writer.precision) == (dtype, precision)


def test_a_targets_own_file_is_written_from_in_torch_where_that_is_faster(
    folder: Path, options: GenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = folder / TARGET, folder / FILE
    other = tmp_path / "other.gguf"
    export_gguf(model, other, "q8_0")
    OwnFile(own, sha256_of([own])[own], own.stat().st_size, "f32").keep(model)
    tokenizer = load_tokenizer(model)

    def kind(file: Path, precision: Precision) -> type:
        monkeypatch.setattr(choose_writer, "choose_precision", lambda device: precision)
        how = InferenceOptions(source="file", file=str(file))
        found = writer_of(model, tokenizer, options, 0, how, TOP_K)
        assert found.wanted.target == target_store.identity_of(model, how)  # type: ignore[attr-defined]
        return type(found)

    assert [kind(own, BF16), kind(own, FLOATS), kind(other, BF16)] == [TorchWriter, BatchWriter, BatchWriter]


def test_what_cannot_be_kept_is_said(folder: Path, options: GenerateOptions, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stored_top_k is 100000; the target's vocabulary has \d+ tokens"):
        generate(tmp_path, folder / TARGET, options, SEED, top_k=100_000)
    how = InferenceOptions(source="server", url="http://127.0.0.1:9")
    with pytest.raises(
        InputError, match=r"source is 'server': an ONNX file or a server gives no hidden states"
    ):
        generate(tmp_path, folder / TARGET, options, SEED, how)
