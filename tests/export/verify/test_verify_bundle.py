"""`edgespec verify`: a good bundle passes with tables, every damage is exit code 1 with the row that names it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_bundle import change_manifest, settle
from changed_gguf import changed, in_place
from edgespec_export.verify.files import files_of
from edgespec_export.verify.readback import gguf_settings, gguf_weights
from gguf import GGUFReader
from repository import REPOSITORY

from edgespec.cli import main
from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json, write_json
from edgespec.core.manifest import open_manifest
from edgespec.model_folder.check import shape_in

GGUF = "target/gguf/target-q8_0.gguf"
QUICK = ("--acceptance-prompts", "0")


@pytest.fixture(scope="module")
def models(both: Path) -> str:
    """Target and drafter of the bundle `both`, as --models takes them."""
    return f"{both.parent / 'target'},{both.parent / 'drafter'}"


@pytest.fixture
def copy(both: Path, tmp_path: Path) -> Path:
    shutil.copytree(both, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.llamacpp
def test_a_good_bundle(both: Path, models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json = tmp_path / "verify.json"
    assert main(["verify", str(both), "--models", models, "--max-new-tokens", "8", "--json", str(json)]) == 0
    text = capsys.readouterr().out
    assert "files have the size and sha256 that the manifest gives" in text
    words = ("leak", "KL", "top-1", "perplexity", "other ids", "α teacher-forced")
    for word in (*words, "llama.cpp q8_0: both quantised"):
        assert word in text
    assert "BROKEN" not in text
    assert "Not checked" not in text
    found = read_json(json)
    assert found["broken"] == found["manifest"] == found["skipped"] == []
    [exact] = [one for one in found["files"] if (one["role"], one["precision"]) == ("target", "fp32")]
    assert exact["checked_with"] == "onnxruntime"
    assert 0 <= exact["kl"] < 1e-8
    assert exact["top1"] == 1.0
    assert exact["perplexity"] == pytest.approx(exact["torch_perplexity"], rel=1e-5)
    assert exact["block_leak"] < 1e-5
    rounded = next(check for check in found["files"] if check["precision"] == "q8_0")
    assert rounded["kl"] > 100 * max(exact["kl"], 1e-12)
    assert len(found["tokenizers"]) == 5
    assert [run["cause"] for run in found["acceptance"]] == ["float pair"] * 2 + ["both quantised"] * 2


@pytest.mark.llamacpp
def test_without_the_models_and_without_torch(both: Path, tmp_path: Path) -> None:
    """In a process where torch cannot be imported: what can be known is checked, and the rest is said."""
    program = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\nfrom edgespec.cli import main\n"
        f"raise SystemExit(main(['verify', {str(both)!r}, '--acceptance-prompts', '0', '--json', {str(tmp_path / 'v.json')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "Not checked, because no model folders were given" in done.stdout
    assert "--models TARGET_FOLDER,DRAFTER_FOLDER" in done.stdout
    found = read_json(tmp_path / "v.json")
    assert found["models"] is None
    assert [check["weights_relative"] for check in found["files"]] == [None] * 4
    assert all(check["block_flips"] == 0 for check in found["files"])
    assert next(check for check in found["files"] if check["precision"] == "q8_0")["kl"] > 0
    assert len(found["tokenizers"]) == 5


def test_the_models_of_a_build_are_found(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    shutil.copytree(both, build / "bundle")
    shutil.copytree(both.parent / "drafter", build / "distill" / "model")
    (build / "target").mkdir()
    write_json(build / "target" / "stage.json", {"counts": {"folder": str(both.parent / "target")}})
    json = tmp_path / "v.json"
    assert main(["verify", str(build / "bundle"), *QUICK, "--json", str(json)]) == 0
    assert read_json(json)["models"]["drafter"] == str(build / "distill" / "model")
    assert "Not checked" not in capsys.readouterr().out


@pytest.mark.llamacpp
def test_a_file_is_judged_by_what_it_is_and_not_by_its_pairs_name(
    copy: Path, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Q8_0 drafter beside an F16 target is listed as f16: by that name's bounds its weights would be far off."""

    def rename(manifest: dict[str, Any]) -> None:
        for role in ("target", "drafter"):
            files = manifest[role]["files"]["llama.cpp"]
            files["f16"] = files.pop("q8_0")

    change_manifest(copy, rename)
    assert main(["verify", str(copy), "--models", models, *QUICK]) == 0, capsys.readouterr()


