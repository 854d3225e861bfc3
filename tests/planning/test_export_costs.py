"""What lies beside an export's files while they are made, and the memory to make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.gguf import quantize, to_gguf
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.folder import DATA
from tiny_models import make_model_folder

from edgespec.core.files import read_json, write_json
from edgespec.planning import costs
from edgespec.planning.estimate import estimate
from edgespec.planning.export_costs import (
    MADE_FROM,
    building_bytes,
    files_bytes,
    largest_passing,
    passing_bytes,
    stages_bytes,
)
from edgespec.planning.preflight import RUNNING
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import DrafterOptions, ExportOptions
from edgespec.recipe.targets import TARGETS, has_alike_layers, shape_of_target

GIB = 2**30
LLAMA_7B = shape_of_target("llama-2-7b-chat")
NONE = ExportOptions(onnx=(), gguf=(), npu=())


def test_llama_cpps_own_types_are_made_from_an_f16_file() -> None:
    wanted = {name for name, one in quantize.PRECISIONS.items() if one.by_llama_cpp}
    assert {name for engine, name in MADE_FROM if engine == "llama.cpp"} == wanted
    assert passing_bytes(LLAMA_7B, "llama.cpp", "q4_k_m") / GIB == pytest.approx(12.6, abs=0.05)
    assert passing_bytes(LLAMA_7B, "llama.cpp", "q4_0") == 0


@pytest.mark.parametrize(("engine", "precision"), [("llama.cpp", "q4_k_m"), ("onnxruntime", "fp16")])
def test_what_an_exporter_leaves_behind_is_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, precision: str
) -> None:
    model, seen = make_model_folder(tmp_path / "model"), list[int]()
    shape = shape_of_target(str(model))
    if engine == "llama.cpp":

        def look(source: Path, out: Path, _: Any) -> list[str]:
            seen.append(source.stat().st_size)
            out.touch()
            return []

        monkeypatch.setattr(to_gguf, "quantize_file", look)
        to_gguf.export_gguf(model, tmp_path / "out.gguf", precision)
        counted = passing_bytes(shape, engine, precision)
    else:
        store = to_onnx.store_halves

        def look_first(folder: Path) -> None:
            seen.append((folder / DATA).stat().st_size)
            store(folder)

        monkeypatch.setattr(to_onnx, "store_halves", look_first)
        to_onnx.export_onnx(model, tmp_path / "out", precision)
        counted = passing_bytes(shape, engine, precision) + costs.file_bytes(shape, engine, precision)
    assert seen == [pytest.approx(counted, rel=0.1)]


def test_the_file_with_most_beside_it_counts_once() -> None:
    many = replace(NONE, onnx=("int4", "mixed", "fp16"), gguf=("q4_k_m", "q6_k"))
    assert largest_passing(NONE, LLAMA_7B) == 0
    floats = costs.file_bytes(LLAMA_7B, "onnxruntime", "fp32")
    halved = floats - costs.file_bytes(LLAMA_7B, "onnxruntime", "fp16")
    assert passing_bytes(LLAMA_7B, "onnxruntime", "mixed") == costs.file_bytes(
        LLAMA_7B, "onnxruntime", "int4"
    )
    assert largest_passing(many, LLAMA_7B) == max(halved, passing_bytes(LLAMA_7B, "llama.cpp", "q6_k"))
    assert largest_passing(replace(NONE, gguf=("q4_k_m",)), LLAMA_7B, own=GIB) == 0  # copied as it is


def test_stages_have_their_temporary_files() -> None:
    recipe = resolve(
        {"target": "x", "export": {"onnx": [], "gguf": ["q4_k_m"]}, "distill": {"against": "q4_k_m"}}, {}
    )
    drafter = derive(LLAMA_7B, DrafterOptions())
    stages = {one.stage: one for one in estimate(recipe, LLAMA_7B, drafter)}
    f16 = passing_bytes(LLAMA_7B, "llama.cpp", "q4_k_m")
    assert stages["export"].passing == f16
    assert stages["export"].disk == files_bytes(recipe.export, (LLAMA_7B, drafter))
    own = costs.file_bytes(LLAMA_7B, "llama.cpp", "q4_k_m")
    assert stages["rounded-target"].passing == f16 + own
    assert stages["rounded-target"].disk == costs.weight_bytes(LLAMA_7B)


def test_memory_goes_by_the_family() -> None:
    int4, mixed = replace(NONE, onnx=("int4",)), replace(NONE, gguf=("q_mixed",))
    # GiB that the export process allocated
    measured = {"llama-2-7b-chat": 4.2, "tinyllama-1.1b-chat": 1.64, "qwen2.5-1.5b-instruct": 2.82}
    for name, most in measured.items():
        shape = shape_of_target(name)
        needed = building_bytes(int4, shape, alike=True) + RUNNING
        assert most * GIB < needed < costs.BUILDER * shape.parameters
    assert building_bytes(int4, LLAMA_7B, alike=False) == costs.BUILDER * LLAMA_7B.parameters
    assert building_bytes(mixed, LLAMA_7B, alike=True) == costs.weight_bytes(LLAMA_7B)
    large = shape_of_target("smollm3-3b")
    recipe = resolve({"target": "smollm3-3b", "device": "laptop-cpu-x86"}, {})
    alike = has_alike_layers(recipe.target)
    found = estimate(recipe, large, derive(large, DrafterOptions()), alike=alike)
    assert next(one.memory for one in found if one.stage == "export") / GIB == pytest.approx(25.8, abs=0.1)


def test_a_targets_own_file_is_verified_as_it_is() -> None:
    """And not as a larger file of its weights, which is not written; a file beside it may take more."""
    asked, own = replace(NONE, gguf=("f16", "q8_0")), costs.file_bytes(LLAMA_7B, "llama.cpp", "q4_0")
    found = stages_bytes(asked, LLAMA_7B, own, alike=True)
    assert found == stages_bytes(replace(NONE, gguf=("q4_0",)), LLAMA_7B, alike=True)
    assert found["verify"] < stages_bytes(asked, LLAMA_7B, alike=True)["verify"] - 9 * GIB
    floats = replace(NONE, onnx=("fp32",))
    both = stages_bytes(replace(floats, gguf=("f16",)), LLAMA_7B, own, alike=True)
    assert both == stages_bytes(floats, LLAMA_7B, alike=True)


def test_which_layers_are_alike(tmp_path: Path) -> None:
    assert [name for name in TARGETS if not has_alike_layers(name)] == ["smollm3-3b"]
    model = make_model_folder(tmp_path / "model", "qwen2")
    config = read_json(model / "config.json")
    for change, alike in (
        ({}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"model_type": "phi3", "layer_types": None}, False),
        ({"model_type": "another", "layer_types": None}, False),
    ):
        write_json(model / "config.json", config | change)
        assert has_alike_layers(str(model)) == alike
    to_gguf.export_gguf(make_model_folder(tmp_path / "llama"), tmp_path / "m.gguf", "f16")
    assert has_alike_layers(str(tmp_path / "m.gguf"))
    assert not has_alike_layers("some/where")
