"""Verification: good files pass, really damaged ones are caught with their reason, with llama.cpp and without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.formats.export import ExportedFile, export_pair, exported_files
from edgespec_export.gguf import to_gguf
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify import file_check
from edgespec_export.verify import pair as verify
from edgespec_export.verify import tokenizers as verify_tokenizers
from edgespec_export.verify.file_check import FileCheck, judge
from edgespec_export.verify.files import as_numbered
from edgespec_export.verify.pair import Reference, verify_pair
from edgespec_export.verify.report import verification_table
from edgespec_recipes.models.loading import load_model, save_model
from edgespec_recipes.models.vocabulary import choose_vocabulary, restrict
from edgespec_runtime.engines.vocabulary import vocabulary_of
from onnx.external_data_helper import load_external_data_for_model
from safetensors.torch import load_file, save_file
from tiny_models import make_model_folder

from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.schema import ExportOptions

PROMPTS = [np.random.default_rng(seed).integers(4, 512, 40).tolist() for seed in range(3)]


@pytest.fixture(scope="module")
def pair(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight files of a qwen3 target and a llama drafter."""
    out = tmp_path_factory.mktemp("pair") / "export"
    export_pair(out, families["qwen3"], families["llama"], ExportOptions())
    return out


@pytest.fixture(scope="module")
def llama(families: dict[str, Path]) -> Reference:
    return Reference(families["llama"], PROMPTS)


@pytest.fixture(params=["llama.cpp", "no llama.cpp"])
def with_and_without_llama_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no llama.cpp":
        for module in (file_check, verify_tokenizers):
            monkeypatch.setattr(module, "is_available", lambda: False)
    return bool(request.param == "llama.cpp")


def test_good_files_pass(
    pair: Path, families: dict[str, Path], tmp_path: Path, with_and_without_llama_cpp: bool
) -> None:
    counts = verify_pair(tmp_path, pair, families["qwen3"], families["llama"], PROMPTS, ExportOptions())
    assert counts == {"files": 8, "positions": 8 * 120}
    checks = {
        (check["role"], check["precision"]): check for check in read_json(tmp_path / "verify.json")["files"]
    }
    for role in ("target", "drafter"):
        assert checks[role, "fp32"]["largest"] < 1e-4
        assert checks[role, "fp32"]["top1"] == 1.0
        assert checks[role, "int4"]["engine_relative"] < 1e-5  # the graph is exact on its own weights
        assert checks[role, "int4"]["largest"] > 0.1  # and they are far from the float ones
        assert checks[role, "fp32"]["block_flips"] == checks[role, "int4"]["block_flips"] == 0
        quantised = checks[role, "q8_0"]
        if with_and_without_llama_cpp:
            assert quantised["checked_with"] == "llama.cpp"
            assert quantised["block_largest"] == 0.0
        else:
            assert quantised["checked_with"] == Reference.without_engine
            assert quantised["block_largest"] is None
        assert checks[role, "fp32"]["fast"] is checks[role, "f16"]["fast"] is None
        fast = [checks[role, "int4"]["fast"]] + [quantised["fast"]] * with_and_without_llama_cpp
        assert all(1e-3 < mode["engine_relative"] < 0.1 for mode in fast)
        assert all(mode["block_flips"] is not None for mode in fast)
    text = verification_table(tmp_path / "verify.json")
    assert text.count(" ok") == 8 + 9  # files; the tokenizer in each of them and in the target's folder
    assert text.count("in fast mode") == (4 if with_and_without_llama_cpp else 2)
    assert (Reference.without_engine in text) is not with_and_without_llama_cpp


