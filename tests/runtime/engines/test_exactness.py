"""The modes exact and fast: what runs, what was measured of it and what is said, on both engines and on older bundles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.bundle.write import write_bundle
from edgespec_export.formats.export import export_pair
from edgespec_export.onnx.to_onnx import FAST_GRAPH, write_fast_graph
from edgespec_export.verify.pair import verify_pair
from edgespec_runtime.chooser.kept_costs import subject_of
from edgespec_runtime.doctor.block_difference import block_difference
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.exactness import EXACT, FAST, Exactness, Way, exactness_of
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import FoundTarget

ROUNDING = 1e-4  # of a logit; what float sums in another order may differ by, several times over
ROUNDED = 1e-2  # of a logit; what int8 activations and blocks summed in another way differ by at least, on these weights
PROMPTS = [np.random.default_rng(seed).integers(4, 512, 128).tolist() for seed in range(4)]
POSITIONS = sum(map(len, PROMPTS))  # rounding steps by block are rare: a few dozen tokens may show none
CHATS = [[{"role": "user", "content": text}] for text in ("Hello", "What is a list?", "def f(x):")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in all four precisions, exported, verified and written by the code that does it in earnest. Read-only."""
    root = tmp_path_factory.mktemp("modes")
    target = make_model_folder(root / "target", hidden=256, head_dim=64, intermediate=576)
    drafter = disturbed(target, root / "drafter", noise=0.07)
    export_pair(root / "export", target, drafter, ExportOptions())
    verify_pair(root, root / "export", target, drafter, PROMPTS, ExportOptions())
    write_bundle(
        root / "bundle",
        root / "export",
        FoundTarget("tiny", target, "test"),
        drafter,
        ExportOptions(),
        prompts=CHATS,
        evaluation={},
        verification=read_json(root / "verify.json"),
        metrics={},
        provenance={},
    )
    return root / "bundle"


@pytest.fixture
def opened(made: Path) -> Iterator[Callable[..., Pair]]:
    """Open the bundle with options; closed at the end."""
    pairs: list[Pair] = []

    def open_one(*named: str, **options: Any) -> Pair:
        pairs.append(open_pair(made, LoadOptions(*named, threads=1, **options)))
        return pairs[-1]

    yield open_one
    for pair in pairs:
        pair.close()


def logits(model: CachedEngine) -> np.ndarray:
    """Of one prompt in single steps."""
    model.rewind(0)
    return np.concatenate([np.array(model.forward([token])) for token in PROMPTS[0]])


@pytest.mark.parametrize(("engine", "precision"), [("onnxruntime", "int4"), ("llama.cpp", "q8_0")])
def test_fast_blocks_differ_and_exact_ones_do_not(
    opened: Callable[..., Pair], engine: str, precision: str
) -> None:
    """What this machine measures now, and what verify.json says, agree on which mode is which."""
    exact, fast = (opened(engine, precision, mode=mode) for mode in (EXACT, FAST))
    assert block_difference(exact.target, PROMPTS, POSITIONS).largest < ROUNDING
    assert block_difference(fast.target, PROMPTS, POSITIONS).largest > ROUNDED
    for pair, mode in ((exact, EXACT), (fast, FAST)):
        said = pair.measured_exactness()
        assert (said.mode, said.positions, said.remark) == (mode, POSITIONS, "")
        assert said.largest is not None
        assert (said.largest > ROUNDED) is (mode == FAST)
        assert said.flips is not None
        assert str(pair.measured_exactness()) == (
            f"{mode} mode, largest logit difference {said.largest:.1g}, {said.flips} of {POSITIONS} argmaxes changed"
        )
    assert exact.measured_exactness().flips == 0


def test_the_fast_graph_runs_on_the_same_weights(opened: Callable[..., Pair]) -> None:
    exact, fast, floats = (
        opened("onnxruntime", precision, mode=mode)
        for precision, mode in (("int4", EXACT), ("int4", FAST), ("fp32", EXACT))
    )
    one, other, unrounded = (logits(pair.target) for pair in (exact, fast, floats))
    moved = np.abs(one - other).mean()
    assert 1e-4 < moved < 0.1 * np.abs(one - unrounded).mean()  # far less than int4 itself moves
    assert (exact.fast_graph, fast.fast_graph, floats.fast_graph) == (False, True, False)
    assert subject_of(exact).file() != subject_of(fast).file()  # the costs of the one are not the other's
    assert (subject_of(exact).fast_graph, subject_of(fast).fast_graph) == (False, True)


