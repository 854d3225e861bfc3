"""The target as an exported file on a CPU: what it writes and what it stores are the target's, and no weights are read for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.generating import datagen, file_target, response_shards
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.file_target import FileTarget
from edgespec_recipes.generating.response_shards import read_responses
from edgespec_recipes.generating.target_store import identity_of, store_targets
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.training.distill import DistillInputs, distill, responses_of, store_responses
from tiny_bundle import disturbed, exported_bundle
from tiny_models import make_model_folder
from writing_target import answers, near_records, six_answers

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.schema import DistillOptions, GenerateOptions, InferenceOptions

TOP_K = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target: a model folder; its files; slim: the same folder without weights; bundle."""
    root = tmp_path_factory.mktemp("file")
    target = make_model_folder(root / "target", context=96)
    export_gguf(target, root / "f32.gguf", "f32")
    export_onnx(target, root / "onnx", "fp32")
    shutil.copytree(target, root / "slim", ignore=shutil.ignore_patterns("*.safetensors"))
    exported_bundle(root, target, disturbed(target, root / "drafter", 0.07))
    return root


@pytest.fixture
def options(folder: Path) -> GenerateOptions:
    return six_answers(folder)


def of_file(folder: Path, name: str) -> InferenceOptions:
    return InferenceOptions(source="file", file=str(folder / name))


@pytest.mark.parametrize("name", ["f32.gguf", "onnx", "bundle"])
@pytest.mark.llamacpp
def test_a_file_writes_what_torch_would(
    folder: Path, options: GenerateOptions, tmp_path: Path, name: str
) -> None:
    counts = generate(tmp_path, folder / "slim", options, 1, of_file(folder, name))
    assert counts["responses"] == 6
    assert str(folder) in counts["precision_reason"]
    from small_llama import greedy

    model = load_model(folder / "target")
    for row in read_responses(tmp_path):
        assert 0 < len(row["response_ids"]) <= 10
        if row["temperature"] == 0:
            assert row["response_ids"] == greedy(model, row["prompt_ids"], 10, [2])


def test_an_answer_does_not_depend_on_its_shard(
    folder: Path, options: GenerateOptions, tmp_path: Path
) -> None:
    how = of_file(folder, "onnx")
    generate(tmp_path / "two", folder / "slim", options, 1, how)
    generate(tmp_path / "six", folder / "slim", replace(options, shard_size=6), 1, how)
    generate(tmp_path / "seed", folder / "slim", options, 2, how)
    assert answers(tmp_path / "two") == answers(tmp_path / "six")
    assert answers(tmp_path / "two") != answers(tmp_path / "seed")


