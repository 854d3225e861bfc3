"""The doctor: what it says of made-up measurements, and a short run on a real bundle with both engines."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from altered_bundle import change_manifest
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.npu.to_npu import export_npu
from edgespec_export.onnx.blocks import OFFSET4
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.chooser.expected_acceptance import Acceptance, acceptances_of
from edgespec_runtime.chooser.kept_costs import load_costs
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.doctor import doctor
from edgespec_runtime.doctor.block_difference import Difference
from edgespec_runtime.doctor.report import Findings, Threads, Variant, advice, as_json, diagnosis, limit, text
from edgespec_runtime.engines import llamacpp as engine_llamacpp
from edgespec_runtime.engines.device import Device
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from tiny_bundle import PROMPTS, disturbed, exported_bundle
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.manifest import BundleModel, Manifest, describe_files, open_manifest
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import read_tensors

EXACT = Difference(1e-5, 0, 256)
CHEAP = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35)
STEEP = (1.0, 1.9, 2.8, 3.7, 4.6, 5.5, 6.4, 7.3)


def variant(v: Sequence[float], c_t: float, step: float = 0.01, **more: Any) -> Variant:
    costs = Costs((32, 256), (tuple(step * value for value in v),) * 2, (step * c_t,) * 2)
    told = {"engine": "onnxruntime", "precision": "fp32", "flash_attention": None, "difference": EXACT}
    return Variant(costs=costs, **{**told, **more})


def findings(chosen: Variant, *rates: float, **more: Any) -> Findings:
    told: dict[str, Any] = {
        "bundle": "build/bundle",
        "asked": {},
        "target": "chat",
        "drafter": "chat-drafter",
        "device": Device("A processor", 2, 16, "Linux x86_64"),
        "bandwidth": 20e9,
        "threads": 2,
        "streamed": 180_000_000,
        "byte_ratio": 0.02,
        "others": (),
        "thread_counts": (),
        "acceptances": tuple(
            Acceptance(where, rate) for where, rate in zip(("greedy", "T = 1"), rates, strict=False)
        ),
        "verified": "largest logit difference 1e-05, 0 of 163 argmaxes changed",
        "kept": False,
        "notes": (),
    }
    return Findings(chosen=chosen, **{**told, **more})


@pytest.mark.parametrize(
    ("chosen", "rate", "words"),
    [
        (
            variant(CHEAP, 0.05),
            0.7,
            "Speculation should pay (greedy, α = 0.70): 1.98x plain decoding at γ = 4; it pays down to α = 0.29.",
        ),
        (variant(CHEAP, 0.9), 0.7, "The drafter is too slow for this target: a step of it costs 0.90"),
        (variant(STEEP, 0.05), 0.7, "Verifying 2 tokens in one pass is too costly on this machine"),
        (variant(CHEAP, 0.1), 0.1, "Acceptance is too low, α = 0.10"),
        (variant((1.0, 1.5), 0.02), 0.54, "Speculation makes little difference (greedy, α = 0.54)"),
        (variant((1.0,), 0.02), 0.54, "the context has no room for a draft"),
    ],
)
def test_the_diagnosis_names_the_cause(chosen: Variant, rate: float, words: str) -> None:
    (said,) = diagnosis(findings(chosen, rate))
    assert words in said
    assert ("does not pay" in said) is (not any(good in said for good in ("should", "little", "cannot")))
    assert "\n" not in said


def test_every_known_acceptance_has_its_own_diagnosis() -> None:
    greedy, sampled = diagnosis(findings(variant(CHEAP, 0.1), 0.7, 0.1))
    assert "should pay (greedy" in greedy
    assert "does not pay (T = 1, α = 0.10): 0.9" in sampled


def test_the_exact_mode_is_named_where_it_is_part_of_the_cause() -> None:
    on = {"engine": "llama.cpp", "precision": "q8_0"}
    exact = variant(STEEP, 0.05, flash_attention=True, **on)
    flips = Difference(0.1, 5, 256)
    fast = variant(CHEAP, 0.05, flash_attention=False, difference=flips, **on)
    (said,) = diagnosis(findings(exact, 0.7, others=(fast,)))
    assert said.endswith(
        "Exactness is part of it: llama.cpp q8_0, no flash attention verifies in 55% of the time and changes "
        "5 of 256 argmaxes."
    )
    for other in (replace(fast, difference=EXACT), replace(fast, precision="f16"), replace(exact)):
        assert "Exactness" not in diagnosis(findings(exact, 0.7, others=(other,)))[0]


def test_without_a_known_acceptance_it_says_what_is_needed() -> None:
    found = findings(variant((1.0, 1.3), 0.1))
    assert diagnosis(found) == ["The bundle does not say its α; drafts pay where it is above 0.40."]
    assert advice(found) == ["edgespec bench build/bundle    # measures α and the speed-up"]
    assert "whatever the drafter" in diagnosis(findings(variant(STEEP, 0.9)))[0]


@pytest.mark.parametrize(
    ("v", "streamed", "words"),
    [
        (CHEAP, 180_000_000, "Memory bandwidth binds (a step of 10 ms reads 180 MB, 18 GB/s where"),
        (STEEP, 180_000_000, "Arithmetic binds"),
        ((1.0, 2.0, 2.5, 2.9, 3.4, 3.7, 4.0, 4.4), 180_000_000, "Arithmetic binds"),  # of usual drafts
        (CHEAP, 300_000_000, "The weights stay in the processor's caches"),
        (CHEAP, 1_000_000, "Neither memory nor arithmetic binds alone"),
    ],
)
def test_the_limit_that_binds(v: Sequence[float], streamed: int, words: str) -> None:
    assert words in limit(findings(variant(v, 0.1), 0.7, streamed=streamed))


def test_advice_is_a_command_that_fits() -> None:
    good = variant(CHEAP, 0.05)
    first, second = advice(findings(good, 0.7))
    assert first.startswith("edgespec chat build/bundle --draft-length ")
    assert second.startswith("edgespec bench build/bundle ")
    (plain,) = advice(findings(variant(STEEP, 0.5), 0.7))
    assert plain.startswith("edgespec chat build/bundle --no-draft    # predicted 100 tok/s")

    asked = findings(good, 0.7, asked={"engine": "llama.cpp", "context": 64})
    assert advice(asked)[0].startswith(
        "edgespec chat build/bundle --engine llama.cpp --context 64 --draft-length "
    )

    faster = variant(CHEAP, 0.05, step=0.005, engine="llama.cpp", precision="q8_0", flash_attention=True)
    last = advice(findings(good, 0.7, others=(faster,)))[-1]
    assert last.startswith(
        "edgespec doctor build/bundle --engine llama.cpp --precision q8_0 --flash-attention "
    )
    assert last.endswith("# about 2.0 times as fast; other weights, so other replies")
    slower = replace(faster, costs=variant(CHEAP, 0.05, step=0.0099).costs)
    assert len(advice(findings(good, 0.7, others=(slower,)))) == 2
    exact = replace(good, costs=faster.costs)
    assert "--mode exact " in advice(findings(replace(good, fast_graph=True), 0.7, others=(exact,)))[-1]
    flips = Difference(0.1, 3, 256)
    unlike = replace(faster, flash_attention=False, difference=flips)
    last = advice(findings(replace(faster, costs=good.costs), 0.7, others=(unlike,)))[-1]
    assert "--no-flash-attention " in last
    assert last.endswith("times as fast; not exact")
    assert "not exact: a block can change" in advice(findings(replace(good, difference=flips), 0.7))[0]


def test_advice_can_be_copied_whatever_the_bundle_is_called() -> None:
    bundle = "/home/John Doe/it's/bundle"
    faster = variant(CHEAP, 0.05, step=0.005, engine="llama.cpp", precision="q8_0")
    known = findings(variant(CHEAP, 0.05), 0.7, bundle=bundle, others=(faster,))
    unknown = findings(variant(CHEAP, 0.05), bundle=bundle)
    commands = [shlex.split(line, comments=True) for line in (*advice(known), *advice(unknown))]
    assert [words[1] for words in commands] == ["chat", "bench", "doctor", "bench"]
    assert {words[2] for words in commands} == {bundle}


def test_a_faster_thread_count_is_advised() -> None:
    counts = (Threads(1, 0.005, 0.01, 0.001), Threads(2, 0.006, 0.01, 0.001))
    assert "--threads 1 " in advice(findings(variant(CHEAP, 0.05), 0.7, thread_counts=counts))[0]
    near = (replace(counts[0], target=0.0059), counts[1])
    assert "--threads" not in advice(findings(variant(CHEAP, 0.05), 0.7, thread_counts=near))[0]


def test_the_text_shows_padding_break_even_and_predictions() -> None:
    saw = variant((1.0, 1.51, 2.12, 1.40), 0.02)
    shown = text(findings(saw, 0.7))
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["γ = 2"][3:] == ["2.12", "2.12", "3", "->", "4", "1.44", "0.33", "1.52", "2.11"]
    assert rows["γ = 3"][3:] == ["1.40", "1.40", "4", "1.46", "0.32", "1.73", "2.39"]
    assert "none" not in shown
    assert "none" in text(findings(variant(STEEP, 0.9), 0.7))
    assert "| γ = 3 |" in text(findings(saw, 0.7), markdown=True)
    assert all(len(line) < 300 for line in shown.splitlines())


def test_json_holds_measurements_and_what_follows() -> None:
    report = json.loads(json.dumps(as_json(findings(variant(CHEAP, 0.05), 0.7))))
    assert report["chosen"]["costs"]["contexts"] == [32, 256]
    assert report["derived"]["v"]["256"] == pytest.approx(CHEAP)
    assert report["derived"]["best"] == [
        {"where": "greedy", "draft_length": 4, "speedup": pytest.approx(1.981, abs=1e-3)}
    ]


def setting(
    drafter: str, temperature: float, rate: Any, length: int = 3, top_p: float = 1.0
) -> dict[str, Any]:
    metrics = {"alpha_empirical": [rate, 0.0, 1.0]}
    named = {"drafter": drafter, "temperature": temperature, "top_p": top_p, "draft_length": length}
    return {**named, "metrics": metrics}


def test_acceptance_is_the_distilled_drafters() -> None:
    settings = [
        setting("pretrained", 0.0, 0.3),
        setting("distilled", 0.0, 0.6),
        setting("distilled", 0.0, 0.5, length=5),
        setting("distilled", 0.6, 0.4, top_p=0.9),
    ]
    assert acceptances_of({"settings": settings}) == (
        Acceptance("greedy", pytest.approx(0.55)),
        Acceptance("T = 0.6, top-p 0.9", 0.4),
    )
    assert acceptances_of({"settings": settings[:1]}) == (Acceptance("greedy", 0.3),)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"settings": None},
        {"settings": 7},
        {"settings": [None, 1, "x", [], {}]},
        {"settings": [setting("distilled", 0.0, "much"), setting("distilled", 0.0, 1.5)]},
        {"settings": [setting("distilled", 0.0, float("nan"))]},
        {"settings": [setting("distilled", 0.0, 10**400)]},
        {"settings": [{**setting("distilled", 0.0, 0.5), "metrics": {"alpha_empirical": []}}]},
    ],
)
def test_a_strangers_metrics_are_passed_over(metrics: dict[str, Any]) -> None:
    assert acceptances_of(metrics) == ()


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_one_row_of_an_embedding_of_its_own(tmp_path: Path, tied: bool) -> None:
    """As the exporter counts in the same files; graphs and the text that GGUF holds come on top."""
    form = {"hidden": 256, "head_dim": 64, "intermediate": 576, "context": 64, "tied": tied}
    model = make_model_folder(tmp_path / "model", **form)  # type: ignore[arg-type]
    kinds = {name: OFFSET4 for name, tensor in read_tensors(model).items() if len(tensor.shape) == 2}
    export_onnx(model, tmp_path / "int4", "int4")
    export_mixed(model, tmp_path / "mixed", kinds, {})
    export_npu(model, tmp_path / "static")
    export_gguf(model, tmp_path / "q4_0.gguf", "q4_0")
    files = {
        "onnxruntime": {"int4": "int4", "mixed": "mixed"},
        "static": {"fp32": "static"},
        "llama.cpp": {"q4_0": "q4_0.gguf"},
    }
    shape = ModelShape.from_config(read_config(model))
    target = BundleModel("target", "test", asdict(shape), shape.parameters, files)
    manifest = Manifest(
        pair={}, default={}, cost_ratio={}, metrics={}, provenance={}, target=target, drafter=target,
        files=describe_files(tmp_path),
    )  # fmt: skip
    for engine, table in files.items():
        for precision, name in table.items():
            wanted = streamed_bytes(ExportedFile("target", engine, precision, tmp_path / name))
            found = doctor.streamed_bytes(manifest, engine, precision, fast=False, context=0)
            assert found == pytest.approx(wanted, rel=0.1), (engine, precision)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with GGUF files beside the ONNX ones, and an evaluation. Read-only."""
    folder = tmp_path_factory.mktemp("both")
    target = make_model_folder(folder / "target", hidden=256, head_dim=64, intermediate=576)
    drafter = disturbed(target, folder / "drafter", noise=0.07)
    settings = [setting("distilled", 0.0, 0.7), setting("distilled", 1.0, 0.6)]
    return exported_bundle(folder, target, drafter, prompts=PROMPTS, metrics={"settings": settings})


