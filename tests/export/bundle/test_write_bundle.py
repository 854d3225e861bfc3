"""Writing a bundle: what is in it, that the runtime opens it, and pairs that do not belong together."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export.bundle import write as write_file
from edgespec_export.bundle.default_choice import untimed_default
from edgespec_export.bundle.write import check_same_tokenizer, write_bundle
from edgespec_export.formats.export import ExportedFile, export_pair, exported_files, streamed_bytes
from edgespec_recipes.models.loading import load_model, load_tokenizer, save_model, stop_ids_of
from edgespec_recipes.models.vocabulary import choose_vocabulary, restrict
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.text.tokenizer import ChatTokenizer
from gguf import GGUFReader
from gguf_fields import gguf_field
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sha256_file, write_json
from edgespec.core.manifest import open_manifest
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import FoundTarget

CHAT = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def made(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    export_pair(root / "export", families["qwen3"], families["llama"], ExportOptions())
    return {"export": root / "export", "target": families["qwen3"], "drafter": families["llama"]}


def write(
    out: Path, made: dict[str, Path], options: ExportOptions | None = None, **change: Any
) -> dict[str, Any]:
    folders = made | change
    return write_bundle(
        out,
        folders["export"],
        FoundTarget("tiny", folders["target"], "someone/tiny"),
        folders["drafter"],
        options or ExportOptions(),
        prompts=[CHAT],
        evaluation={"tau": 2.0},
        verification={"files": []},
        metrics={"tau": 2.0},
        provenance={"seed": 0, "command": "edgespec build-drafter"},
    )


def check_pairs(bundle: Path) -> None:
    """Every pair opens, and both models speak the target's tokens."""
    for engine, precision in open_manifest(bundle).pairs():
        pair = open_pair(bundle, LoadOptions(engine=engine, precision=precision))
        assert pair.draft is not None
        assert pair.target.engine.vocab_size == pair.draft.engine.vocab_size == 512
        pair.close()


