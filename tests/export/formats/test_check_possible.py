"""A build refuses at its plan what its export could not make: before anything is trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.formats.export import check_possible
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.npu.to_npu import export_npu
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.engines.static import StaticEngine
from family_cases import GEMMA, GEMMA3, SOFT
from tiny_models import make_model_folder, torch_logits

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import OwnFile

NPU = ExportOptions(onnx=(), gguf=(), npu=("fp32",))
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
        ({"model_type": "gemma3"}, GGUF, "'gemma3' model; GGUF export knows "),
        ({"model_type": "gemma3"}, ONNX, "'gemma3' model; ONNX export knows "),
        (
            {"hidden_act": "gelu"},
            GGUF,
            "activation 'gelu'.*--export.gguf '' of a build, --formats onnx of export$",
        ),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, GGUF, "RoPE scaling 'ntk'"),
        ({"vocab_size": 160}, ONNX, "matrices in its layers have as many rows"),
        ({"vocab_size": 100}, GGUF, "vocabulary ends at 99"),
        ({"head_dim": 24}, ONNX, "heads of 24"),
        (
            {"intermediate_size": 172},
            ExportOptions(onnx=("int8",), gguf=()),
            "rows of 172, and ONNX int8.*--precisions .of export.",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ONNX, "RoPE of type 'longrope'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, ONNX, "RoPE of type 'su'"),
        (
            {"hidden_act": "quick_gelu"},
            ONNX,
            "activation 'quick_gelu'.*--export.onnx '' of a build, --formats gguf of export$",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, ONNX, "layers of the type chunked_attention"),
        ({"final_logit_softcapping": 5.0}, ONNX, "final_logit_softcapping 5.0"),
        ({"use_bidirectional_attention": True}, ONNX, "attention in both directions"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, NPU, "RoPE of type 'dynamic'"),
        ({"hidden_act": "gelu"}, NPU, "activation 'gelu'"),
        ({"model_type": "gemma2"}, NPU, "the static graph knows llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_cannot_is_refused(
    change: dict[str, Any], options: ExportOptions, message: str, tmp_path: Path
) -> None:
    folder = changed(make_model_folder(tmp_path / "model"), **change)
    with pytest.raises(InputError, match=message):
        check_possible(folder, DRAFTER, options)


def test_a_budget_that_is_none_is_refused_before_anything_is_trained(families: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="90megs"):
        check_possible(families["llama"], DRAFTER, ExportOptions(size="90megs"))


def test_the_drafter_counts_too(families: dict[str, Path]) -> None:
    narrow = ModelShape(64, 2, 8, 2, 8, 160, 512, tied=True, context_length=256)
    with pytest.raises(InputError, match="the drafter has heads of 8"):
        check_possible(families["llama"], narrow, ONNX)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 24}, "heads of 24.* a multiple of 16; give drafter.kind model"),
        ({"intermediate_size": 172}, "rows of 172.* a multiple of 32; give drafter.kind model"),
    ],
)
def test_a_head_has_the_targets_widths_whatever_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(make_model_folder(tmp_path / "model"), **change)
    assert check_possible(folder, DRAFTER, GGUF) == []
    with pytest.raises(InputError, match=message):
        check_possible(folder, None, GGUF)


def test_what_the_file_of_a_gguf_target_changes(families: dict[str, Path], tmp_path: Path) -> None:
    """It is the pair's GGUF file, whatever its rows; a head has no GGUF file at all."""
    folder, file = tmp_path / "model", tmp_path / "own.gguf"
    shutil.copytree(families["llama"], folder)
    file.write_bytes(b"GGUF")
    OwnFile(file, "0" * 64, 4, "q4_1").keep(folder)
    asked = ExportOptions(onnx=(), gguf=("q4_1", "q6_k"))
    stays = "the target's own file own.gguf stays its GGUF file, in q4_1; it is not written in q6_k"
    assert check_possible(folder, None, asked) == [stays]
    assert check_possible(folder, DRAFTER, asked) == [stays]  # the drafter is written in q4_1 alone
    rows = "the drafter has rows of 64, 128, 160, no multiples of 256: in q6_k their matrices will have another type"
    assert check_possible(folder, DRAFTER, ExportOptions(onnx=(), gguf=("q6_k",))) == [stays, rows]
    assert check_possible(folder, None, ExportOptions(gguf=("q4_1",))) == []