def test_the_drafter_is_fast_in_either_mode(opened: Callable[..., Pair], made: Path) -> None:
    """q is what the drafter's logits say, however it came to them; only the target's blocks must be exact."""
    exact, fast = (opened("onnxruntime", "int4", mode=mode) for mode in (EXACT, FAST))
    assert exact.draft is not None
    assert fast.draft is not None
    seen = logits(exact.draft)
    assert np.array_equal(seen, logits(fast.draft))
    usual = CachedEngine(OnnxRuntimeEngine(made / "drafter" / "onnx-int4", threads=1))
    assert np.abs(seen - logits(usual)).mean() > 1e-4
    usual.engine.close()
    assert not np.array_equal(logits(exact.target), logits(fast.target))


def test_only_the_accuracy_level_differs(made: Path) -> None:
    folder = made / "target" / "onnx-int4"
    exact, fast = (onnx.load(folder / name, load_external_data=False) for name in ("model.onnx", FAST_GRAPH))
    levels = [
        attribute
        for node in fast.graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    ]
    assert {level.i for level in levels} == {4}
    for level in levels:
        level.i = 1
    assert fast == exact
    assert (folder / FAST_GRAPH).stat().st_size < 0.1 * (folder / "model.onnx.data").stat().st_size


def test_a_graph_without_levels_is_not_written_again(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "target" / "onnx-fp32", tmp_path / "model")
    with pytest.raises(EdgespecError, match="no MatMulNBits with an accuracy level"):
        write_fast_graph(tmp_path / "model")
    assert not (tmp_path / "model" / FAST_GRAPH).exists()


@pytest.mark.llamacpp
def test_precisions_without_a_fast_way_say_so(opened: Callable[..., Pair]) -> None:
    exact, fast = (opened("onnxruntime", "fp32", mode=mode) for mode in (EXACT, FAST))
    assert np.array_equal(logits(exact.target), logits(fast.target))
    assert str(fast.measured_exactness()).endswith(
        f"0 of {POSITIONS} argmaxes changed (fp32 has no faster way on onnxruntime)"
    )
    floats = opened("llama.cpp", "f16")
    assert "not promised: llama.cpp sums a block of float weights in another order" in str(
        floats.measured_exactness()
    )
    assert (floats.measured_exactness().largest or 0.0) > 0.0


@pytest.mark.parametrize(
    ("mode", "flash_attention", "says", "measured"),
    [
        (EXACT, False, "not exact: flash attention is off as asked", FAST),
        (FAST, True, "flash attention is on as asked", EXACT),
        (FAST, None, "", FAST),
    ],
)
@pytest.mark.llamacpp
def test_the_kernel_asked_for_by_name_wins_and_a_contradiction_is_said(
    opened: Callable[..., Pair], mode: str, flash_attention: bool | None, says: str, measured: str
) -> None:
    pair = opened("llama.cpp", "q8_0", mode=mode, flash_attention=flash_attention)
    assert pair.flash_attention is (measured == EXACT)
    assert says in str(pair.measured_exactness())
    assert (pair.measured_exactness().largest == 0.0) is (measured == EXACT)
    assert pair.mode == mode


def without_fast_graphs(made: Path, folder: Path) -> Path:
    """The bundle as it was written before there was a fast mode."""
    shutil.copytree(made, folder)
    manifest = read_json(folder / "manifest.json")
    for role in ("target", "drafter"):
        del manifest[role]["fast"]
        (folder / role / "onnx-int4" / FAST_GRAPH).unlink()
        del manifest["files"][f"{role}/onnx-int4/{FAST_GRAPH}"]
    checks = read_json(folder / "verify.json")
    for check in checks["files"]:
        del check["fast"]
    rewrite(folder, "verify.json", checks)
    written = read_json(folder / "manifest.json")["files"]["verify.json"]
    write_json(folder / "manifest.json", manifest | {"files": manifest["files"] | {"verify.json": written}})
    return folder


def rewrite(folder: Path, name: str, value: Any) -> None:
    """Replace a JSON file of a bundle and what its manifest says of it."""
    from edgespec.core.manifest import describe_files

    write_json(folder / name, value)
    file = describe_files(folder)[name]
    manifest = read_json(folder / "manifest.json")
    manifest["files"][name] = {"sha256": file.sha256, "bytes": file.bytes}
    write_json(folder / "manifest.json", manifest)


