"""ONNX export: the base of RoPE, int4 nodes, what is written, and what is refused."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgespec_export.onnx import to_onnx
from edgespec_export.onnx.by_layers import export_by_layers
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.rounded import write_rounded
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from tiny_models import make_model_folder, torch_logits

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import read_json, write_json

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()


@pytest.mark.parametrize("old_form", [True, False])
def test_rope_base_is_read_from_either_form_of_config(tmp_path: Path, old_form: bool) -> None:
    """transformers 4 writes rope_theta, 5 writes rope_parameters; a base of 10,000 must not be assumed for either."""
    folder = make_model_folder(tmp_path / "model", theta=300000.0)
    reference = torch_logits(folder, TOKENS).numpy()
    config = read_json(folder / "config.json")
    del config["rope_parameters" if old_form else "rope_theta"]
    write_json(folder / "config.json", config)
    export_onnx(folder, tmp_path / "onnx", "fp32")
    engine = OnnxRuntimeEngine(tmp_path / "onnx", threads=1)
    difference = np.abs(engine.forward(TOKENS) - reference).max()
    engine.close()
    assert difference < 1e-4


def test_int4_quantises_every_matrix_with_float_activations(
    families: dict[str, Path], tmp_path: Path
) -> None:
    for family, tied in (("llama", True), ("qwen3", False)):
        folder = tmp_path / family
        result = export_onnx(families[family], folder, "int4")
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        nodes = [node for node in graph.node if node.op_type == "MatMulNBits"]
        settings = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
        assert len(nodes) == 2 * 5 + 1  # q+k+v joined, o, gate, up, down in two layers; the output head
        assert not [node for node in graph.node if node.op_type == "MatMul"]
        assert {(one["bits"], one["block_size"], one["accuracy_level"]) for one in settings} == {(4, 32, 1)}
        embedded = [node.op_type for node in graph.node if node.name.startswith("/model/embed_tokens/Gather")]
        assert embedded == ["GatherBlockQuantized" if tied else "Gather"]
        assert result["bytes"] == sum(file.stat().st_size for file in folder.iterdir())


def test_what_is_written(
    families: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = logging.getLogger().handlers[:]
    export_onnx(families["llama"], tmp_path / "model", "fp32")
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert names == {
        "model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    }  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (families["llama"] / name).read_bytes()
    model = read_json(tmp_path / "model" / "genai_config.json")["model"]
    assert (model["vocab_size"], model["context_length"], model["eos_token_id"]) == (512, 256, 2)
    assert "Reading layer 1" in (tmp_path / "model.log").read_text()
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers


def test_what_cannot_be_exported_is_refused(families: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'int4'"):
        export_onnx(families["llama"], tmp_path / "out", "int44")
    narrow = make_model_folder(tmp_path / "narrow", head_dim=8)
    with pytest.raises(InputError, match=r"heads of 8.*multiple of 16"):
        export_onnx(narrow, tmp_path / "out", "fp32")
    twins = make_model_folder(tmp_path / "twins", intermediate=512)
    with pytest.raises(InputError, match=r"vocabulary of 512, and matrices in its layers have as many rows"):
        export_onnx(twins, tmp_path / "out", "fp32")
    other = shutil.copytree(families["llama"], tmp_path / "other")
    write_json(other / "config.json", read_json(other / "config.json") | {"model_type": "gemma"})
    with pytest.raises(InputError, match=r"'gemma' model"):
        export_onnx(other, tmp_path / "out", "fp32")


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "whole": lambda model, out: export_onnx(model, out, "fp32"),
    "mixed": lambda model, out: export_mixed(model, out, {}, {}),
    "by layers": export_by_layers,
    "rounded": lambda model, out: write_rounded(model, out, "int4"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_log_lies_beside_the_folder_that_was_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The builder works in a folder that vanishes."""

    def fail(*_: object, **__: object) -> None:
        print("what the builder said")
        raise NotImplementedError("no such RoPE")

    monkeypatch.setattr(to_onnx._builder(), "create_model", fail)
    model, out = make_model_folder(tmp_path / "model", layers=3), tmp_path / "new" / "out"
    with pytest.raises(EdgespecError, match=re.escape(f"no such RoPE; its output is in {out}.log")):
        WRITERS[name](model, out)
    assert [path.name for path in out.parent.iterdir()] == ["out.log"]
    assert "what the builder said" in (tmp_path / "new" / "out.log").read_text()