def gguf_value(key: str, value: float) -> Callable[[Path], None]:
    def alter(bundle: Path) -> None:
        with in_place(bundle / GGUF, key) as values:
            values[0][0] = value
        settle(bundle, GGUF)

    return alter


def exchanged(first: str, second: str) -> Callable[[Path], None]:
    """Two tensors of a GGUF file with each other's values."""

    def alter(bundle: Path) -> None:
        reader = GGUFReader(bundle / GGUF, "r+")
        a, b = (next(one for one in reader.tensors if one.name == name).data for name in (first, second))
        kept = np.array(a)
        a[:], b[:] = b, kept
        reader.data.flush()
        settle(bundle, GGUF)

    return alter


def onnx_weights_moved(bundle: Path) -> None:
    """A gate and an up projection of the drafter's graph with each other's names."""
    import onnx

    name = "drafter/onnx-fp32/model.onnx"
    graph = onnx.load(bundle / name, load_external_data=False)
    tensors = {one.name: one for one in graph.graph.initializer}
    gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.MatMul.weight"] for part in ("gate", "up"))
    gate.name, up.name = up.name, gate.name
    onnx.save(graph, bundle / name)
    settle(bundle, name)


def template(bundle: Path) -> None:
    file = bundle / "tokenizer" / "chat_template.jinja"
    file.write_text(file.read_text().replace("\\n", " "))
    settle(bundle, "tokenizer/chat_template.jinja")


def stop_id(bundle: Path) -> None:
    name = "tokenizer/generation_config.json"
    write_json(bundle / name, read_json(bundle / name) | {"eos_token_id": 1})
    settle(bundle, name)


def library_named(bundle: Path) -> None:
    """Of the settings with which onnxruntime-genai runs the target alone."""
    name = "target/onnx-fp32/genai_config.json"
    settings = read_json(bundle / name)
    settings["model"]["decoder"]["session_options"]["custom_ops_library"] = "model.onnx.data"
    write_json(bundle / name, settings)
    settle(bundle, name)


