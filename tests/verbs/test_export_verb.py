"""edgespec export: two model folders or a build in, a device's bundle out; it resumes, and says what cannot be."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.manifest import open_manifest
from edgespec.core.options import from_mapping, shell_line
from edgespec.core.shapes import ModelShape
from edgespec.planning.costs import file_bytes, weight_bytes
from edgespec.planning.devices_fit import fit
from edgespec.planning.export_costs import passing_bytes
from edgespec.recipe import devices
from edgespec.recipe.devices import profile
from edgespec.recipe.read import RECIPE_FILE, dump_recipe, resolve
from edgespec.recipe.schema import ExportOptions, InferenceOptions, Recipe
from edgespec.recipe.targets import FoundTarget
from edgespec.shell.environment import API_KEY
from edgespec.stages.stage import STAGE_FILE
from edgespec.verbs import export as export_verb


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its drafter. Read-only."""
    root = tmp_path_factory.mktemp("models")
    target = make_model_folder(root / "target", context=256)
    return target, disturbed(target, root / "drafter", 0.07)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}]}
        for text in ("Hello", "What is a list?", "Count: 1 2 3")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def command(models: tuple[Path, Path], prompts: Path, out: Path, *more: str) -> list[str]:
    target, drafter = map(str, models)
    words = [
        *("export", "--target", target, "--drafter", drafter, "--out", str(out)),
        *("--prompts-file", str(prompts)),
    ]
    return [*words, "--verify-prompts", "2", *more]


