"""Targets that no stage could train or export: said in one line before the first training step, by builds and exports alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgespec_recipes.models.loading import check_model_folder
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.model_folder.check import check_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 605544\n"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("whole") / "model", tied=False)


@pytest.fixture
def spoilt(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def with_config(folder: Path, **change: Any) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | change)


QUANTISED = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, r"\(gptq, 4 bits\)"),
    ({"quantization_config": {"quant_method": "awq", "w_bit": 4}}, r"\(awq, 4 bits\)"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, r"\(bitsandbytes\)"),
    ({"quantization_config": {"load_in_8bit": True}}, r"\(bitsandbytes\)"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, r"\(fp8\)"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4\)"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"\(compressed-tensors\)"),
    ({"quantization_config": {"format": "new"}}, r"\(method unknown\)"),
    ({"compression_config": {"quant_method": "sparseml"}}, r"\(sparseml\)"),
]


@pytest.mark.parametrize(("change", "message"), QUANTISED)
def test_quantised_weights_are_named_by_their_method(
    spoilt: Path, change: dict[str, Any], message: str
) -> None:
    with_config(spoilt, **change)
    with pytest.raises(
        InputError, match=f"quantised weights {message}.*--inference.bits 4.*--inference.file"
    ):
        check_model(spoilt)


@pytest.mark.parametrize(
    "name", ["mlp.down_proj.qweight", "mlp.down_proj.weight", "mlp.down_proj.weight_packed"]
)
def test_quantised_weights_are_seen_without_a_word_in_the_config(spoilt: Path, name: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(spoilt / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    packed = {f"model.layers.0.{name}": torch.zeros(20, 64, dtype=torch.int32)}
    save_file(weights | packed, spoilt / "model.safetensors")
    with pytest.raises(InputError, match=rf"quantised weights \(model.layers.0.{name} is I32\)"):
        check_model(spoilt)


def test_an_empty_setting_is_no_quantisation(spoilt: Path) -> None:
    with_config(spoilt, quantization_config=None, compression_config={})
    check_model(spoilt)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_git_lfs_pointers_are_told_from_files(spoilt: Path, name: str) -> None:
    (spoilt / name).write_text(POINTER)
    with pytest.raises(InputError, match=rf"{name} is a git-lfs pointer of 68 bytes.*git lfs pull"):
        check_model(spoilt)


def test_weights_that_transformers_does_not_find(spoilt: Path) -> None:
    (spoilt / "model.safetensors").rename(spoilt / "consolidated.safetensors")
    with pytest.raises(InputError, match=r"has consolidated.safetensors and neither model.safetensors nor"):
        check_model(spoilt)
    (spoilt / "consolidated.safetensors").rename(spoilt / "model-00001-of-00001.safetensors")
    with pytest.raises(InputError, match=r"has 1 shards and no model.safetensors.index.json"):
        check_model(spoilt)


def test_other_files_beside_the_model_are_not_read(spoilt: Path) -> None:
    (spoilt / "adapter_model.safetensors").write_text(POINTER)
    check_model(spoilt)


def test_a_tokenizer_beyond_the_vocabulary(spoilt: Path) -> None:
    """An added token that no chat has needs no row, such as that of Gemma 3 for pictures."""
    tokenizer = json.loads((spoilt / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<|more|>"})
    write_json(spoilt / "tokenizer.json", tokenizer)
    check_model_folder(spoilt)
    template = spoilt / "chat_template.jinja"
    whole = template.read_text()
    template.write_text(whole.replace("<|im_end|>", "<|more|>"))
    with pytest.raises(InputError, match=r"has token ids up to 512 and config\.json a vocabulary of 512"):
        check_model_folder(spoilt)
    template.write_text(whole)
    tokenizer["model"]["vocab"]["more"] = tokenizer["added_tokens"].pop()["id"]  # no added one
    write_json(spoilt / "tokenizer.json", tokenizer)
    with pytest.raises(InputError, match=r"has token ids up to 512 and config\.json a vocabulary of 512"):
        check_model_folder(spoilt)


def in_both_spellings(rope: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 reads RoPE, and as 4 does."""
    return {"rope_parameters": rope, "rope_scaling": rope}


@pytest.mark.parametrize(
    "change",
    [
        in_both_spellings({"rope_type": "longrope", "rope_theta": 1e4}),
        in_both_spellings({"rope_type": "unheard", "rope_theta": 1e4}),
        {"hidden_act": "unheard"},
    ],
)
def test_a_model_that_transformers_cannot_make(spoilt: Path, change: dict[str, Any]) -> None:
    with_config(spoilt, **change)
    with pytest.raises(InputError, match="transformers cannot make the model in"):
        check_model_folder(spoilt)


# The whole way: what each fault looks like to the user.


def quantised(folder: Path) -> None:
    with_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def config_of_another_form(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)