@pytest.mark.llamacpp
def test_a_bundle_of_an_earlier_edgespec_opens(made: Path, tmp_path: Path) -> None:
    old = without_fast_graphs(made, tmp_path / "old")
    pair = open_pair(old, LoadOptions("onnxruntime", "int4", threads=1))
    assert str(pair.measured_exactness()).startswith("exact mode, largest logit difference ")
    pair.close()
    with pytest.raises(
        InputError,
        match=r"mode is 'fast', and the bundle's int4 target has no graph .* build the bundle again",
    ):
        open_pair(old, LoadOptions("onnxruntime", "int4", mode=FAST))
    pair = open_pair(old, LoadOptions("llama.cpp", "q8_0", threads=1, mode=FAST))
    assert pair.flash_attention is False
    assert str(pair.measured_exactness()) == "fast mode (not measured where the bundle was made)"
    pair.close()


def test_a_float_drafter_stands_beside_a_target_in_fast_mode(made: Path, tmp_path: Path) -> None:
    """As a bundle has it where the drafter's floats cost little; they have no graph of the fast mode."""
    folder = shutil.copytree(made, tmp_path / "bundle")
    manifest = read_json(folder / "manifest.json")
    files, fast = (manifest["drafter"][name]["onnxruntime"] for name in ("files", "fast"))
    files["int4"] = files["fp32"]
    del fast["int4"]
    write_json(folder / "manifest.json", manifest)
    with closing(open_pair(folder, LoadOptions("onnxruntime", "int4", threads=1, mode=FAST))) as pair:
        assert pair.fast_graph
        assert pair.draft is not None


def test_the_fast_graph_is_checked_like_every_file(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "bundle")
    graph = folder / "target" / "onnx-int4" / FAST_GRAPH
    data = bytearray(graph.read_bytes())
    data[100] ^= 1
    graph.write_bytes(bytes(data))
    with pytest.raises(BundleError, match=r"model-fast\.onnx was altered"):
        open_pair(folder, LoadOptions("onnxruntime", "int4"))


def check(**more: Any) -> dict[str, Any]:
    named = {"role": "target", "engine": "llama.cpp", "precision": "q8_0", "checked_with": "llama.cpp"}
    return {**named, "positions": 10, "block_largest": 0.0, "block_flips": 0, **more}


@pytest.mark.parametrize(
    "verification",
    [
        {},
        {"files": None},
        {"files": [None, 7, "x", []]},
        {"files": [check(role="drafter"), check(precision="f16")]},
        {"files": [check(fast=None)]},
        {"files": [check(fast=[1])]},
        {"files": [check(fast={"block_largest": "much", "block_flips": 1})]},
        {"files": [check(fast={"block_largest": 0.5, "block_flips": 1}, positions=None)]},
        {"files": [check(fast={"block_largest": 10**400, "block_flips": 1})]},
    ],
)
def test_what_a_stranger_wrote_is_not_measured(verification: dict[str, Any]) -> None:
    way = Way(FAST, "llama.cpp", "q8_0", flash_attention=False)
    seen = exactness_of(way, verification)
    assert (seen.largest, seen.flips, seen.positions) == (None, None, None)
    assert str(seen) == "fast mode (not measured where the bundle was made)"


def test_what_was_measured_is_that_of_what_runs() -> None:
    verification = {"files": [check(fast={"block_largest": 0.25, "block_flips": 3})]}
    way = {"engine": "llama.cpp", "precision": "q8_0"}
    assert exactness_of(Way(FAST, flash_attention=False, **way), verification) == Exactness(
        FAST, 0.25, 3, 10, ""
    )
    assert exactness_of(Way(EXACT, flash_attention=True, **way), verification).largest == 0.0
    assert exactness_of(Way(EXACT, flash_attention=False, **way), verification).largest == 0.25
    odd = exactness_of(Way(EXACT, flash_attention=True, **way), {"files": [check(block_largest=0.2)]})
    assert odd.remark.startswith("not exact: a block of these weights")
    absent = {
        "files": [check(checked_with="weights read back in torch", block_largest=None, block_flips=None)]
    }
    assert str(exactness_of(Way(EXACT, flash_attention=True, **way), absent)) == (
        "exact mode (not measured on llama.cpp; checked with: weights read back in torch)"
    )
    absent["files"][0]["checked_with"] = "\x1b]0;a title\x07" + "x" * 1000
    told = str(exactness_of(Way(EXACT, flash_attention=True, **way), absent))
    assert told.isprintable()  # doctor and bench print it
    assert len(told) < 200
    on = Way(EXACT, "llama.cpp", "f16", flash_attention=True, float_weights=True)
    assert exactness_of(on, {"files": [check(precision="f16")]}).largest is None