@pytest.mark.llamacpp
def test_a_bundle_is_whole_and_runs(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    counts = write(out, made)
    manifest = open_manifest(out)
    assert counts["files"] == len(manifest.files)
    assert counts["bytes"] == sum(
        path.stat().st_size for path in out.rglob("*") if path.name != "manifest.json" and path.is_file()
    )
    tokenizer = {path.name for path in (out / "tokenizer").iterdir()}
    assert tokenizer == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert manifest.pair["tokenizer_sha256"] == sha256_file(made["target"] / "tokenizer.json")
    assert manifest.pairs() == [(engine, precision) for engine, names in
        (("onnxruntime", ("fp32", "int4")), ("llama.cpp", ("f16", "q8_0"))) for precision in names]  # fmt: skip
    assert manifest.provenance["versions"]["onnxruntime-genai"]
    assert manifest.default["precision"] == "fp32"
    assert "small enough" in manifest.default["reason"]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: edgespec\n")
    assert "base_model: someone/tiny" in card
    assert "-md drafter/gguf/drafter-q8_0.gguf" in card
    text = "".join(path.read_text() for path in (out / "README.md", out / "manifest.json"))
    assert str(tmp_path) not in text  # nothing of this machine
    check_pairs(out)


def test_streamed_bytes_are_those_of_the_file(made: dict[str, Path], tmp_path: Path) -> None:
    """Untied: one row of the input embedding; tied: the table is the output head and is read whole."""
    write(tmp_path / "bundle", made)
    ratios = open_manifest(tmp_path / "bundle").cost_ratio["bytes"]
    assert ratios.pop("onnxruntime/int4/fast") == ratios["onnxruntime/int4"]  # packed in both graphs
    assert set(ratios) == {"onnxruntime/fp32", "onnxruntime/int4", "llama.cpp/f16", "llama.cpp/q8_0"}
    assert all(0 < ratio < 1.2 for ratio in ratios.values())
    for role in ("target", "drafter"):
        file = made["export"] / role / "gguf" / f"{role}-f16.gguf"
        tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
        skipped = 511 * 64 * 2 if role == "target" else 0  # F16 rows of 64
        assert streamed_bytes(ExportedFile(role, "llama.cpp", "f16", file)) == sum(tensors.values()) - skipped
        floats, packed = (
            streamed_bytes(ExportedFile(role, "onnxruntime", name, made["export"] / role / f"onnx-{name}"))
            for name in ("fp32", "int4")
        )
        assert packed < 0.2 * floats


def test_the_choice_of_default(made: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "a", made, ExportOptions(onnx=(), gguf=("f16", "q8_0")))
    default = open_manifest(tmp_path / "a").default
    assert (default["engine"], default["precision"]) == ("llama.cpp", "q8_0")
    write(tmp_path / "b", made, ExportOptions(onnx=("int4",), gguf=()))
    assert open_manifest(tmp_path / "b").default["precision"] == "int4"
    with pytest.raises(InputError, match=r"no precision at all"):
        write(tmp_path / "c", made, ExportOptions(onnx=(), gguf=()))


@pytest.mark.parametrize(
    ("onnx_files", "gguf_files", "chosen", "words"),
    [
        (["int4", "fp16"], ["q8_0"], "fp16", "the target is small enough to run in floats; fp16 keeps 95.0%"),
        (
            ["int8", "int4"],
            ["f16"],
            "int8",
            "the bundle has no float weights for ONNX Runtime; int8 keeps 95.0%",
        ),
        ([], ["f16", "q8_0"], "q8_0", "the bundle has GGUF files only"),
    ],
)
def test_of_a_small_target_the_most_exact_file(
    onnx_files: list[str], gguf_files: list[str], chosen: str, words: str
) -> None:
    """Though they all keep the answers."""
    kept = {"role": "target", "engine": "onnxruntime", "answers": {"top1": [0.95] * 3}}
    checks = [kept | {"precision": name} for name in onnx_files]
    both = {"onnxruntime": onnx_files, "llama.cpp": gguf_files}
    choice = untimed_default(ExportOptions(), True, None, [], both, {"files": checks})
    assert choice is not None
    assert choice["precision"] == chosen
    assert choice["reason"].startswith(words)


def test_pairs_that_do_not_belong_together(made: dict[str, Path], tmp_path: Path) -> None:
    small = make_model_folder(tmp_path / "small", vocab_size=480)
    with pytest.raises(
        InputError, match=r"token 480 is 'hi' in .* \(512 tokens\) and no token in .* \(480 tokens\)"
    ):
        write(tmp_path / "bundle", made, drafter=small)
    other = shutil.copytree(made["drafter"], tmp_path / "other")
    spec = read_json(other / "tokenizer.json")
    a, b = list(spec["model"]["vocab"])[300:302]
    vocab = spec["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    write_json(other / "tokenizer.json", spec)
    with pytest.raises(InputError, match=r"must have one tokenizer: token \d+ is "):
        write(tmp_path / "bundle", made, drafter=other)
    assert not (tmp_path / "bundle").exists()
    padded = shutil.copytree(made["drafter"], tmp_path / "padded")
    write_json(
        padded / "tokenizer.json",
        read_json(padded / "tokenizer.json") | {"truncation": None, "padding": None},
    )
    check_same_tokenizer(made["target"], padded)


@pytest.fixture(scope="module")
def subset(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter that knows the even tokens and token 3, exported: its end token is number 1."""
    root = tmp_path_factory.mktemp("subset")
    vocabulary = choose_vocabulary(1 - np.arange(512) % 2, (0, 2, 3), 257)
    drafter = restrict(load_model(families["mistral"]), vocabulary, np.zeros(512))
    save_model(drafter, families["mistral"], root / "drafter")
    export_pair(root / "export", families["qwen3"], root / "drafter", ExportOptions())
    return {"export": root / "export", "target": families["qwen3"], "drafter": root / "drafter"}


@pytest.mark.llamacpp
def test_a_drafter_with_a_vocabulary_of_its_own(subset: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    write(out, subset)
    manifest = open_manifest(out)
    assert manifest.drafter.vocabulary == "drafter/vocabulary.json"
    assert manifest.target.vocabulary is None
    assert manifest.pair["vocab_size"] == 512
    assert (out / "drafter" / "vocabulary.json").read_bytes() == (
        subset["drafter"] / "vocabulary.json"
    ).read_bytes()
    assert manifest.drafter.shape["vocab_size"] == 258
    assert not {"genai_config.json", "drafter/checkpoint/config.json"} & set(
        manifest.files
    )  # for no other engine
    assert manifest.cost_ratio["parameters"] == manifest.drafter.parameters / manifest.target.parameters
    card = (out / "README.md").read_text()
    assert "knows 257 of the target's 512 tokens" in card
    assert "do not pair with them there" in card
    assert "llama-server" not in card  # plain llama.cpp cannot run this pair
    check_pairs(out)
    write(tmp_path / "onnx", subset, ExportOptions(gguf=()))
    assert "llama.cpp" not in (tmp_path / "onnx" / "README.md").read_text()


def test_the_drafters_gguf_has_its_own_tokens(subset: dict[str, Path]) -> None:
    reader = GGUFReader(subset["export"] / "drafter" / "gguf" / "drafter-f16.gguf")
    tokens = gguf_field(reader, "tokenizer.ggml.tokens")
    spec = read_json(subset["drafter"] / "tokenizer.json")
    texts = {index: text for text, index in spec["model"]["vocab"].items()}
    ids = read_json(subset["drafter"] / "vocabulary.json")["ids"]
    assert tokens == [*(texts[index] for index in ids), "[OTHER]"]
    assert ids[:3] == [0, 2, 3]
    assert gguf_field(reader, "tokenizer.ggml.eos_token_id") == 1
    assert gguf_field(reader, "tokenizer.ggml.padding_token_id") == 2


def test_a_vocabulary_of_another_target(subset: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(subset["drafter"], tmp_path / "other")
    value = read_json(other / "vocabulary.json")
    for change, message in (
        ({"target_vocab_size": 600}, r"lists 257 of 600 tokens; the target has 512 and the drafter 258 rows"),
        ({"ids": value["ids"][:-1]}, r"lists 256 of 512 tokens; .* the drafter 258 rows instead of 257"),
        ({"ids": value["ids"][::-1]}, r"vocabulary\.json: ids\[1\] is 508 after 510"),
    ):
        write_json(other / "vocabulary.json", value | change)
        with pytest.raises(InputError, match=message):
            check_same_tokenizer(subset["target"], other)


def test_a_missing_export_leaves_nothing(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"onnx-fp32 is missing; run the export again"):
        write(tmp_path / "bundle", made, export=tmp_path / "nothing")
    assert not list(tmp_path.iterdir())


def test_onnx_reads_the_models_of_a_bundle(made: dict[str, Path], tmp_path: Path) -> None:
    """onnx >= 1.20 refuses a data file with several hard links as a "hardlink attack"."""
    out = tmp_path / "bundle"
    write(out, made)
    files = [file for file in out.rglob("*") if file.is_file()]
    assert {file.stat().st_nlink for file in files} == {1}
    graphs = sorted(out.rglob("onnx-fp32/model.onnx"))
    assert len(graphs) == 2
    for graph in graphs:
        loaded = onnx.load(graph)
        role = graph.parent.parent.name
        original = onnx.load(made["export"] / role / "onnx-fp32" / "model.onnx")
        assert loaded.SerializeToString() == original.SerializeToString()
    data = out / "target" / "onnx-fp32" / "model.onnx.data"
    assert not data.samefile(made["export"] / "target" / "onnx-fp32" / "model.onnx.data")


def test_a_bundle_has_the_default_template_and_known_ids(made: dict[str, Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(made["target"], tmp_path / "target"))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    settings = read_json(target / "tokenizer_config.json")
    settings["chat_template"] = [
        {"name": "default", "template": template},
        {"name": "tool_use", "template": ""},
    ]
    write_json(target / "tokenizer_config.json", settings)
    generation = read_json(target / "generation_config.json")
    write_json(
        target / "generation_config.json", generation | {"pad_token_id": 9999, "eos_token_id": [0, 9999]}
    )
    write(tmp_path / "bundle", made, target=target)
    tokenizer = tmp_path / "bundle" / "tokenizer"
    assert (tokenizer / "chat_template.jinja").read_text() == template
    assert read_json(tokenizer / "tokenizer_config.json")["chat_template"] == template
    written = read_json(tokenizer / "generation_config.json")
    assert (written["pad_token_id"], written["eos_token_id"]) == (None, [0, 2])  # 2 is the tokenizer's


def test_chat_stops_where_training_did(made: dict[str, Path], tmp_path: Path) -> None:
    """Also for a target that names its ends in config.json alone."""
    target = Path(shutil.copytree(made["target"], tmp_path / "target"))
    (target / "generation_config.json").unlink()
    write_json(target / "config.json", read_json(target / "config.json") | {"eos_token_id": [0, 2, 3]})
    write(tmp_path / "bundle", made, target=target)
    trained = stop_ids_of(target, load_tokenizer(target))
    assert ChatTokenizer(tmp_path / "bundle" / "tokenizer").stop_ids == {*trained} == {0, 2, 3}


def test_the_bits_of_a_mixed_file_are_told_without_its_note(tmp_path: Path) -> None:
    """An export that was cut behind the file, as by a reader of its pipe who left, goes on without the note."""
    options = ExportOptions(onnx=("fp32", "mixed"), gguf=("q_mixed",))
    choice = {"bits": 4.5, "kinds": {"lm_head.weight": "int8"}, "groups": {"lm_head": {"int8": 0.1}}}
    write_json(tmp_path / "target" / "onnx-mixed" / "bits.json", choice)
    write_json(tmp_path / "target" / "gguf" / "target-q_mixed.bits.json", choice)
    told = {name: value for name, value in choice.items() if name != "groups"}
    assert write_file._bits(exported_files(tmp_path, options), tmp_path) == {
        "bits": {"target/onnx-mixed": told, "target/gguf/target-q_mixed.gguf": told}
    }
    assert write_file._bits(exported_files(tmp_path, ExportOptions()), tmp_path) == {}


def test_c_is_that_of_the_graph_that_runs(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact graph reads int8 as float32, the fast one as it is stored; a drafter runs from the fast one in either mode."""
    options = ExportOptions(onnx=("int8",), gguf=())
    export_pair(tmp_path / "export", made["target"], made["drafter"], options)
    default = {"engine": "onnxruntime", "precision": "int8", "reason": "", "fast": "onnxruntime/int8"}
    monkeypatch.setattr(write_file, "untimed_default", lambda *_: default)
    out = tmp_path / "bundle"
    write(out, made, options, export=tmp_path / "export")
    target, drafter = (
        ExportedFile(role, "onnxruntime", "int8", tmp_path / "export" / role / "onnx-int8")
        for role in ("target", "drafter")
    )
    exact, fast, small = streamed_bytes(target), streamed_bytes(target, fast=True), streamed_bytes(drafter)
    assert 3 * fast < exact
    assert small == streamed_bytes(drafter, fast=True)
    told = {"onnxruntime/int8": small / exact, "onnxruntime/int8/fast": small / fast}
    assert open_manifest(out).cost_ratio["bytes"] == told
    for mode, ratio in zip(("exact", "fast", ""), [*told.values(), small / fast], strict=True):
        with closing(open_pair(out, LoadOptions(mode=mode, threads=1))) as pair:
            assert pair.cost_ratios["bytes"] == ratio
    rows = [line for line in (out / "README.md").read_text().splitlines() if "onnx-int8`" in line]
    assert [row.split()[-3] for row in rows] == [f"{size / 2**20:.2f}" for size in (fast, small)]
    genai = read_json(out / "genai_config.json")["model"]  # and onnxruntime-genai runs that graph
    assert genai["decoder"]["filename"] == "target/onnx-int8/model-fast.onnx"