def shard_missing(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    save_file(weights, folder / names[0])
    index = {"weight_map": {name: names[at % 2] for at, name in enumerate(weights)}}
    write_json(folder / "model.safetensors.index.json", index)


def longrope(folder: Path) -> None:
    with_config(folder, rope_parameters=LONGROPE)


def no_default_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = read_json(folder / "tokenizer_config.json")
    settings["chat_template"] = [{"name": "tool_use", "template": "x"}]
    write_json(folder / "tokenizer_config.json", settings)


def template_of_another_language(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% macro %}")


def no_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (quantised, "holds quantised weights (gptq, 4 bits)"),
    (config_of_another_form, "is no config of a Llama-style decoder"),
    (cut, "is cut short"),
    (pointer, "is a git-lfs pointer"),
    (shard_missing, "lacks 1 of its 2 weight files"),
    (longrope, "RoPE of type 'longrope'"),
    (no_default_template, "none called 'default'"),
    (template_of_another_language, "chat template"),
    (no_tokenizer_json, "tokenizer"),
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    (file.parent / "text.txt").write_text("Some words. " * 50)
    return file


def build_words(target: Path, prompts: Path, out: Path) -> list[str]:
    return [
        *("build-drafter", "--target", str(target), "--out", str(out), "--export.onnx", "fp32"),
        *("--pretrain.text", str(prompts.parent / "text.txt"), "--generate.instructions", str(prompts)),
        *("--evaluate.prompts-file", str(prompts)),
    ]


@pytest.mark.parametrize(("spoil", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_build_is_refused_before_it_trains(
    spoilt: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    spoil(spoilt)
    out = tmp_path / "out"
    assert main([*build_words(spoilt, prompts, out), "--export.gguf", ""]) == 2
    error = capsys.readouterr().err.strip()  # behind the progress of reading the data
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (out / "pretrain").exists()


@pytest.mark.parametrize(("spoil", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_export_is_refused_before_it_writes(
    whole: Path,
    spoilt: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    """Whichever of the two models it is; a drafter's chat template is not read."""
    spoil(spoilt)
    pairs = [(spoilt, whole)] if "template" in spoil.__name__ else [(spoilt, whole), (whole, spoilt)]
    for target, drafter in pairs:
        out = tmp_path / f"out-{target == whole}"
        words = ["export", "--target", str(target), "--drafter", str(drafter), "--out", str(out)]
        words += ["--formats", "onnx", "--precisions", "fp32", "--prompts-file", str(prompts)]
        assert main(words) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert len(error.splitlines()) == 1
        assert not (out / "export").exists()


def test_a_tuned_target_is_refused_before_it_is_tuned(
    spoilt: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longrope(spoilt)
    out = tmp_path / "out"
    words = ["build-drafter", "--target", str(spoilt), "--out", str(out), "--tune.steps", "2"]
    words += ["--tune.conversations", str(prompts), "--export.onnx", "fp32"]
    assert main(words) == 2
    assert "RoPE of type 'longrope'" in capsys.readouterr().err
    assert not (out / "tune").exists()


def test_the_drafters_checkpoint_is_looked_at_too(
    whole: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = disturbed(whole, tmp_path / "checkpoint", 0.1)
    cut(checkpoint)
    out = tmp_path / "out"
    words = build_words(whole, prompts, out)
    assert main([*words, "--drafter.init", "checkpoint", "--drafter.checkpoint", str(checkpoint)]) == 2
    assert "checkpoint/model.safetensors is cut short" in capsys.readouterr().err
    assert not (out / "pretrain").exists()


@pytest.mark.parametrize("verb", ["build-drafter", "export", "plan"])
@pytest.mark.parametrize("name", ["models/tiny.gguf", "./tiny.gguf", "there.GGUF"])
def test_what_is_no_gguf_file_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.GGUF").write_bytes(b"GGUF")
    drafter = str(make_model_folder(tmp_path / "d"))
    words = {"export": ["--drafter", drafter], "build-drafter": ["--out", "out"], "plan": []}[verb]
    assert main([verb, "--target", name, *words]) == 2
    error = capsys.readouterr().err
    wanted = "has 4 bytes; a GGUF file has 24 at least" if name == "there.GGUF" else "does not exist"
    assert f"{Path(name)} {wanted}" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_plan_for_quantised_weights_is_refused(spoilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(spoilt)
    assert main(["plan", "--target", str(spoilt), "--gpus", "1xH100"]) == 2
    assert "holds quantised weights (gptq, 4 bits)" in capsys.readouterr().err


def test_verify_says_what_is_wrong_with_the_models(
    bundle: Path, whole: Path, spoilt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(spoilt)
    assert main(["verify", str(bundle), "--models", f"{whole},{spoilt}"]) == 2
    assert "is cut short" in capsys.readouterr().err


def test_a_target_that_cannot_write_is_told_before_pretraining(
    whole: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [
        *(*build_words(whole, prompts, out), "--inference.source", "file"),
        *("--distill.target-side", "stored", "--distill.text-fraction", "0", "--export.gguf", ""),
        *("--pretrain.context", "64", "--distill.context", "64"),
    ]
    assert main([*words, "--inference.file", str(tmp_path / "typo.gguf")]) == 2
    assert "typo.gguf' is no bundle, no folder with a" in capsys.readouterr().err
    assert (out / "plan").exists()
    assert not (out / "pretrain").exists()