@pytest.fixture(scope="module")
def exported(models: tuple[Path, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export for laptop-cpu-x86. Read-only."""
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(command(models, prompts, out, "--device", "laptop-cpu-x86")) == 0
    return out


def test_just_the_devices_files_and_its_settings(exported: Path) -> None:
    manifest = open_manifest(exported / "bundle")
    assert manifest.pairs() == [("onnxruntime", "int4"), ("onnxruntime", "int8")]
    checks = json.loads((exported / "verify" / "verify.json").read_text())["files"]
    words = {one["precision"]: one["answers"]["verdict"] for one in checks if one["role"] == "target"}
    assert words["int4"] == "changed"  # random weights in four bits
    assert words["int8"] != "changed"
    assert (manifest.default["engine"], manifest.default["precision"]) == ("onnxruntime", "int8")
    assert manifest.default["reason"].startswith(
        "not the first choice (the profile of laptop-cpu-x86); int8 keeps "
    )
    assert "changed and left out: int4" in manifest.default["reason"]
    card = (exported / "bundle" / "README.md").read_text()
    assert "changed and left out" in card
    assert "## The answers" in card
    assert "target onnxruntime int4 is another model" in card
    assert manifest.device == {
        "name": "laptop-cpu-x86",
        "draft_length": None,
        "max_draft_length": 8,
        "context": 256,
    }
    assert not list((exported / "bundle").rglob("*.gguf"))
    assert json.loads((exported / "verify" / "verify.json").read_text())["files"]
    assert "--device laptop-cpu-x86" in (exported / "command.txt").read_text()


def test_chat_opens_it(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *("generate", str(exported / "bundle"), "Hello", "--max-new-tokens", "4", "--draft-length", "2"),
        "--json",
    ]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["engine"], report["precision"]) == ("onnxruntime", "int8")
    assert report["options"]["context"] == 256


def test_it_resumes(
    exported: Path,
    models: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / "pack" / "stage.json").unlink()
    (out / "verify" / "stage.json").unlink()
    (out / "export" / "stage.json").unlink()
    shutil.rmtree(out / "export" / "drafter" / "onnx-int4")  # killed in the middle of the export
    target = out / "export" / "target" / "onnx-int4" / "model.onnx.data"
    before = target.stat().st_mtime_ns
    time.sleep(0.01)
    assert main(command(models, prompts, out, "--device", "laptop-cpu-x86")) == 0
    assert target.stat().st_mtime_ns == before
    assert open_manifest(out / "bundle").pairs() == [("onnxruntime", "int4"), ("onnxruntime", "int8")]
    capsys.readouterr()
    assert main(command(models, prompts, out, "--device", "laptop-cpu-x86")) == 0
    printed = capsys.readouterr().out
    assert printed.count("(done before)") == 4  # data, export, verify, pack
    assert printed.splitlines()[-1] == f"Next: edgespec chat {out / 'bundle'}"
    assert main(command(models, prompts, out, "--device", "raspberry-pi")) == 2
    assert "holds a build of another recipe" in capsys.readouterr().err


def test_what_cannot_fit_is_refused_before_anything_is_written(
    models: tuple[Path, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shapes = [ModelShape.from_config(json.loads((model / "config.json").read_text())) for model in models]
    pi = profile("raspberry-pi")
    needed = fit(pi, *shapes).needed
    for budget, code in ((needed - 1, 2), (needed, 0)):
        small = dataclasses.replace(pi, memory_gib=budget / 2**30)
        monkeypatch.setattr(devices, "profiles", lambda small=small: {"raspberry-pi": small})
        out = tmp_path / str(code)
        assert main(command(models, prompts, out, "--device", "raspberry-pi")) == code
        error = capsys.readouterr().err
        if code:
            assert "does not fit on raspberry-pi" in error
            assert "KV cache" in error
            assert "would fit: give --context " in error
            assert not (out / "export").exists()
            more = ("--device", "raspberry-pi", "--precisions", "q8_0")  # another recipe in the same folder
            assert main(command(models, prompts, out, *more)) == 2
            assert "does not fit on raspberry-pi" in capsys.readouterr().err


def test_too_little_room_on_the_disk(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape.from_config(json.loads((models[0] / "config.json").read_text()))
    needed = 2 * (file_bytes(shape, "onnxruntime", "fp32") + file_bytes(shape, "llama.cpp", "q8_0"))
    recipe = Recipe("x", export=ExportOptions(onnx=("fp32",), gguf=("q8_0",)))
    source = export_verb.Source(FoundTarget("x", models[0], ""), models[0], recipe)
    one = export_verb.Export(recipe, tmp_path, source=source, disk_cure="do this")
    checkpoint = weight_bytes(shape)
    for shared, copies in ((True, 0), (False, needed + checkpoint)):
        monkeypatch.setattr(export_verb, "shares_blocks", lambda place, shared=shared: shared)
        enough = needed + copies
        monkeypatch.setattr(export_verb, "free_disk", lambda place, enough=enough: enough)
        one._check_disk(shape, shape)
        monkeypatch.setattr(export_verb, "free_disk", lambda place, enough=enough: enough - 1)
        with pytest.raises(InputError, match=r"make room, or do this$"):
            one._check_disk(shape, shape)
    (tmp_path / "export").mkdir()  # a byte that an interrupted one has written
    (tmp_path / "export" / "half").write_bytes(b"x")
    one._check_disk(shape, shape)
    # what a file is made from is gone before the bundle's copies come
    more = needed + checkpoint + 1
    monkeypatch.setattr(one, "_passing", lambda *_: more)
    monkeypatch.setattr(export_verb, "free_disk", lambda place: needed + more - 1)
    one._check_disk(shape, shape)
    monkeypatch.setattr(export_verb, "free_disk", lambda place: needed + more - 2)
    with pytest.raises(InputError, match="what they are made from"):
        one._check_disk(shape, shape)


def test_only_files_that_are_not_there_need_what_they_are_made_from(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = resolve({"target": "x", "export": {"onnx": ["fp32"], "gguf": ["q4_k_m", "q4_0"]}}, {})
    source = export_verb.Source(FoundTarget("name", models[0], "source"), models[1], recipe)
    one = export_verb.Export(recipe, tmp_path, source=source)
    shapes = [ModelShape.from_config(json.loads((model / "config.json").read_text())) for model in models]
    counted = [passing_bytes(shape, "llama.cpp", "q4_k_m") for shape in shapes]
    for role, left in (("target", max(counted)), ("drafter", counted[1]), ("", 0)):
        assert one._passing(*shapes) == left
        if role:
            file = tmp_path / "export" / role / "gguf" / f"{role}-q4_k_m.gguf"
            file.parent.mkdir(parents=True)
            file.touch()


def chosen(**given: object) -> dict[str, list[str]]:
    options = from_mapping(export_verb.Options, given)
    return {
        name: value for name, value in export_verb.choose_files(options, ExportOptions()).items() if value
    }


def test_which_files_are_written() -> None:
    assert chosen() == {"onnx": ["fp32", "int4"], "gguf": ["f16", "q8_0"]}
    assert chosen(formats="gguf") == {"gguf": ["f16", "q8_0"]}
    assert chosen(precisions="int4,q4_0") == {"onnx": ["int4"], "gguf": ["q4_0"]}
    assert chosen(precisions="fp32") == {"onnx": ["fp32"]}
    assert chosen(precisions="fp32", formats="npu") == {"npu": ["fp32"]}
    assert chosen(device="raspberry-pi") == {"gguf": ["q4_0", "q8_0"]}
    assert chosen(device="raspberry-pi", precisions="q8_0") == {"gguf": ["q8_0"]}
    assert chosen(device="intel-npu") == {"npu": ["qdq16"]}
    with pytest.raises(InputError, match=r"'q4_0' is of none of onnx"):
        chosen(precisions="q4_0", formats="onnx")
    with pytest.raises(InputError, match="known: bf16, f16, f32, fp16, fp32, int4, "):  # each once
        chosen(precisions="zz")
    for given, words in (
        ({"device": "raspberry-pi", "formats": "onnx"}, "raspberry-pi has no files in onnx"),
        ({"build": "b", "formats": "npu"}, "b has no files in npu"),
        ({"formats": "npu"}, "an export without --device has no files in npu"),
    ):
        with pytest.raises(InputError, match=f"nothing is to be written: {words}"):
            chosen(**given)


def test_bad_input(models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = map(str, models)
    out = ["--out", str(tmp_path / "out")]
    for words, part in (
        (["--target", target], "both --target and --drafter"),
        ([str(tmp_path), "--target", target, "--drafter", drafter], "give either"),
        (["--target", target, "--drafter", str(tmp_path)], "no config.json"),
        ([str(tmp_path)], "no finished stage 'target'"),
        (["--target", target, "--drafter", drafter, "--device", "pi"], "unknown device"),
        (["--target", target, "--drafter", drafter, "--precisions", "q9"], "'q9'"),
    ):
        assert main(["export", *words, *out]) == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_build_whose_target_is_gone_says_what_to_give(tmp_path: Path) -> None:
    """As where the target's folder was moved, or the cache emptied."""
    build, gone = tmp_path / "a build", tmp_path / "gone"
    counts = {"name": "t", "folder": str(gone), "source": "local folder", "licence": ""}
    for stage in ("target", "distill"):
        write_json(build / stage / STAGE_FILE, {"counts": counts})
    (build / RECIPE_FILE).write_text(dump_recipe(Recipe(target=str(gone))))
    with pytest.raises(InputError) as error:
        export_verb.find_source(export_verb.Options(build=str(build)))
    assert f"the target's folder {gone} is gone" in str(error.value)
    drafter = build / "distill" / "model"
    command = shell_line("edgespec", "export", "--target", "TARGET", "--drafter", drafter)
    assert str(error.value).endswith(command)


def test_an_npus_graphs(models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    """Float graphs: integers need rows longer than these prompts."""
    more = ("--device", "intel-npu", "--precisions", "fp32", "--formats", "npu", "--context", "128")
    assert main(command(models, prompts, tmp_path / "out", *more)) == 0
    manifest = open_manifest(tmp_path / "out" / "bundle")
    assert manifest.pairs() == [("static", "fp32")]
    assert manifest.device == {"name": "intel-npu", "draft_length": 3, "max_draft_length": 8, "context": 128}
    settings = json.loads(
        (tmp_path / "out" / "bundle" / "target" / "static-fp32" / "static.json").read_text()
    )
    assert (settings["length"], settings["blocks"]["verify"]) == (128, 4)


def test_a_build_is_exported_for_another_device(small_build: Path, tmp_path: Path) -> None:
    build = small_build / "out"
    out = tmp_path / "out"
    assert main(["export", str(build), "--device", "raspberry-pi", "--out", str(out)]) == 0
    manifest = open_manifest(out / "bundle")
    assert manifest.pairs() == [("llama.cpp", "q4_0"), ("llama.cpp", "q8_0")]
    assert manifest.metrics["settings"] == open_manifest(build / "bundle").metrics["settings"]
    assert manifest.target.name == open_manifest(build / "bundle").target.name


def test_a_builds_own_budget_holds_where_no_flag_names_another(models: tuple[Path, Path]) -> None:
    recipe = Recipe("x", export=ExportOptions(gguf=("q_mixed",), bits=5.5, verify_prompts=7))
    source = export_verb.Source(FoundTarget("x", models[0], ""), models[1], recipe)
    options = export_verb.Options(build="x")
    kept = export_verb.export_recipe(options, source).export
    assert (kept.gguf, kept.bits, kept.verify_prompts) == (("q_mixed",), 5.5, 7)
    asked = export_verb.export_recipe(dataclasses.replace(options, bits=4.5), source, {"bits": 4.5}).export
    assert (asked.bits, asked.verify_prompts) == (4.5, 7)


@pytest.mark.parametrize("shard", [None, ""])
def test_a_key_goes_to_no_server_that_a_builds_recipe_names(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str | None
) -> None:
    """A build may be a stranger's. Its responses, where there are some, need no server."""
    asked = []
    monkeypatch.setattr("edgespec_recipes.generating.datagen.generate", lambda *given: asked.append(given))
    recipe = Recipe("x", inference=InferenceOptions(source="server", url="http://127.0.0.1:9"))
    responses = tmp_path / "generate"
    responses.mkdir()
    if shard is not None:
        (responses / "shard-00000.jsonl").write_text(shard)
    source = export_verb.Source(FoundTarget("x", models[0], ""), models[1], recipe, responses=responses)
    one = export_verb.Export(recipe, tmp_path / "out", source=source)
    monkeypatch.setenv(API_KEY, "secret")
    with pytest.raises(InputError, match=rf"'http://127.0.0.1:9', which .*unset {API_KEY}") as caught:
        one._calibration_texts()
    assert "secret" not in str(caught.value)
    assert not asked
    monkeypatch.delenv(API_KEY)
    assert one._calibration_texts() == []
    assert len(asked) == 1
    monkeypatch.setenv(API_KEY, "secret")
    (responses / "shard-00000.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    assert len(one._calibration_texts()) == 1
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("training", "tuned"),
    [
        (
            {
                "tune": {"steps": 1, "conversations": "a.jsonl"},
                "inference": {"source": "server", "url": "http://a"},
                "distill": {"target_side": "stored", "text_fraction": 0.0, "select_fraction": 0.5},
                "reference": {"steps": 0},
            },
            True,
        ),
        ({"pretrain": {"text": [""]}, "generate": {"instructions": ["self", ""]}}, False),
        (
            {
                "drafter": {"kind": "head", "size_fraction": 0.1, "init": "subclone"},
                "distill": {"keep_steps": 500},
            },
            False,
        ),
    ],
)
def test_a_build_of_what_is_refused_now_is_exported(
    models: tuple[Path, Path], tmp_path: Path, training: dict[str, object], tuned: bool
) -> None:
    """Its drafter is done; how it was trained is past."""
    for stage in ("target", "distill"):
        (tmp_path / stage).mkdir()
        counts = {"folder": str(models[0]), "name": "t", "source": "local folder"}
        (tmp_path / stage / "stage.json").write_text(json.dumps({"counts": counts}))
    for stage, model in zip(("tune", "distill"), models, strict=True):
        shutil.copytree(model, tmp_path / stage / "model")
    (tmp_path / "recipe.resolved.yaml").write_text(json.dumps({"target": "t", **training}))
    options = export_verb.Options(build=str(tmp_path), precisions=("int4",))
    source = export_verb.find_source(options)
    assert source.target.folder == (tmp_path / "tune" / "model" if tuned else models[0])
    assert export_verb.export_recipe(options, source).export.onnx == ("int4",)


def test_too_little_memory_is_said_before_a_file_is_written(
    models: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both numbers, and what helps; --force goes on."""
    monkeypatch.setattr("edgespec.planning.preflight.free_memory", lambda: 300 * 2**20)
    asked = command(models, prompts, tmp_path / "out", "--precisions", "q8_0")
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert "export needs 4" in error
    assert "verify needs 4" in error
    assert "of memory and 300 MiB are free on this machine" in error
    assert "Try fewer precisions, a larger machine" in error
    assert not (tmp_path / "out" / "export").exists()
    assert main([*asked, "--force"]) == 0
    assert main(asked) == 0  # nothing is left to do that takes memory