def test_a_cut_run_goes_on_with_the_next_shard(
    folder: Path, options: GenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, asked = of_file(folder, "onnx"), []
    generate(tmp_path / "whole", folder / "slim", options, 1, how)
    plain = response_shards.write_shard

    def cut(path: Path, rows: list[dict[str, object]], *kept: Any) -> None:
        asked.append(path.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        plain(path, rows, *kept)

    monkeypatch.setattr(datagen, "write_shard", cut)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "cut", folder / "slim", options, 1, how)
    generate(tmp_path / "cut", folder / "slim", options, 1, how)
    assert asked == [f"shard-{number:05d}.jsonl" for number in (0, 1, 1, 2)]
    assert answers(tmp_path / "cut") == answers(tmp_path / "whole")


@pytest.mark.parametrize("name", ["f32.gguf", "onnx"])
@pytest.mark.llamacpp
def test_a_file_stores_what_torch_would(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec_recipes.generating import target_store

    monkeypatch.setattr(target_store, "choose_precision", lambda _: Precision("float32", "for the test"))
    generator = np.random.default_rng(0)
    conversations = [
        (generator.integers(4, 500, 5).tolist(), generator.integers(4, 500, size).tolist())
        for size in (3, 9, 20, 1, 12)
    ]
    rows = response_rows(conversations, 40)
    assert int(rows.arrays["document_ids"].max()) >= 1  # several conversations in a row
    store_targets(tmp_path / "torch", folder / "target", rows, TOP_K)
    counts = store_targets(tmp_path / "file", folder / "slim", rows, TOP_K, inference=of_file(folder, name))
    ours, theirs = (np.load(tmp_path / one / "shard-00000.npy") for one in ("torch", "file"))
    assert counts["stored_positions"] == len(ours) == 45
    near_records(ours, theirs, same=0.97)


def test_distillation_never_opens_the_targets_weights(
    folder: Path, options: GenerateOptions, tmp_path: Path
) -> None:
    how = of_file(folder, "onnx")
    generate(tmp_path / "responses", folder / "slim", options, 1, how)
    inputs = DistillInputs(
        target=folder / "slim",
        drafter=folder / "drafter",
        responses=tmp_path / "responses",
        text="",
        text_cache=tmp_path / "text",
        store=tmp_path / "store",
        inference=how,
    )
    recipe = DistillOptions(
        steps=3, batch_size=2, context=64, text_fraction=0.0, target_side="stored", stored_top_k=TOP_K, warmup_steps=1,
        learning_rate=1e-3, watch_steps=2, watch_rows=1,
    )  # fmt: skip
    counts = store_responses(tmp_path / "store", inputs, recipe)
    assert counts["stored_rows"] == len(responses_of(tmp_path / "responses", 64))
    assert "error" not in counts  # that would need the weights
    learnt = distill(tmp_path / "out", inputs, recipe, 0)
    assert learnt["loss_last"] < learnt["loss_first"]


@pytest.mark.llamacpp
def test_a_context_for_the_texts_and_not_the_models_own(tmp_path: Path) -> None:
    """Unless one is asked for: llama.cpp takes memory for all of it."""
    model = make_model_folder(tmp_path / "model", context=100_000)
    export_gguf(model, tmp_path / "f32.gguf", "f32")
    how = of_file(tmp_path, "f32.gguf")
    for longest, asked, seen in ((64, None, 2048), (3000, None, 3000), (64, 512, 512)):
        target = FileTarget(replace(how, context=asked), model, longest)
        assert target.context_length == seen
        target.close()


@pytest.mark.llamacpp
def test_files_of_others_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"'nowhere' is no bundle, no folder with a genai_config.json and no .gguf file"
    ):
        FileTarget(InferenceOptions(source="file", file="nowhere"), folder / "slim")
    with pytest.raises(InputError, match=r"no target in 'q2_k'; it has fp32, q8_0"):
        FileTarget(replace(of_file(folder, "bundle"), precision="q2_k"), folder / "slim")
    larger = make_model_folder(tmp_path / "larger", vocab_size=544)
    with pytest.raises(InputError, match=r"a vocabulary of 512 tokens and the target in .*larger of 544"):
        FileTarget(of_file(folder, "onnx"), larger)
    (tmp_path / "half.gguf").write_bytes((folder / "f32.gguf").read_bytes()[:5000])
    with pytest.raises(BundleError, match=r"half.gguf"):
        FileTarget(InferenceOptions(source="file", file=str(tmp_path / "half.gguf")), folder / "slim")


@pytest.mark.llamacpp
def test_a_file_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "slim", tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)  # type: ignore[arg-type]
    turned = {
        name: vocabulary[names[(place + 7) % 200 + 300 if place >= 300 else place]]
        for place, name in enumerate(names[:500])
    }
    tokenizer["model"]["vocab"] = {**vocabulary, **turned}
    write_json(tmp_path / "other" / "tokenizer.json", tokenizer)
    with pytest.raises(InputError, match=r"of the target's 512 tokens \d+ are the same in .*f32.gguf"):
        FileTarget(of_file(folder, "f32.gguf"), tmp_path / "other")


def test_a_gguf_files_ending_may_have_capitals(tmp_path: Path) -> None:
    file = tmp_path / "MODEL.GGUF"
    file.touch()
    assert file_target.locate(of_file(tmp_path, file.name)) == ("llama.cpp", file)


def test_a_bundle_runs_in_the_precision_asked_for(folder: Path) -> None:
    how = of_file(folder, "bundle")
    assert file_target.locate(how)[0] == read_json(folder / "bundle" / "manifest.json")["default"]["engine"]
    engine, path = file_target.locate(replace(how, precision="q8_0"))
    assert (engine, path.name) == ("llama.cpp", "target-q8_0.gguf")
    assert identity_of(folder, how) != identity_of(folder, replace(how, precision="q8_0"))
