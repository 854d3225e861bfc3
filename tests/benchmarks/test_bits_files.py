"""bits_files.py: of a model's files, those that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model_folder

from benchmarks.files.bits_files import Files, is_fitted, names_of


@pytest.mark.parametrize(("name", "made"), [("int8", {"our-onnxruntime-int8"}), ("nothing", set())])
def test_only_what_is_wanted_is_made(tmp_path: Path, name: str, made: set[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    found = Files(make_model_folder(tmp_path / "model"), out, [], only=[name]).all([5.5], [5.5], ["GPTQ"])
    assert {file.path.name for file in found} == made
    assert {file.name.removesuffix(".log") for file in out.iterdir()} == made


@pytest.mark.llamacpp
def test_llama_cpps_own_file_needs_its_floats(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    out = tmp_path / "out"
    out.mkdir()
    found = Files(make_model_folder(tmp_path / "model"), out, [], only=["q8_0"]).all([], [], [])
    theirs = {"our-llama.cpp-q8_0.gguf", "their-llama.cpp-q8_0.gguf"}
    assert {file.path.name for file in found} == theirs
    assert {file.name for file in out.iterdir()} == {*theirs, "our-llama.cpp-f16.gguf"}


def test_mixed_bits_and_gptq_are_fitted_to_texts() -> None:
    onnx, gguf = names_of([5.5], [6.2], ["GPTQ", "HQQ"])
    assert {name for name in (*onnx, *gguf) if is_fitted(name)} == {"mixed 5.5", "q_mixed 6.2", "GPTQ"}