def test_a_drafter_that_is_there_counts_as_a_target_does(families: dict[str, Path], tmp_path: Path) -> None:
    for folder in families.values():
        assert check_possible(families["llama"], folder, ExportOptions()) == []
    odd = changed(make_model_folder(tmp_path / "model"), hidden_act="tanh")
    for options in (ONNX, GGUF, NPU):
        with pytest.raises(InputError, match="activation 'tanh'"):
            check_possible(families["llama"], odd, options)


# Settings that a family's config may have and that one exporter or another reads otherwise than torch, or not at all.
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "smollm3 with biases": ("smollm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "gemma2 with biases": ("gemma2", {**GEMMA, **SOFT, "attention_bias": True}),
    "mistral, which has none": ("mistral", {"attention_bias": True}),
    "llama, a part of a head": ("llama", {"rope_parameters": PARTIAL}),
    "llama with a window": ("llama", {"sliding_window": 24}),
    "qwen2 with a window in its last layer": (
        "qwen2",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "llama, relu": ("llama", {"hidden_act": "relu"}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, relu2": ("llama", {"hidden_act": "relu2"}),
    "llama, tanh": ("llama", {"hidden_act": "tanh"}),
    "llama with caps": ("llama", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}),
    "gemma3 with caps": ("gemma3_text", {**GEMMA3["gemma3"][1], "attn_logit_softcapping": 5.0}),
    "gemma3 in both directions": (
        "gemma3_text",
        {**GEMMA3["gemma3"][1], "use_bidirectional_attention": True},
    ),
    "llama, proportional": ("llama", {"rope_parameters": {**PARTIAL, "rope_type": "proportional"}}),
}
CAN: dict[str, tuple[str, ...]] = {  # what is let through, by format; all else is refused
    "onnx": tuple(
        name for name in VARIANTS if "caps" not in name and "tanh" not in name and "both" not in name
    ),
    "gguf": (
        *("llama with biases", "mistral, which has none", "llama with a window"),
        "qwen2 with a window in its last layer",
    ),
    "npu": (
        *("llama with biases", "qwen3 with biases", "mistral, which has none", "llama, a part of a head"),
        *("llama with a window", "llama with caps"),
    ),
}


def exported(form: str, model: Path, folder: Path) -> Engine:
    if form == "onnx":
        export_onnx(model, folder / "onnx", "fp32")
        return OnnxRuntimeEngine(folder / "onnx", threads=1)
    if form == "npu":
        export_npu(model, folder / "npu")
        return StaticEngine(folder / "npu", threads=1)
    export_gguf(model, folder / "model.gguf", "f32")
    return LlamaCppEngine(folder / "model.gguf", threads=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.llamacpp
def test_preflight_and_export_agree(variant: str, tmp_path: Path) -> None:
    """What is let through is what torch computes; what is not stops the export too."""
    family, settings = VARIANTS[variant]
    model = make_model_folder(tmp_path / "model", family, **settings)
    tokens = np.random.default_rng(0).integers(4, 512, 40).tolist()
    wanted = torch_logits(model, tokens).numpy()
    for form, options in (("onnx", ONNX), ("gguf", GGUF), ("npu", NPU)):
        if variant not in CAN[form]:
            with pytest.raises(InputError):
                check_possible(model, model, options)
            with pytest.raises(InputError):
                exported(form, model, tmp_path)
            continue
        assert check_possible(model, model, options) == []
        engine = exported(form, model, tmp_path)
        length = min(24, engine.block_length, engine.context_length)
        seen = np.array(engine.forward(tokens[:length]))
        if engine.context_length > 24:  # llama.cpp's context ends where its window would
            seen = np.concatenate([seen, np.array(engine.forward(tokens[length:]))])
        engine.close()
        assert np.abs(seen - wanted[: len(seen)]).max() < (2e-2 if form == "gguf" else 1e-4), form


def test_a_build_stops_at_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(make_model_folder(tmp_path / "model"), hidden_act="gelu")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n' * 4)
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 50)
    command = ["build-drafter", "--target", str(folder), "--out", str(tmp_path / "out")]
    command += ["--generate.instructions", str(prompts), "--evaluate.prompts-file", str(prompts)]
    command += ["--pretrain.text", str(text), "--export.onnx", "", "--export.gguf", "q8_0"]
    assert main(command) == 2
    assert "activation 'gelu'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "pretrain").exists()
