"""A target that does not fit into memory twice is verified one layer at a time, and what is found is the same."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.answers.replies import questions_of
from edgespec_export.answers.verdict import CLOSE_ANSWERS, SAME_ANSWERS
from edgespec_export.formats.export import ExportedFile, export_pair
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.repeat import layer_of
from edgespec_export.verify import files as verify_files
from edgespec_export.verify import pair as verify
from edgespec_export.verify.pair import Reference, target_standard, verify_pair
from edgespec_export.verify.readback import gguf_weights
from edgespec_export.verify.report import verification_table
from edgespec_export.verify.streamed_check import Streamed
from safetensors.torch import load_file, save_file
from tiny_models import make_model_folder

from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.planning.export_costs import opened_bytes, verifying_bytes, whole_bytes
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import shape_of_target

PROMPTS = [np.random.default_rng(seed).integers(4, 512, 40).tolist() for seed in range(3)]
CHATS = [[{"role": "user", "content": text}] for text in ("Hello", "What is a list?", "Count: 1 2 3")]
FILES = ExportOptions(onnx=("fp32", "int4"), gguf=("q8_0",))
GIB = 2**30


@pytest.fixture(scope="module", params=["llama", "qwen2 tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter, and their files."""
    root = tmp_path_factory.mktemp("streamed")
    if request.param == "llama":
        make_model_folder(root / "target", layers=11, tied=False)
    else:
        make_model_folder(root / "target", "qwen2", layers=3, tied=True, head_dim=16)
    make_model_folder(root / "drafter", seed=1)
    export_pair(root / "export", root / "target", root / "drafter", FILES)
    return root


def verified(folder: Path, out: Path) -> dict[str, Any]:
    questions = questions_of(folder / "target", CHATS)
    models = folder / "target", folder / "drafter"
    verify_pair(out, folder / "export", *models, PROMPTS, FILES, questions=questions)
    found: dict[str, Any] = read_json(out / "verify.json")
    return found


@pytest.mark.llamacpp
def test_a_good_pair(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "layers").mkdir()
    whole = verified(folder, tmp_path / "whole")
    monkeypatch.setattr(verify, "free_memory", lambda: 0)
    layers = verified(folder, tmp_path / "layers")
    assert whole["notes"] == []
    assert layers["notes"] == [Streamed.note]
    assert Streamed.note in verification_table(tmp_path / "layers" / "verify.json")
    assert len(layers["replies"]) == len(CHATS)
    of_whole = {(one["role"], one["precision"]): one for one in whole["files"]}
    assert len(layers["files"]) == len(of_whole) == 6
    for seen in layers["files"]:
        wanted = of_whole[seen["role"], seen["precision"]]
        assert seen["broken"] == wanted["broken"] == []
        for name in ("weights_relative", "kl", "perplexity", "torch_perplexity", "top1"):
            assert seen[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-7), name
        for name in ("engine_relative", "largest"):
            assert seen[name] == pytest.approx(wanted[name], rel=0.2, abs=1e-4), name
        if seen["role"] == "target":
            words = {one["answers"]["verdict"] for one in (seen, wanted)}
            # of a random model q8_0 keeps about SAME of the argmaxes: which word that is differs by processor
            assert words <= {SAME_ANSWERS, CLOSE_ANSWERS} if seen["precision"] == "q8_0" else len(words) == 1


def swap_gate_and_up(tensors: dict[str, Any]) -> None:
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def double_a_norm(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] *= 2


