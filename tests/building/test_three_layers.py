"""A drafter that is a head and reads three layers of its target (EAGLE-3): from the recipe to a bundle that decodes."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.joined_states import export_for_head, join_states
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_recipes.models.feature_head import load_head
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.stored.written_states import WrittenRows
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, plain
from edgespec_runtime.engines.exactness import FAST
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from small_build import head_command, write_data
from tiny_models import make_model_folder

from edgespec.building.pipeline_export import Source
from edgespec.building.pipeline_head import HeadBuild
from edgespec.cli import main
from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import copy_file, read_json, write_json
from edgespec.core.manifest import open_manifest
from edgespec.core.metrics import RawCounts
from edgespec.model_folder.check import shape_in
from edgespec.model_folder.head import HEAD_FILE, early_layers, keep_in_bytes, shape_of_drafter
from edgespec.recipe.drafter import cost_ratios, derive
from edgespec.recipe.read import RECIPE_FILE, resolve
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.targets import FoundTarget

pytestmark = [pytest.mark.llamacpp, pytest.mark.training]

LAYERS = 2  # of the target
PROMPT, NEW = [5, 9, 13, 5, 9], 128


def words(data: Path, *more: str) -> list[str]:
    given = head_command(data).replace("--export.gguf q8_0", "")
    return [*given.split(), "--export.gguf", "", "--drafter.features", "three", *more]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    export_gguf(make_model_folder(folder / "source"), folder / "tiny.gguf", "q8_0")
    write_data(folder)
    assert main([*words(folder), "--out", str(folder / "out")]) == 0
    return folder / "out"


def target_of(built: Path) -> Path:
    return Path(read_json(built / "target" / "stage.json")["counts"]["folder"])


def test_the_head_learns_from_what_the_target_read_again(built: Path) -> None:
    assert not list(
        (built / "generate").glob("*.npy")
    )  # llama.cpp wrote the text, and gives one layer's states only
    rows, head = WrittenRows(built / "states", 128), load_head(built / "distill" / "model")
    assert rows.layers == head.early == early_layers(LAYERS)
    assert rows.width == 3 * head.shape.hidden
    start = torch.zeros_like(head.reduce.weight)
    start[:, -head.shape.hidden :].fill_diagonal_(1.0)
    assert (head.reduce.weight != start).any()


@pytest.mark.parametrize(("precision", "mode", "bound"), [("fp32", "", 2e-4), ("int8", FAST, 0.15)])
def test_the_targets_graph_gives_joined_features(
    built: Path, precision: str, mode: str, bound: float
) -> None:
    pair = open_pair(
        built / "bundle", LoadOptions(engine="onnxruntime", precision=precision, threads=1, mode=mode)
    )
    pair.target.prefill(PROMPT)
    assert pair.target.features is not None
    seen = pair.target.features[: len(PROMPT)].copy()
    pair.close()
    model, head = load_model(target_of(built)), load_head(built / "distill" / "model")
    with torch.inference_mode():
        given = model.model(torch.tensor([PROMPT]), output_hidden_states=True)
        states = [
            model.model.layers[layer].input_layernorm(given.hidden_states[layer][0])
            for layer in early_layers(LAYERS)
        ]
        wanted = head.reduce(torch.cat([*states, given.last_hidden_state[0]], -1)).numpy()
    assert np.abs(seen - wanted).max() < bound * np.abs(wanted).max()


@pytest.mark.parametrize(("precision", "mode"), [("fp32", ""), ("int8", FAST)])
def test_greedy_replies_are_the_targets(built: Path, precision: str, mode: str) -> None:
    pair = open_pair(
        built / "bundle", LoadOptions(engine="onnxruntime", precision=precision, threads=1, mode=mode)
    )
    generator, counts = np.random.default_rng(0), RawCounts()
    for _ in range(30):
        prompt = generator.integers(4, 512, generator.integers(3, 20)).tolist()
        how = DecodingOptions(max_new_tokens=NEW, draft_length=2, drafter=MODEL)
        alone, together = (
            [t for block in decode(pair.target, pair.draft, prompt, each, (), counts) for t in block.tokens]
            for each in (plain(how), how)
        )
        assert together == alone
    assert 0.02 < counts.acceptance_rate < 0.98
    pair.close()


def test_the_bundle_is_whole(built: Path) -> None:
    assert open_manifest(built / "bundle").pairs() == [("onnxruntime", "fp32"), ("onnxruntime", "int8")]
    checks = read_json(built / "bundle" / "verify.json")["files"]
    assert [check["broken"] for check in checks] == [[], [], []]
    assert not list((built / "export" / "target").glob(".*"))  # the graphs before the states were joined


def test_no_logit_changes(built: Path, tmp_path: Path) -> None:
    target, head = target_of(built), built / "distill" / "model"
    export_onnx(target, tmp_path / "alone", "fp32", hidden_states=True)
    export_for_head(head, tmp_path / "joined", partial(export_onnx, target, precision="fp32"))
    logits, features = [], []
    for name in ("alone", "joined"):
        engine = OnnxRuntimeEngine(tmp_path / name, threads=1)
        logits.append(engine.forward(PROMPT).copy())
        assert engine.features is not None
        features.append(engine.features.copy())
        engine.close()
    np.testing.assert_array_equal(*logits)
    assert np.abs(features[0] - features[1]).max() > 1e-3  # the training moved the matrix


def test_a_head_in_bytes_is_the_same_head(built: Path, tmp_path: Path) -> None:
    keep_in_bytes(built / "distill" / "model", tmp_path / "kept")
    kept, whole = load_head(tmp_path / "kept"), load_head(built / "distill" / "model")
    assert kept.shape == whole.shape
    torch.testing.assert_close(kept.reduce.weight, whole.reduce.weight, atol=2e-2, rtol=0)


def test_a_gguf_file_is_refused_before_anything_is_trained(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words(built.parent), "--out", str(tmp_path / "out"), "--export.gguf", "q8_0"]
    assert main(given) == 2
    assert (
        "give ONNX precisions only (--export.gguf '', or edgespec export --formats onnx)"
        in capsys.readouterr().err
    )
    given = f"export --target {built.parent / 'tiny.gguf'} --drafter {built / 'distill' / 'model'} --precisions int8,q8_0"
    assert main([*given.split(), "--out", str(tmp_path / "export")]) == 2
    assert "give ONNX precisions only" in capsys.readouterr().err
    assert main([*words(built.parent), "--drafter.kind", "model", "--out", str(tmp_path / "out")]) == 2
    assert "which only a head reads; give --drafter.kind head with it" in capsys.readouterr().err


def test_a_target_of_one_layer_is_refused_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_gguf(make_model_folder(tmp_path / "source", layers=1), tmp_path / "tiny.gguf", "q8_0")
    write_data(tmp_path)
    assert main([*words(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = "drafter.features is 'three' and the target has 1 layer; two or more are needed"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "generate").exists()


def test_the_evaluation_counts_the_head_that_was_made(built: Path) -> None:
    """Without drafter.vocabulary a plan has all tokens, which the made head has not."""
    target, file = target_of(built), built / "evaluate" / "evaluation.json"
    made, shape = shape_of_drafter(built / "distill" / "model"), shape_in(target / "config.json")
    shutil.rmtree(file.parent)
    build = HeadBuild(resolve(load_recipe(built / RECIPE_FILE), {}), built)
    build.source = Source(FoundTarget("t", target, "s"), built / "distill" / "model", build.recipe)
    build._train_and_export(target, derive(shape, DrafterOptions(kind="head")))
    assert read_json(file)["cost_ratio"] == cost_ratios(shape, made)["parameters"]


@pytest.mark.parametrize("vocabulary", [None, 100])
def test_a_trained_head_is_planned_as_it_is(built: Path, tmp_path: Path, vocabulary: int | None) -> None:
    recipe, head = resolve(load_recipe(built / RECIPE_FILE), {}), built / "distill" / "model"
    start = replace(recipe.drafter, init="checkpoint", checkpoint=str(head), vocabulary=vocabulary)
    planned = HeadBuild(replace(recipe, drafter=start), tmp_path)._plan(target_of(built))
    made = shape_of_drafter(head)
    assert asdict(planned) == asdict(replace(made, vocab_size=vocabulary or made.vocab_size))


def test_a_damaged_head_is_refused(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    for file in (built / "distill" / "model").iterdir():
        copy_file(file, folder / file.name)
    found = read_json(folder / HEAD_FILE)

    def with_layers(layers: object) -> None:
        write_json(folder / HEAD_FILE, {**found, "shape": {**found["shape"], "target_layers": layers}})

    with_layers(["a"])
    with pytest.raises(InputError, match="a list of layer numbers is wanted"):
        load_head(folder)
    with_layers([0, 1, 1])
    with pytest.raises(InputError, match=r"has no reduce\.weight for its 4 layers"):
        export_for_head(folder, tmp_path / "out", lambda out: {})
    export_onnx(target_of(built), tmp_path / "plain", "fp32")
    with pytest.raises(EdgespecError, match=r"gives no states of the layers \[0, 1\]"):
        join_states(tmp_path / "plain" / "model.onnx", (0, 1), np.zeros((64, 192), np.float32))


def test_a_checkpoint_of_other_layers_is_refused(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*head_command(built.parent).split(), "--out", str(tmp_path / "out")]
    head = str(built / "distill" / "model")
    assert main([*given, "--drafter.init", "checkpoint", "--drafter.checkpoint", head]) == 2
    assert (
        "reads 'three' and drafter.features is 'last'; give --drafter.features three"
        in capsys.readouterr().err
    )
