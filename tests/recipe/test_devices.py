"""Device profiles: what they name exists, what they say fits is what files and engines take, and chat follows them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.verify.exported_pair import FLOAT
from edgespec_runtime.pair.device_defaults import (
    LENGTHS,
    named_manifest,
    with_bench_defaults,
    with_device_defaults,
)

from edgespec.building.pipeline_export import ExportStages
from edgespec.cli import main
from edgespec.core.errors import BundleError, InputError
from edgespec.core.manifest import MANIFEST, open_manifest
from edgespec.core.options import to_mapping
from edgespec.planning import costs, devices_fit
from edgespec.planning.devices_fit import CACHE_VALUE
from edgespec.recipe.devices import ENGINES, FORMAT_OF, STATIC, Profile, device_of, profile, profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.precisions import PRECISIONS, READ_BY
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import DrafterOptions, ExportOptions, Recipe
from edgespec.recipe.targets import TARGETS, shape_of_target
from edgespec.stages.own_gguf import OwnFile

NAMES = {
    "laptop-cpu-x86", "laptop-cpu-arm", "apple-silicon", "intel-npu", "qualcomm-npu", "amd-npu", "raspberry-pi",
}  # fmt: skip
LLAMA = TARGETS["llama-2-7b-chat"].shape
TINYLLAMA = TARGETS["tinyllama-1.1b-chat"].shape
assert LLAMA is not None
assert TINYLLAMA is not None
DRAFTER = derive(LLAMA, DrafterOptions())


def test_every_profile_is_whole() -> None:
    assert set(profiles()) == NAMES
    for one in profiles().values():
        recipe = resolve({}, {"target": "t", "device": one.name})
        assert device_of(recipe) == one
        assert one.target == one.drafter  # the runtime opens a pair in one precision
        assert one.target in getattr(one, FORMAT_OF[one.engine])
        assert (one.engine == STATIC) == bool(one.compiler and one.draft_length)
        assert {name: list(getattr(recipe.export, name)) for name in ("onnx", "gguf", "npu")} == {
            name: list(getattr(one, name)) for name in ("onnx", "gguf", "npu")
        }
        if one.engine == STATIC:
            assert "not run on the NPU" in one.ran
            assert (recipe.export.npu_length, recipe.export.npu_gamma) == (one.context, one.draft_length)
    assert [one.name for one in profiles().values() if one.ran.startswith("run ")] == ["laptop-cpu-x86"]


def test_every_engine_and_format_is_in_every_table() -> None:
    """Where one is missing, a table may say nothing: an engine without FLOAT is never measured."""
    assert set(ENGINES) == set(FORMAT_OF) == set(CACHE_VALUE) == set(FLOAT)
    assert set(PRECISIONS) == set(READ_BY) == set(FORMAT_OF.values())
    for options in (ExportOptions, Profile):
        assert set(PRECISIONS) <= {field.name for field in dataclasses.fields(options)}


def test_list_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "devices.json"
    assert main(["plan", "--devices", "--json", str(file)]) == 0
    assert {row["name"] for row in json.loads(file.read_text())} == NAMES
    assert {line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()} >= NAMES
    assert main(["plan", "--devices", "--target", "llama-2-7b-chat"]) == 0
    rows = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["raspberry-pi"] == "yes"
    assert rows["intel-npu"] == "no"
    for name in NAMES:
        assert main(["plan", "--devices", "--device", name]) == 0
        shown = capsys.readouterr().out
        one = profile(name)
        assert one.ran in shown
        assert one.policy in shown
        assert f"{one.memory_gib:g} GiB" in shown
    assert main(["plan", "--devices", "--device", "raspberry-pi", "--target", "llama-2-13b-chat"]) == 0
    assert (
        "It does not fit; the weights alone are too large: choose a smaller precision with build-drafter's --export.gguf or "
        "export's --precisions, a smaller target"
    ) in capsys.readouterr().out
    assert main(["plan", "--devices", "--device", "apple-silicon", "--target", "llama-2-13b-chat"]) == 0
    assert "give build-drafter's --export.context or export's --context 2412" in capsys.readouterr().out
    assert main(["plan", "--devices", "--device", "raspberry"]) == 2
    assert "did you mean 'raspberry-pi'" in capsys.readouterr().err


def test_a_flag_goes_before_the_device_and_the_device_before_the_recipe() -> None:
    file = {"target": "t", "export": {"onnx": ["fp32"], "gguf": ["f16"]}}
    assert resolve(file, {}).export.onnx == ("fp32",)
    plain = resolve(file, {"device": "raspberry-pi"}).export
    assert (plain.onnx, plain.gguf) == ((), ("q4_0", "q8_0"))
    flagged = resolve(file, {"device": "raspberry-pi", "export": {"gguf": "q8_0"}})
    assert flagged.export.gguf == ("q8_0",)
    chosen = device_of(flagged)
    assert chosen is not None
    assert (chosen.target, chosen.drafter) == ("q8_0", "q8_0")
    own = resolve({**file, "device": "raspberry-pi"}, {}).export
    assert (own.onnx, own.gguf) == (("fp32",), ("f16",))
    dumped = to_mapping(resolve(file, {"device": "raspberry-pi"}))
    assert to_mapping(resolve(dumped, {})) == dumped  # a build that goes on has the same recipe


def test_a_context_that_is_asked_for_is_that_of_static_graphs() -> None:
    asked: dict[str, Any] = {"device": "intel-npu", "export": {"context": 512}}
    device = {"device": "intel-npu"}
    for file, flags in (({}, asked), (asked, {}), (device, {"export": {"context": "512"}})):
        recipe = resolve({"target": "t", **file}, flags)
        chosen = device_of(recipe)
        assert chosen is not None
        assert (recipe.export.npu_length, chosen.context) == (512, 512)
    assert resolve({"target": "t", "export": {"context": 4096}}, device).export.npu_length == 4096
    asked["export"]["npu_length"] = 256
    assert resolve({"target": "t", **asked}, {}).export.npu_length == 256


def test_static_graphs_that_are_left_out_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = {"target": "tinyllama-1.1b-chat", "device": "intel-npu", "export": {"npu": "qdq8,fp32"}}
    stages = ExportStages(resolve({}, flags), tmp_path)
    stages._drop_files_too_large(TINYLLAMA, derive(TINYLLAMA, DrafterOptions()), "tinyllama-1.1b-chat")
    assert stages.recipe.export.npu == ("qdq8",)
    assert "Note: intel-npu has no memory for fp32; not written" in capsys.readouterr().out


def test_a_device_without_its_files_is_refused() -> None:
    recipe = resolve({"target": "t"}, {"device": "raspberry-pi", "export": {"gguf": "", "onnx": "int4"}})
    with pytest.raises(InputError, match=r"raspberry-pi runs llama.cpp, and no gguf file"):
        device_of(recipe)
    with pytest.raises(InputError, match=r"did you mean 'intel-npu'"):
        resolve({"target": "t"}, {"device": "intel-npo"})


def test_weights_are_as_large_as_the_files_of_published_shapes() -> None:
    from edgespec_export.synthetic import gguf_file as synthetic_gguf

    for name in ("llama-2-7b-chat", "tinyllama-1.1b-chat", "smollm2-360m-instruct", "qwen2.5-7b-instruct"):
        shape = TARGETS[name].shape
        assert shape is not None
        for precision in ("f16", "q8_0"):
            said = costs.file_bytes(shape, "llama.cpp", precision)
            assert said == pytest.approx(synthetic_gguf.planned_bytes(shape, precision), rel=1e-3)


def test_the_arithmetic_of_llama_on_a_raspberry_pi() -> None:
    """By hand: 32 layers x 32 heads x 128 x key and value x F16 = 512 KiB a token; Q4_0 is 18 bytes for 32 weights."""
    found = devices_fit.fit(profile("raspberry-pi"), LLAMA, DRAFTER)
    parts = {part.what: part.bytes for part in found.parts}
    assert parts["target's KV cache"] == 1024 * 512 * 1024
    head = 32000 * 4096
    q4_0 = (LLAMA.parameters - head) * 18 / 32 + head * 34 / 32
    assert parts["target's weights"] == pytest.approx(1.1 * q4_0, rel=1e-6)
    assert found.needed == sum(parts.values())
    assert found.fits
    for part in found.parts:
        assert part.how in found.table()


def test_what_does_not_fit_is_refused_with_every_number() -> None:
    x86 = profile("laptop-cpu-x86")
    long = devices_fit.fit(dataclasses.replace(x86, context=4096), LLAMA, DRAFTER)
    with pytest.raises(InputError) as refused:
        devices_fit.check_fit(long, "llama-2-7b-chat")
    text = str(refused.value)
    for part in long.parts:
        assert part.how in text
    room = long.longest_context
    assert f"give --export.context {room}" in text
    with pytest.raises(InputError, match=f"give --context {room}$"):
        devices_fit.check_fit(long, "llama-2-7b-chat", ("--context", "--precisions"))
    assert devices_fit.fit(dataclasses.replace(x86, context=room), LLAMA, DRAFTER).fits
    assert not devices_fit.fit(dataclasses.replace(x86, context=room + 1), LLAMA, DRAFTER).fits
    small = dataclasses.replace(x86, memory_gib=2)
    with pytest.raises(
        InputError, match=r"alone are too large: choose a smaller precision with --export\.onnx"
    ):
        devices_fit.check_fit(devices_fit.fit(small, LLAMA, DRAFTER), "llama-2-7b-chat")


def test_files_that_a_device_has_no_memory_for_are_left_out() -> None:
    """Llama-2-7B: Q8_0 does not fit into a Raspberry Pi's 5 GiB, nor int8, which exact mode widens, into a laptop's 8."""
    recipe = resolve({"target": "llama-2-7b-chat"}, {"device": "raspberry-pi"})
    assert recipe.export.gguf == ("q4_0", "q8_0")
    assert devices_fit.fitting(recipe, LLAMA, DRAFTER).export.gguf == ("q4_0",)
    assert devices_fit.fitting(recipe, DRAFTER, DRAFTER).export.gguf == ("q4_0", "q8_0")
    laptop = resolve({"target": "llama-2-7b-chat"}, {"device": "laptop-cpu-x86"})
    assert devices_fit.fitting(laptop, LLAMA, DRAFTER).export.onnx == ("int4",)
    nowhere = resolve({"target": "llama-2-7b-chat"}, {})
    assert devices_fit.fitting(nowhere, LLAMA, DRAFTER) is nowhere


def test_a_targets_own_file_is_counted_as_it_is(tmp_path: Path) -> None:
    """Llama-2-7B as Q8_0: a Raspberry Pi has no room for it, whatever precision the drafter is written in."""
    own = OwnFile(tmp_path / "own.gguf", "", costs.file_bytes(LLAMA, "llama.cpp", "q8_0"), "q8_0")
    found = devices_fit.fit(profile("raspberry-pi"), LLAMA, DRAFTER, own.bytes)
    parts = {part.what: part.bytes for part in found.parts}
    assert parts["target's weights"] == round(1.1 * own.bytes)
    assert parts["drafter's weights"] == round(1.1 * costs.file_bytes(DRAFTER, "llama.cpp", "q8_0"))
    recipe = resolve({"target": "llama-2-7b-chat"}, {"device": "raspberry-pi"})
    with pytest.raises(InputError, match=r"its own GGUF file of 6\.67 GiB.* a smaller file of the target, "):
        ExportStages(recipe, tmp_path)._drop_files_too_large(LLAMA, DRAFTER, "own.gguf", own)
    assert devices_fit.fitting(recipe, LLAMA, DRAFTER, own.bytes) is recipe
    laptop = profile("laptop-cpu-x86")  # its files are made from the weights
    assert devices_fit.fit(laptop, LLAMA, DRAFTER, own.bytes) == devices_fit.fit(laptop, LLAMA, DRAFTER)


def test_float16_weights_count_as_what_the_engine_makes_of_them() -> None:
    half, whole = (
        devices_fit.fit(profile("laptop-cpu-x86").writing(ExportOptions(onnx=(one,))), LLAMA, DRAFTER)
        for one in ("fp16", "fp32")
    )
    assert (half.needed, half.streamed) == (whole.needed, whole.streamed)


def test_int8_weights_that_a_token_reads_are_those_of_the_fast_mode() -> None:
    """Exact mode widens them to floats, and reads nearly four times as much."""
    laptop = profile("laptop-cpu-x86")
    for name in ("int8", "int4"):
        found = devices_fit.fit(laptop.writing(ExportOptions(onnx=(name,))), TINYLLAMA, DRAFTER)
        assert ("B in fast mode: at 89.6 GB/s" in found.table()) == (name == "int8")


def test_a_large_output_head_is_there_twice_while_it_is_loaded() -> None:
    """The peaks of SmolLM2-135M that were seen; its drafter that is a head is int8 beside every file."""
    target = shape_of_target("smollm2-135m-instruct")
    head = derive(target, DrafterOptions(kind="head", layers=1, vocabulary=8192))
    laptop = profile("laptop-cpu-x86")
    drafters = set()
    for name, seen in {"int8": 634, "fp16": 750, "fp32": 741}.items():
        weights, of_head, *_ = devices_fit.fit(
            laptop.writing(ExportOptions(onnx=(name,))), target, head
        ).parts
        assert weights.bytes / 2**20 == pytest.approx(seen, rel=0.03)
        assert "the output head again" in weights.how
        drafters.add(of_head.bytes)
    assert len(drafters) == 1


def with_device(bundle: Path, folder: Path, **device: object) -> Path:
    """The bundle's manifest with a device, without its files' content."""
    folder.mkdir()
    for path in bundle.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            place = folder / path.relative_to(bundle)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.hardlink_to(path)
    manifest = json.loads((bundle / MANIFEST).read_text()) | {"device": device}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def for_reply(given: dict[str, Any]) -> dict[str, Any]:
    return with_device_defaults(given, named_manifest(given))


def for_bench(given: dict[str, Any]) -> dict[str, Any]:
    return with_bench_defaults(given, named_manifest(given))


def test_chat_and_bench_take_the_device_of_the_bundle_as_default(bundle: Path, tmp_path: Path) -> None:
    device = {"draft_length": 3, "max_draft_length": 8, "context": 64}
    fixed = str(with_device(bundle, tmp_path / "npu", name="intel-npu", **device))
    assert for_reply({"bundle": fixed}) == {"bundle": fixed, **device}
    assert for_reply({"bundle": fixed, "draft_length": 5, "context": 32})["draft_length"] == 5
    assert "draft_length" not in for_reply({"bundle": fixed, "rule": "bild"})
    assert for_bench({"bundle": fixed})["draft_lengths"] == [3]
    assert for_bench({"bundle": fixed})["choose"] is False
    assert for_bench({"bundle": fixed, "draft_lengths": "1,2"})["draft_lengths"] == "1,2"
    free = {"draft_length": None, "max_draft_length": 4, "context": 64}
    chosen = str(with_device(bundle, tmp_path / "pi", name="raspberry-pi", **free))
    assert for_bench({"bundle": chosen})["draft_lengths"] == [length for length in LENGTHS if length <= 4]
    assert "choose" not in for_bench({"bundle": chosen})
    assert for_reply({"bundle": str(bundle)}) == {"bundle": str(bundle)}


def test_bench_runs_with_them(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"draft_length": 2, "max_draft_length": 8, "context": 64}
    fixed = with_device(bundle, tmp_path / "npu", name="intel-npu", **device)
    out = tmp_path / "bench.json"
    assert main(["bench", str(fixed), "--max-prompts", "3", "--max-new-tokens", "8", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["options"]["context"] == 64
    assert {run["draft_length"] for run in found["runs"]} == {0, 2}


@pytest.mark.parametrize(
    "device",
    [
        {"draft_length": 3},
        {"name": "x", "draft_length": 0},
        {"name": "x", "max_draft_length": 10**9},
        {"name": "x", "context": "long"},
        {"name": "x", "context": True},
    ],
)
def test_a_strangers_device_is_checked(bundle: Path, tmp_path: Path, device: dict[str, object]) -> None:
    folder = with_device(bundle, tmp_path / "odd", **device)
    with pytest.raises(BundleError, match=MANIFEST):
        open_manifest(folder, hashes=False)


def test_a_plan_says_what_the_pair_takes_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--target", "tinyllama-1.1b-chat", "--gpus", "1xH100", "--device"]
    assert main([*given, "raspberry-pi"]) == 0
    found = devices_fit.fit(profile("raspberry-pi"), TINYLLAMA, derive(TINYLLAMA, DrafterOptions()))
    assert found.text() in capsys.readouterr().out
    assert main([*given, "pi"]) == 2
    assert "unknown device 'pi'" in capsys.readouterr().err


def test_build_drafter_records_the_device_in_its_recipe() -> None:
    assert Recipe(target="t").device == ""
    assert resolve({}, {"target": "t", "device": "amd-npu"}).export.npu == ("qdq8",)