def damaged_copy(
    folder: Path, out: Path, *, weights: Callable[[dict[str, Any]], None], **config: Any
) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    weights(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", read_json(out / "config.json") | config)
    return out


def swap_gate_and_up(tensors: dict[str, Any]) -> None:
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def transpose_square(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    assert tensors[name].shape == (64, 64)
    tensors[name] = tensors[name].T.contiguous()


DAMAGES: dict[str, dict[str, Any]] = {
    "gate and up swapped": {"weights": swap_gate_and_up},
    "a square matrix transposed": {"weights": transpose_square},
    "RoPE base doubled": {
        "weights": lambda _: None,
        "rope_theta": 100000.0,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    },
    "epsilon": {"weights": lambda _: None, "rms_norm_eps": 1e-2},
}
# a GGUF file says its settings, a graph has them built in
BY_WEIGHTS, BY_SETTINGS = ("weights difference",), ("engine difference", "instead of")
FOUND_BY = dict(zip(DAMAGES, (BY_WEIGHTS, BY_WEIGHTS, BY_SETTINGS, BY_SETTINGS), strict=True))


def exported(source: Path, folder: Path, precision: str) -> ExportedFile:
    if precision in ("fp32", "int4"):
        export_onnx(source, folder / precision, precision)
        return ExportedFile("drafter", "onnxruntime", precision, folder / precision)
    export_gguf(source, folder / f"{precision}.gguf", precision)
    return ExportedFile("drafter", "llama.cpp", precision, folder / f"{precision}.gguf")


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_export_is_caught_at_every_precision(
    families: dict[str, Path], llama: Reference, tmp_path: Path, damage: str, with_and_without_llama_cpp: bool
) -> None:
    source = damaged_copy(families["llama"], tmp_path / "damaged", **DAMAGES[damage])
    for precision in ("fp32", "int4", "f16", "q8_0") if with_and_without_llama_cpp else ("f16", "q8_0"):
        check = llama.check(exported(source, tmp_path, precision))
        assert check.broken, (damage, precision, check)
        assert any(word in check.broken[0] for word in FOUND_BY[damage]), check.broken


@pytest.mark.parametrize("precision", ["f16", "q8_0"])
def test_a_skipped_permutation_is_caught(
    families: dict[str, Path],
    llama: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    with_and_without_llama_cpp: bool,
) -> None:
    monkeypatch.setattr(to_gguf, "permute_qk", lambda weight, heads: weight)
    check = llama.check(exported(families["llama"], tmp_path, precision))
    assert "self_attn.q_proj" in check.broken[0] or "self_attn.k_proj" in check.broken[0]


def test_accuracy_level_4_breaks_the_block_bound(
    families: dict[str, Path], llama: Reference, tmp_path: Path
) -> None:
    """int8 activations let a block's logits drift; a file of the builder's own default must not pass."""
    file = exported(families["llama"], tmp_path, "int4")
    model = onnx.load(file.path / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 4
    onnx.save(model, file.path / "model.onnx")
    check = llama.check(file)
    assert any("engine difference" in reason for reason in check.broken)


def test_a_wrong_fast_graph_is_caught(families: dict[str, Path], llama: Reference, tmp_path: Path) -> None:
    """Its block difference has no bound, but a graph that reads the matrices of two layers the wrong way round does."""
    file = exported(families["llama"], tmp_path, "int4")
    assert file.fast_graph is not None
    model = onnx.load(file.fast_graph, load_external_data=False)
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            for here, there in (names, names[::-1]):
                if name.startswith(f"{here}.MatMul.weight"):
                    node.input[place] = name.replace(here, there)
    onnx.save(model, file.fast_graph)
    check = llama.check(file)
    assert check.fast is not None
    assert len(check.broken) == 1
    assert "in fast mode above 0.1" in check.broken[0]


def test_a_changed_rope_table_is_caught(families: dict[str, Path], llama: Reference, tmp_path: Path) -> None:
    file = exported(families["llama"], tmp_path, "fp32")
    model = onnx.load(file.path / "model.onnx", load_external_data=False)
    load_external_data_for_model(model, str(file.path))
    table = next(tensor for tensor in model.graph.initializer if tensor.name == "cos_cache")
    values = np.frombuffer(table.raw_data, np.float32).copy()
    values[16 * 5] += 0.1  # one angle of position 5
    table.raw_data = values.tobytes()
    onnx.save(model, file.path / "model.onnx")
    assert "engine difference" in llama.check(file).broken[0]


def test_a_broken_bound_fails_with_the_table(pair: Path, families: dict[str, Path], tmp_path: Path) -> None:
    """Another seed's drafter: everything runs, nothing agrees."""
    other = make_model_folder(tmp_path / "other", theta=50000.0, seed=9)
    with pytest.raises(
        CheckFailed, match=r"drafter onnxruntime fp32 .*BROKEN[\s\S]*weights difference"
    ) as caught:
        verify_pair(tmp_path, pair, families["qwen3"], other, PROMPTS, ExportOptions(onnx=("fp32",), gguf=()))
    assert caught.value.exit_code == 1
    assert "target fp32" not in str(caught.value).splitlines()[-1]
    assert read_json(tmp_path / "verify.json")["files"][1]["broken"]


def test_a_drafter_with_a_vocabulary_of_its_own(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are compared on the prompts in its own numbers; on the target's numbers the engines would refuse them."""
    vocabulary = choose_vocabulary(np.arange(512) % 2, range(4), 258)
    drafter = restrict(load_model(families["llama"]), vocabulary, np.zeros(512))
    save_model(drafter, families["llama"], tmp_path / "drafter")
    options = ExportOptions(onnx=("fp32",), gguf=("q8_0",))
    export_pair(tmp_path / "export", families["qwen3"], tmp_path / "drafter", options)
    folders = (tmp_path / "export", families["qwen3"], tmp_path / "drafter")
    assert verify_pair(tmp_path, *folders, PROMPTS, options) == {"files": 4, "positions": 4 * 120}
    numbered = as_numbered(PROMPTS, vocabulary_of(tmp_path / "drafter"))
    assert {258} < {token for prompt in numbered for token in prompt} <= set(range(259))
    monkeypatch.setattr(verify, "subset_of", lambda *_: None)
    with pytest.raises(IndexError):
        verify_pair(tmp_path, *folders, PROMPTS, options)


def test_nothing_to_verify_with(families: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="no prompt to verify with"):
        Reference(families["llama"], [[]])


MEASURED = {  # by what a bound is of: the measure that is held against it, and its name in a message
    "weights": ("weights_relative", "weights difference"),
    "engine": ("engine_relative", "engine difference"),
    "block": ("block_relative", "block difference"),
    "leak": ("block_leak", "leak difference"),
    "kl": ("kl", "KL divergence"),
}


@pytest.mark.parametrize("precision", file_check.BOUNDS)
def test_every_bound_holds_what_is_at_it_and_nothing_above(precision: str) -> None:
    """Nor what is no number."""
    bounds = file_check.BOUNDS[precision]
    for name, (measure, words) in MEASURED.items():
        bound = bounds.block if name == "leak" else getattr(bounds, name)
        for value in (0.5, 1.01, float("nan")) if bound is None else (bound, 1.01 * bound, float("nan")):
            check = FileCheck("target", "onnxruntime", precision, "onnxruntime", **{measure: value})
            judge(check)
            broken = bound is not None and not value <= bound
            assert [reason.startswith(words) for reason in check.broken] == [True] * broken


@pytest.mark.parametrize(("difference", "broken"), [(0.1, 0), (0.11, 1), (float("nan"), 1)])
def test_the_fast_mode_has_a_bound_of_its_own(difference: float, broken: int) -> None:
    check = FileCheck("target", "onnxruntime", "int4", "onnxruntime")
    check.fast = file_check.FastCheck(engine_relative=difference)
    judge(check)
    assert len(check.broken) == broken


def test_export_resumes(pair: Path, families: dict[str, Path], tmp_path: Path) -> None:
    """Killed after the third file: files there stay untouched, the rest is made."""
    out = tmp_path / "export"
    options = ExportOptions()
    files = exported_files(pair, options)
    for file in files[:3]:
        place = out / file.path.relative_to(pair)
        copy = shutil.copytree if file.path.is_dir() else shutil.copyfile
        place.parent.mkdir(parents=True, exist_ok=True)
        copy(file.path, place)
    (out / "target" / "gguf" / ".target-q8_0.gguf.99999999.tmp").write_text("left by a killed run")
    kept = {
        path: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    export_pair(out, families["qwen3"], families["llama"], options)
    assert all(file.path.exists() for file in exported_files(out, options))
    assert all(path.stat().st_mtime_ns == moment for path, moment in kept.items())
    assert not list(out.rglob(".*"))


@pytest.mark.llamacpp
def test_concierge_passes(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "concierge"
    export = tmp_path / "export"
    options = ExportOptions(onnx=("int4",), gguf=("q8_0",))
    export_pair(export, folder, folder, options)
    verify_pair(tmp_path, export, folder, folder, PROMPTS, options)
    for check in read_json(tmp_path / "verify.json")["files"]:
        assert check["block_flips"] == 0
        assert check["engine_relative"] < (1e-5 if check["precision"] == "int4" else 0.01)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {"head_dim": 16})],
)
def test_biases_that_are_zero_may_be_absent(
    tmp_path: Path, family: str, settings: dict[str, Any], precision: str
) -> None:
    """The ONNX model builder leaves them out: adding them changes nothing. Any other bias must be there."""
    model = make_model_folder(tmp_path / "model", family, **settings)
    weights = load_file(model / "model.safetensors")
    zero = {name: value * 0 if name.endswith(".bias") else value for name, value in weights.items()}
    save_file(zero, model / "model.safetensors", metadata={"format": "pt"})
    export_onnx(model, tmp_path / "onnx", precision)
    file = ExportedFile("target", "onnxruntime", precision, tmp_path / "onnx")
    assert Reference(model, PROMPTS).check(file).broken == []
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    broken = Reference(model, PROMPTS).check(file).broken
    assert any("tensors are absent" in one and ".bias" in one for one in broken)