@pytest.mark.usefixtures("steady")
@pytest.mark.llamacpp
def test_a_run_on_both_engines(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    file = tmp_path / "doctor.json"
    command = ["doctor", str(both), "--seconds", "4", "--threads", "1", "--json", str(file)]
    assert main(command) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["chosen"]["costs"]["contexts"] == [32, 240]  # what a context of 256 leaves
    assert [len(row) for row in report["chosen"]["costs"]["verify_seconds"]] == [16, 16]
    ways = [(way["engine"], way["precision"], way["flash_attention"]) for way in report["others"]]
    assert sorted(ways) == [("llama.cpp", "q8_0", False), ("llama.cpp", "q8_0", True)]
    flash = {way["flash_attention"]: way["difference"] for way in report["others"]}
    assert flash[True]["largest"] == 0.0  # its blocks are single steps
    assert report["chosen"]["difference"]["flips"] == 0
    assert report["chosen"]["difference"]["positions"] > 50
    assert [row["where"] for row in report["acceptances"]] == ["greedy", "T = 1"]
    assert report["bandwidth"] > 1e8
    weights = 4 * open_manifest(both).target.parameters
    assert weights < report["streamed"] < 1.4 * weights  # and the cache of the context
    assert report["kept"] is False
    assert report["thread_counts"] == []  # the user chose one
    for words in ("break-even α", "Ways to run this bundle", "Next: edgespec chat", "measured now"):
        assert words in out

    assert main(command) == 0
    again = json.loads(file.read_text())
    assert again["kept"] is True
    assert again["chosen"]["costs"] == report["chosen"]["costs"]
    assert "kept from an earlier run" in capsys.readouterr().out
    assert main([*command, "--fresh"]) == 0
    assert json.loads(file.read_text())["kept"] is False

    kept = next((tmp_path / "home" / "costs").iterdir())
    kept.write_text(kept.read_text()[:100])
    assert main(command) == 0
    assert "is damaged and not used" in capsys.readouterr().out
    assert json.loads(file.read_text())["kept"] is False


@pytest.mark.usefixtures("steady")
def test_a_devices_bundle_is_measured_as_chat_runs_it(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    bundle = shutil.copytree(both, tmp_path / "home" / "ready" / "a-pair-0123" / "bundle")
    device = {"name": "raspberry-pi", "draft_length": None, "max_draft_length": 4, "context": 64}
    change_manifest(bundle, lambda value: value.update(device=device))
    given: dict[str, Any] = {"bundle": str(bundle), "engine": "onnxruntime", "threads": 1}
    found = doctor.examine(doctor.Options(**given, seconds=0.4, contexts=(16,)))
    assert found.asked == {"engine": "onnxruntime", "threads": 1}  # chat takes the context by itself
    assert found.bundle == "a-pair"  # what a person types
    with closing(open_pair(bundle, LoadOptions("onnxruntime", context=64, threads=1))) as pair:
        assert load_costs(pair, print) == found.chosen.costs


def test_an_engine_that_is_not_installed_is_left_out_with_a_note(
    both: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(engine_llamacpp, "_library", None)
    monkeypatch.setattr(doctor, "default_threads", lambda: 2)
    flags = ["--seconds", "0.2", "--contexts", "16", "--acceptance", "0.9", "--markdown"]
    assert main(["doctor", str(both), *flags]) == 0
    out = capsys.readouterr().out
    assert out.count("Note: llama.cpp is left out: ") == 1
    assert 'pip install "edgespec[llamacpp]"' in out
    assert "Ways to run" not in out
    rows = out[out.index("| threads |") :].splitlines()[2:4]
    assert [row.split()[1] for row in rows] == ["1", "2"]
    assert "as given, α = 0.90" in out
    assert main(["doctor", str(both), "--engine", "llama.cpp"]) == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.llamacpp
def test_the_chosen_attention_kernel_is_the_one_asked_for(both: Path, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    flags = ["--seconds", "0.3", "--contexts", "16", "--json", str(file), "--engine", "llama.cpp"]
    assert main(["doctor", str(both), *flags, "--threads", "1", "--no-flash-attention"]) == 0
    report = json.loads(file.read_text())
    assert report["chosen"]["flash_attention"] is False
    assert [(way["engine"], way["flash_attention"]) for way in report["others"]] == [
        ("onnxruntime", None),
        ("llama.cpp", True),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--acceptance", "1.5"], "acceptance is 1.5; it must be at most 1.0"),
        (["--seconds", "-1"], "seconds is -1.0; it must be at least 0.0"),
        (["--contexts", "0"], "contexts is 0; it must be at least 1"),
        (["--engine", "onnx"], "engine is 'onnx'; known: "),
        (["--precision", "q4"], "the bundle has no 'q4' pair"),
        (["--flash-attention"], "flash_attention is on, and onnxruntime has no such choice"),
        (["--freshly"], "did you mean '--fresh'"),
    ],
)
def test_bad_flags(both: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(both), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_an_altered_bundle_is_refused(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(both, tmp_path / "bundle")
    with open(tmp_path / "bundle" / "target" / "gguf" / "target-q8_0.gguf", "r+b") as stream:
        stream.write(b"GGML")
    assert main(["doctor", str(tmp_path / "bundle")]) == 2
    assert "was altered" in capsys.readouterr().err