def test_a_caution_is_said_where_a_pair_is_not_exact() -> None:
    way = {"engine": "llama.cpp", "precision": "q8_0"}
    verification = {"files": [check(block_largest=0.0, fast={"block_largest": 0.25, "block_flips": 3})]}
    fast, exact = (Way(mode, flash_attention=mode == EXACT, **way) for mode in (FAST, EXACT))
    assert exactness_of(fast, verification).caution() == (
        "Fast mode: rounding may flip a near tie (3 of 10 positions when packed); --mode exact is slower and avoids it."
    )
    assert exactness_of(exact, verification).caution() == exactness_of(exact, {}).caution() == ""
    unmeasured = exactness_of(fast, {}).caution()
    assert unmeasured.startswith(
        "Fast mode: rounding may flip a near tie (not measured where the bundle was made);"
    )
    # asked for in the mode's name, and not what runs
    odd = exactness_of(exact, {"files": [check(block_largest=0.2, block_flips=1)]})
    assert odd.caution().startswith(
        "Exact mode without its promise: rounding may flip a near tie (1 of 10 positions when packed; not exact: a block"
    )
    for kernel in (True, False):
        floats = Way(EXACT, "llama.cpp", "f16", flash_attention=kernel, float_weights=True)
        assert "not promised: llama.cpp sums a block of float weights" in exactness_of(floats, {}).caution()
    same = Way(FAST, "onnxruntime", "fp32")  # one kernel for both modes
    assert exactness_of(same, {}).caution() == ""


@pytest.mark.parametrize(
    ("engine", "precision", "promised"),
    [
        ("static", "fp32", True),
        ("static", "qdq8", False),
        ("static", "qdq16", False),
        ("openvino", "fp32", False),
        ("an engine that nobody has named", "fp32", False),
    ],
)
def test_integers_openvino_and_unknown_engines_promise_nothing(
    engine: str, precision: str, promised: bool
) -> None:
    exact, fast = (exactness_of(Way(mode, engine, precision), {}).caution() for mode in (EXACT, FAST))
    near = "rounding may flip a near tie (not measured where the bundle was made"
    assert exact == ("" if promised else f"Exact mode without its promise: {near}).")
    # the same kernels run in both modes, so the other one is no help
    assert fast == ("" if promised else f"Fast mode: {near}; {precision} has no faster way on {engine}).")


def test_the_mode_is_in_the_reports(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    int4 = ["--engine", "onnxruntime", "--precision", "int4", "--threads", "1"]
    flags = [*int4, "--mode", "fast", "--max-prompts", "1", "--max-new-tokens", "4", "--draft-lengths", "2"]
    assert main(["bench", str(made), *flags, "--json", str(tmp_path / "bench.json")]) == 0
    exactness = json.loads((tmp_path / "bench.json").read_text())["exactness"]
    seen = f"{exactness['flips']} of {exactness['positions']} positions when packed"
    said = f"Fast mode: rounding may flip a near tie ({seen}); --mode exact is slower and avoids it."
    assert said in capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "bench.json").read_text())["options"]["mode"] == FAST
    told = tmp_path / "doctor.json"
    flags = [*int4, "--seconds", "0.5", "--contexts", "16", "--json", str(told)]
    assert main(["doctor", str(made), *flags]) == 0
    report = json.loads(told.read_text())
    ways = {(way["engine"], way["precision"], way["fast_graph"]) for way in report["others"]}
    assert ("onnxruntime", "int4", True) in ways
    assert ("onnxruntime", "int4", False) not in ways  # that is the chosen one
    assert report["chosen"]["fast_graph"] is False
    shown = capsys.readouterr().out
    assert "onnxruntime int4, fast mode" in shown
    assert "where the bundle was made: exact mode, largest" in shown
    assert main(["bench", str(made), "--mode", "quick"]) == 2
    assert "mode is 'quick'" in capsys.readouterr().err
