"""A build refuses at its plan what its export could not make: before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgespec_export.possible import check_possible
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.errors import InputError
from edgespec.files import read_json, write_json
from edgespec.recipe import ExportOptions
from edgespec.shapes import ModelShape

DRAFTER = ModelShape(64, 2, 4, 2, 32, 160, 512, tied=True, context_length=256)
ONNX, GGUF = ExportOptions(onnx=("fp32",), gguf=()), ExportOptions(onnx=(), gguf=("f16",))


def changed(folder: Path, **change: Any) -> Path:
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    return folder


def test_what_can_be_had_is_let_through(families: dict[str, Path]) -> None:
    for folder in families.values():
        every = ExportOptions(
            onnx=("fp32", "fp16", "int8", "int4"), gguf=("f32", "f16", "bf16", "q8_0", "q4_0")
        )
        assert check_possible(folder, DRAFTER, every) == []
    assert check_possible(families["llama"], DRAFTER, ExportOptions(onnx=(), gguf=("q6_k",))) == [
        f"{name} has rows of 64, 128, 160, no multiples of 256: in q6_k their matrices will have another type"
        for name in ("the target", "the drafter")
    ]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"model_type": "gemma3"}, GGUF, "GGUF export knows .*save the text model alone"),
        ({"model_type": "gemma3"}, ONNX, "ONNX export knows .*save the text model alone"),
        ({"hidden_act": "gelu"}, GGUF, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, GGUF, "RoPE scaling 'ntk'"),
        ({"vocab_size": 160}, ONNX, "matrices in its layers have as many rows"),
        ({"vocab_size": 100}, GGUF, "vocabulary ends at 99"),
        ({"head_dim": 24}, ONNX, "heads of 24"),
        ({"intermediate_size": 172}, ExportOptions(onnx=("int8",), gguf=()), "rows of 172, and ONNX int8"),
    ],
)
def test_what_cannot_is_refused(
    change: dict[str, Any], options: ExportOptions, message: str, tmp_path: Path
) -> None:
    folder = changed(make_model_folder(tmp_path / "model"), **change)
    with pytest.raises(InputError, match=message):
        check_possible(folder, DRAFTER, options)


def test_the_drafter_counts_too(families: dict[str, Path]) -> None:
    narrow = ModelShape(64, 2, 8, 2, 8, 160, 512, tied=True, context_length=256)
    with pytest.raises(InputError, match="the drafter has heads of 8"):
        check_possible(families["llama"], narrow, ONNX)


def test_a_build_stops_at_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(make_model_folder(tmp_path / "model"), hidden_act="gelu")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n' * 4)
    command = ["build-drafter", "--target", str(folder), "--out", str(tmp_path / "out")]
    command += ["--generate.instructions", str(prompts), "--evaluate.prompts-file", str(prompts)]
    command += ["--pretrain.text", str(prompts), "--export.onnx", "", "--export.gguf", "q8_0"]
    assert main(command) == 2
    assert "activation 'gelu'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "pretrain").exists()
