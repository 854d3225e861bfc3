"""Static graphs as files of a pair: exported, held against torch, bundled, opened on both engines; damage is caught."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.replies import Questions, Reply
from edgespec_export.bundle.write import write_bundle
from edgespec_export.formats.export import ExportedFile, export_pair
from edgespec_export.npu.to_npu import export_npu
from edgespec_export.verify.files import Standard
from edgespec_export.verify.pair import Reference
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.engines import static_program
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from safetensors.torch import load_file, save_file
from tiny_bundle import disturbed

from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import RawCounts
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import FoundTarget

OPTIONS = ExportOptions(
    onnx=("fp32",), gguf=(), npu=("fp32", "qdq8", "qdq16"), npu_length=128, npu_prefill=32
)
ROWS = [np.random.default_rng(seed).integers(4, 512, 60).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def exported(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, drafter/ (models) and export/ of a tied model and a noisy copy. Read-only."""
    root = tmp_path_factory.mktemp("npu")
    drafter = disturbed(families["llama"], root / "drafter", 0.07)
    export_pair(root / "export", families["llama"], drafter, OPTIONS, lambda: ROWS)
    return root


@pytest.fixture(scope="module")
def bundle(families: dict[str, Path], exported: Path) -> Path:
    write_bundle(
        exported / "bundle", exported / "export", FoundTarget("tiny", families["llama"], "test"), exported / "drafter", OPTIONS,
        prompts=[[{"role": "user", "content": "Hello"}]], evaluation={}, verification={"files": []},
        metrics={}, provenance={},
    )  # fmt: skip
    return exported / "bundle"


def replies(pair: Pair, prompt: list[int]) -> tuple[list[int], list[int], RawCounts]:
    """Greedy: the target's alone, the pair's, and the pair's counts."""
    options, counts = DecodingOptions(max_new_tokens=30, draft_length=3), RawCounts()
    alone = [t for b in decode(pair.target, None, prompt, plain(options), (), RawCounts()) for t in b.tokens]
    both = [t for b in decode(pair.target, pair.draft, prompt, options, (), counts) for t in b.tokens]
    return alone, both, counts


def test_every_precision_holds_its_bounds(families: dict[str, Path], exported: Path) -> None:
    reference = Reference(families["llama"], ROWS[:2])
    for precision in OPTIONS.npu:
        path = exported / "export" / "target" / f"static-{precision}"
        check = reference.check(ExportedFile("target", "static", precision, path))
        assert check.broken == []
        assert check.checked_with == "static"
        assert check.fast is None
        if precision == "fp32":
            assert check.largest < 1e-4
        else:
            assert 1e-3 < check.weights_relative < 2e-2


def test_a_file_is_compared_as_far_as_its_context_goes(
    families: dict[str, Path], exported: Path, tmp_path: Path
) -> None:
    """It holds 64 tokens and takes two at once, its model 256: a text is cut, and a reply beyond it is left out."""
    texts = [np.random.default_rng(seed).integers(4, 512, 90).tolist() for seed in range(2)]
    prompts, path = [texts[0], texts[1][:20]], tmp_path / "static"
    export_npu(families["llama"], path, replace(OPTIONS, npu_length=64, npu_prefill=2, npu_gamma=1))
    written = [Reply(tuple(prompt), (5, 6, 7, 8, 9), 0.0) for prompt in prompts]
    asked = Questions(prompts, ["long", "short"], frozenset({2}), str, written)
    reference = Reference(families["llama"], prompts, asked)
    alone = Standard(reference.shape, reference.parameters, None, prompts)
    alone.held = HeldOut(asked, reference.shape)
    for standard in (reference, alone):
        check = standard.check(ExportedFile("target", "static", "fp32", path))
        assert (check.broken, check.positions) == ([], 64 + 20)
        assert check.answers is not None
        assert [sample.question for sample in check.answers.samples] == ["short"]
    whole = ExportedFile("target", "onnxruntime", "fp32", exported / "export" / "target" / "onnx-fp32")
    assert [standard.check(whole).positions for standard in (reference, alone)] == [110, 84]


@pytest.mark.parametrize("damage", ["gate and up swapped", "RoPE base doubled", "epsilon"])
def test_a_damaged_export_is_caught(families: dict[str, Path], tmp_path: Path, damage: str) -> None:
    source = shutil.copytree(families["llama"], tmp_path / "damaged")
    config = read_json(source / "config.json")
    if damage == "gate and up swapped":
        tensors = load_file(source / "model.safetensors")
        gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    elif damage == "epsilon":
        config["rms_norm_eps"] = 1e-2
    else:
        config |= {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    write_json(source / "config.json", config)
    export_npu(source, tmp_path / "static", OPTIONS)
    check = Reference(families["llama"], ROWS[:2]).check(
        ExportedFile("target", "static", "fp32", tmp_path / "static")
    )
    wanted = "weights difference" if damage == "gate and up swapped" else "engine difference"
    assert any(reason.startswith(wanted) for reason in check.broken), check.broken


@pytest.mark.parametrize("precision", OPTIONS.npu)
@pytest.mark.parametrize("engine", ["static", "openvino"])
def test_a_bundle_opens_on_both_engines_and_speculates(bundle: Path, engine: str, precision: str) -> None:
    pair = open_pair(bundle, LoadOptions(engine=engine, precision=precision, threads=1))
    alone, both, counts = replies(pair, ROWS[0][:20])
    name = pair.target.engine.name
    pair.close()
    assert name == f"{'openvino' if engine == 'openvino' else 'onnxruntime'} static static-{precision}"
    assert (pair.engine, pair.precision) == ("static", precision)
    assert counts.drafted > 0
    if precision == "fp32":
        assert both == alone
        usual = open_pair(bundle, LoadOptions(engine="onnxruntime", precision="fp32", threads=1))
        assert replies(usual, ROWS[0][:20])[0] == alone  # the shared-KV graph says the same
        usual.close()


@pytest.mark.parametrize(("asked", "seen"), [(40, 40), (4000, 128)])
def test_context_is_bounded_by_the_cache(bundle: Path, asked: int, seen: int) -> None:
    pair = open_pair(bundle, LoadOptions(engine="static", precision="fp32", threads=1, context=asked))
    assert pair.target.engine.context_length == seen
    pair.close()


def test_what_cannot_be_opened_is_said(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no 'int4' pair for static"):
        open_pair(bundle, LoadOptions(engine="openvino", precision="int4"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    static_program._core.cache_clear()
    with pytest.raises(MissingExtra, match=r'pip install "edgespec\[openvino\]"'):
        open_pair(bundle, LoadOptions(engine="openvino", precision="fp32"))
    static_program._core.cache_clear()