@pytest.mark.parametrize("damage", [swap_gate_and_up, double_a_norm])
def test_both_ways_find_the_same_damage(folder: Path, tmp_path: Path, damage: Any) -> None:
    """In the file: it is made from a damaged model."""
    shutil.copytree(folder / "target", tmp_path / "damaged")
    tensors = load_file(tmp_path / "damaged" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    export_gguf(tmp_path / "damaged", tmp_path / "f32.gguf", "f32")
    file = ExportedFile("target", "llama.cpp", "f32", tmp_path / "f32.gguf")
    whole, layers = (kind(folder / "target", PROMPTS).check(file) for kind in (Reference, Streamed))
    assert layers.worst_weight == whole.worst_weight != ""
    assert layers.weights_relative == pytest.approx(whole.weights_relative, rel=1e-3)
    assert layers.broken == pytest.approx(whole.broken)
    assert layers.broken[0].startswith("weights difference")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", "1 tensors are absent (model.layers.1.mlp.up_proj.weight ...)"),
        ("model.norm.weight", "1 tensors are absent (model.norm.weight ...)"),
    ],
)
def test_both_ways_find_what_is_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """And what has another shape."""

    def some(path: Path, shape: ModelShape) -> Iterator[tuple[str, Any]]:
        for one, value in usual(path, shape):
            if one == name:
                yield name, value[:-1]
            else:
                yield one, value

    usual = verify_files.weights_of
    monkeypatch.setattr(verify_files, "weights_of", some)
    file = ExportedFile("target", "onnxruntime", "fp32", folder / "export" / "target" / "onnx-fp32")
    for kind in (Reference, Streamed):
        broken = kind(folder / "target", PROMPTS).check(file).broken
        assert broken[0].startswith(f"tensor {name} has shape")
        assert broken[1] == words


def test_what_a_head_reads(folder: Path) -> None:
    whole, layers = (kind(folder / "target", PROMPTS) for kind in (Reference, Streamed))
    np.testing.assert_array_equal(layers.embedding(), whole.embedding())
    for early in ((), (1, 2)):
        for ours, theirs in zip(layers.states(early), whole.states(early), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_no_layer_waits_for_another(folder: Path) -> None:
    """By name, the layers 10, 11, ... come before the second."""
    export_gguf(folder / "target", folder / "order.gguf", "f32")
    shape = ModelShape.from_config(read_json(folder / "target" / "config.json"))
    for weights in (
        gguf_weights(folder / "order.gguf", shape),
        Streamed(folder / "target", PROMPTS)._weights(),
    ):
        numbers = [number for name, _ in weights if (number := layer_of(name)) is not None]
        assert numbers == sorted(numbers)


def test_who_is_verified_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that memory does not hold twice, if a layer needs only the layer before."""
    shape = ModelShape.from_config(read_json(folder / "target" / "config.json"))
    needed = whole_bytes(shape, len(PROMPTS), 0)
    for free, kind in ((None, Reference), (needed, Reference), (needed - 1, Streamed)):
        monkeypatch.setattr(verify, "free_memory", lambda free=free: free)
        assert type(target_standard(folder / "target", PROMPTS, None, ())) is kind
    gemma = make_model_folder(tmp_path / "gemma", "gemma2")
    assert type(target_standard(gemma, PROMPTS, None, ())) is Reference


def test_a_7b_target_is_verified_on_a_laptop() -> None:
    """Of 16 GiB; a model whose layers differ is not."""
    shape, files = shape_of_target("llama-2-7b-chat"), [("onnxruntime", "int4"), ("llama.cpp", "q8_0")]
    assert verifying_bytes(shape, files, 8, 16, alike=True) < 13 * GIB
    assert verifying_bytes(shape, files, 8, 16, alike=False) > 50 * GIB
    small = shape_of_target("smollm2-135m-instruct")
    assert verifying_bytes(small, files, 8, 16, alike=True) <= whole_bytes(small, 8, 0)
    assert opened_bytes(shape, [("llama.cpp", "iq4_xs")]) == opened_bytes(shape, [("llama.cpp", "q8_0")])
    assert opened_bytes(shape, [("onnxruntime", "fp16")]) > 4 * shape.parameters  # widened


def test_one_model_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_files, "check_tokenizers", lambda *_: [])
    gone, shape = list[bool](), ModelShape(8, 1, 1, 1, 8, 8, 8, tied=True, context_length=8)

    def standards() -> Iterator[tuple[str, verify_files.Standard]]:
        for role in ("target", "drafter"):
            model = verify_files.Standard(shape, 0, None, [])
            seen = weakref.ref(model)
            yield role, model
            del model
            gone.append(seen() is None)

    verify_files.verify_files([], standards(), None, None, tmp_path)
    assert gone == [True, True]
