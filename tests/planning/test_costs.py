"""Bytes of files as they are written, and memory in which they are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.onnx.head_graph import write_head_graph
from edgespec_recipes.models.feature_head import FeatureHead
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import head_numbers
from edgespec.planning import costs
from edgespec.planning.devices_fit import fit
from edgespec.planning.export_costs import files_bytes
from edgespec.recipe.devices import FORMAT_OF, profile
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions, ExportOptions
from edgespec.recipe.targets import shape_of_target

TARGET = ModelShape(128, 2, 4, 2, 32, 256, 1000, True, 128)
SMOLLM2 = shape_of_target("smollm2-135m-instruct")
HEAD = derive(SMOLLM2, DrafterOptions(kind="head", layers=1, vocabulary=8192))
MIB = 2**20


def test_a_heads_file_is_as_large_as_is_counted(tmp_path: Path) -> None:
    counted = derive(TARGET, DrafterOptions(kind="head", layers=1, vocabulary=99))
    head = FeatureHead(counted, Vocabulary(TARGET.vocab_size, np.arange(99)))
    weights = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    embedding = np.ones((TARGET.vocab_size, 128), np.float32)
    write_head_graph(tmp_path / "head", head_numbers(counted, ()), weights, embedding, "int8")
    size = (tmp_path / "head" / "model.onnx.data").stat().st_size
    for engine in FORMAT_OF:
        assert costs.file_bytes(counted, engine, "int4", target=TARGET) == pytest.approx(size, rel=0.02)


def test_a_head_is_int8_beside_every_file_of_its_target() -> None:
    """SmolLM2's ready head: a file of 38.8 MiB, of which a token reads 9.58."""
    once = costs.file_bytes(HEAD, "onnxruntime", "int4", target=SMOLLM2)
    assert once / MIB == pytest.approx(38.8, rel=2e-3)
    assert costs.file_bytes(HEAD, "llama.cpp", "q4_0", streamed=True) / MIB == pytest.approx(9.58, rel=2e-3)
    many = ExportOptions(onnx=("fp32", "int8"), gguf=("q8_0",))
    alone = files_bytes(many, (SMOLLM2,))
    assert files_bytes(many, (SMOLLM2, HEAD)) == alone + once
    found = fit(profile("laptop-cpu-x86"), SMOLLM2, HEAD)
    [weights] = [part.bytes for part in found.parts if part.what == "drafter's weights"]
    assert weights == pytest.approx(1.1 * once)
    assert found.streamed["drafter"] / found.streamed["target"] == pytest.approx(0.119, abs=1e-3)


def test_a_targets_own_file_is_copied_instead_of_being_written() -> None:
    """Beside it the drafter has one of the precisions."""
    model, size = derive(SMOLLM2, DrafterOptions()), 93 * MIB
    many = ExportOptions(onnx=("fp32",), gguf=("f16", "q8_0"))
    for drafter, beside in ((model, costs.file_bytes(model, "llama.cpp", "q8_0")), (HEAD, 0)):
        graphs = files_bytes(replace(many, gguf=()), (SMOLLM2, drafter))
        assert files_bytes(many, (SMOLLM2, drafter), size) == graphs + size + beside
        assert files_bytes(replace(many, gguf=()), (SMOLLM2, drafter), size) == graphs


def test_the_builder_holds_a_whole_model_unless_it_goes_by_layers() -> None:
    large = shape_of_target("tinyllama-1.1b-chat")
    assert costs.BUILDER * SMOLLM2.parameters < costs.WHOLE < costs.BUILDER * large.parameters
    assert costs.building_bytes(SMOLLM2, ["int4"]) == costs.BUILDER * SMOLLM2.parameters
    for whole in ("fp32", "fp16", "int8"):
        assert costs.building_bytes(large, ["int4", whole]) == costs.BUILDER * large.parameters
    held = replace(large, layers=2).parameters
    for parts in (["int4"], ["mixed"]):
        assert costs.building_bytes(large, parts) == costs.BUILDER * held
        assert costs.building_bytes(large, parts, alike=False) == costs.BUILDER * large.parameters
    assert costs.building_bytes(large, []) == 3 * 4 * large.embedding_parameters  # a table at a time