# what is damaged -> (how, in which words it is named)
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "GGUF: RoPE base": (gguf_value("llama.rope.freq_base", 100.0), "target q8_0: .*rope.freq_base is 100"),
    "GGUF: eos": (gguf_value("tokenizer.ggml.eos_token_id", 1), "target llama.cpp q8_0 tokenizer: eos_token_id is 1"),
    "GGUF: gate and up": (
        exchanged("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"), "target q8_0: weights difference",
    ),
    "ONNX: gate and up": (onnx_weights_moved, "drafter fp32: weights difference"),
    "chat template": (template, "tokenizer tokenizer: chat template writes"),
    "stop id": (stop_id, "tokenizer tokenizer: ids that end a reply are \\[1\\]"),
    "manifest: session options": (library_named, "manifest: .*genai_config.json has .* 'custom_ops_library'"),
    "manifest: vocabulary": (
        lambda bundle: change_manifest(bundle, lambda value: value["pair"].update(vocab_size=513)), "manifest: vocab_size is 513",
    ),
    "manifest: tokenizer": (
        lambda bundle: change_manifest(bundle, lambda value: value["pair"].update(tokenizer_sha256="0" * 64)),
        "manifest: tokenizer_sha256 is 000000000000...",
    ),
    "manifest: shape": (
        lambda bundle: change_manifest(bundle, lambda value: value["drafter"]["shape"].update(rope_theta=5.0)),
        "manifest: drafter: rope_theta is 5.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.llamacpp
def test_a_damaged_bundle(copy: Path, models: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, words = DAMAGES[name]
    damage(copy)
    assert main(["verify", str(copy), *QUICK, "--models", models]) == 1
    shown = capsys.readouterr()
    assert re.search(r"\b(1 bound is|\d+ bounds are) broken: ", shown.err)
    assert re.search(words, shown.err), shown.err
    assert ("BROKEN" in shown.out) is not name.startswith("manifest")
    assert main(["verify", str(copy), *QUICK]) == 1  # the files do not fit each other either


def test_settings_that_are_no_numbers_are_told(both: Path, tmp_path: Path) -> None:
    """A stranger's file may have a list, a text or nothing where a number is wanted, and no tokenizer."""
    file = changed(
        both / GGUF,
        tmp_path / "m.gguf",
        without=("llama.vocab_size", "tokenizer.ggml.tokens"),
        llama__attention__head_count_kv=[2, 2],
        llama__rope__freq_base="ten",
    )
    told = gguf_settings(file, shape_in(both.parent / "target" / "config.json"), usual=True)
    seen = ["attention.head_count_kv is a list", "rope.freq_base is 'ten'", "vocab_size is None"]
    assert [text.partition(" instead of ")[0] for text in told] == seen


def test_a_tensor_that_is_not_read_back(both: Path, tmp_path: Path) -> None:
    norm = {"output_norm.weight": np.ones(64, np.int8)}
    file = changed(both / GGUF, tmp_path / "m.gguf", tensors=norm)
    with pytest.raises(EdgespecError, match=r"m\.gguf has a tensor in I8, .* leave --models out"):
        list(gguf_weights(file, shape_in(both.parent / "target" / "config.json")))


@pytest.mark.parametrize("settings", [{}, []])
def test_a_folder_that_no_exporter_writes(
    copy: Path, models: str, settings: object, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "target/onnx-fp32/genai_config.json"
    write_json(copy / name, settings)
    settle(copy, name)
    assert main(["verify", str(copy), *QUICK, "--models", models]) == 2
    assert "target/onnx-fp32 cannot be read back" in capsys.readouterr().err


def test_an_altered_byte(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((copy / GGUF).read_bytes())
    data[-100] ^= 1
    (copy / GGUF).write_bytes(data)
    assert main(["verify", str(copy)]) == 1
    error = capsys.readouterr().err
    assert "was altered" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models", "one"), "--models has 1 folders; give two"),
        (("--models", "one,two"), "the target one has no config.json"),
        (("--prompts", "none.jsonl"), "none.jsonl"),
        (("--prompts", "~/none.jsonl"), f"{Path.home() / 'none.jsonl'} is missing"),
        (("--draft-length", "0"), "draft_length is 0"),
    ],
)
def test_bad_input(
    both: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["verify", str(both), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_files_that_this_edgespec_has_no_bounds_for_are_named(
    copy: Path, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(value: dict[str, dict[str, dict[str, dict[str, str]]]]) -> None:
        files = value["target"]["files"]["llama.cpp"]
        files["q9_x"] = files.pop("q8_0")

    change_manifest(copy, rename)
    assert main(["verify", str(copy), *QUICK, "--models", models]) == 0
    assert "Not checked, having no bounds here: target llama.cpp q9_x." in capsys.readouterr().out


def test_too_little_memory_for_the_models_in_torch(
    both: Path, models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle alone is checked all the same, and --force goes on."""
    monkeypatch.setattr("edgespec.planning.preflight.free_memory", lambda: 300 * 2**20)
    asked = ["verify", str(both), *QUICK, "--answer-replies", "0", "--verify-prompts", "1"]
    assert main([*asked, "--models", models]) == 2
    error = capsys.readouterr().err
    assert error.startswith("edgespec: verify needs 4")
    assert "300 MiB are free on this machine. Try fewer precisions, a larger machine" in error
    assert main([*asked, "--models", models, "--force"]) == 0


def test_what_a_mac_leaves_beside_a_graph_is_no_graph(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (folder / "target" / "onnx-fp32" / "._model.onnx").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    files, skipped = files_of(open_manifest(folder))
    assert [file.role for file in files] == ["target", "drafter"]
    assert not skipped
