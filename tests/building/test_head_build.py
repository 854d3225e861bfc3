"""A drafter that is a head, from a target to a bundle, and what it decodes there."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.verify.bundle import Options, verify_bundle
from edgespec_recipes.models.feature_head import load_head
from edgespec_recipes.stored.written_states import WrittenRows
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import Options as ChatOptions
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, MODEL, DecodingOptions, plain
from edgespec_runtime.doctor import doctor
from edgespec_runtime.doctor.report import thread_table
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.heads.feature_engine import FeatureEngine
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.serving.api import Service
from pair_law import fit, law_of_pairs
from small_build import head_command, write_data
from tiny_models import make_model_folder

from edgespec.building.pair import check_pair, gguf_target
from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import copy_file, read_json, write_json, write_jsonl
from edgespec.core.manifest import HEAD, open_manifest
from edgespec.core.metrics import RawCounts
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import LAST, THREE, check_start, keep_in_bytes
from edgespec.recipe.schema import Recipe
from edgespec.stages.own_gguf import own_file
from edgespec.stages.training_facts import TRAINING, training_of
from edgespec.verbs import ready
from edgespec.verbs.export import Options as ExportOptions
from edgespec.verbs.export import find_source

pytestmark = [pytest.mark.llamacpp, pytest.mark.training]

PROMPT, NEW = [5, 9, 13, 5, 9], 40
CONTEXT = 40  # tokens, of a context that shifts
COLD = 0.3  # temperature at which the random target has few likely tokens
ERROR_RATE = 1e-4  # of one test with the seeds below


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    export_gguf(make_model_folder(folder / "source"), folder / "tiny.gguf", "q8_0")
    write_data(folder)
    assert main([*head_command(folder).split(), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_a_target_that_is_no_file_gives_its_states_in_torch(tmp_path: Path) -> None:
    target = make_model_folder(tmp_path / "source")
    write_data(tmp_path)
    given = head_command(tmp_path).replace(str(tmp_path / "tiny.gguf"), str(target))
    answered = [{"instruction": f"Say {n}", "response": "the sea " * (n % 3 + 1)} for n in range(9)]
    write_jsonl(tmp_path / "answered.jsonl", answered)
    fixed = ["--distill.fixed", str(tmp_path / "answered.jsonl"), "--distill.fixed-fraction", "0.5"]
    assert main([*given.split(), *fixed, "--inference.source", "torch", "--out", str(tmp_path / "out")]) == 0
    assert read_json(tmp_path / "out" / "distill" / "stage.json")["counts"]["read_rows"] == len(
        WrittenRows(tmp_path / "out" / "read", 128)
    )
    assert open_manifest(tmp_path / "out" / "bundle").drafter.kind == HEAD
    how = DecodingOptions(max_new_tokens=NEW, draft_length=2)
    with opened(tmp_path / "out", engine="onnxruntime", precision="fp32") as pair:
        together, counts = decoded(pair, how)
        assert together == decoded(pair, plain(how))[0]
    assert counts.drafted > 0


def test_the_target_keeps_what_the_head_learns_from(built: Path) -> None:
    rows = WrittenRows(built / "generate", 128)
    row, head = rows[0], load_head(built / "distill" / "model")
    starts = np.flatnonzero(row["position_ids"] == 0)
    assert rows.width == head.shape.hidden
    assert not row["features"][starts[0]].any()
    inside = np.flatnonzero(row["position_ids"] > 0)
    assert row["features"][inside].any(1).all()
    counts = read_json(built / "distill" / "stage.json")["counts"]
    assert counts["draft_vocab_size"] == head.shape.vocab_size == 128
    assert 0.0 < counts["covered_share"] <= 1.0


def test_the_bundle_says_what_it_is(built: Path) -> None:
    manifest = open_manifest(built / "bundle")
    assert (manifest.drafter.kind, manifest.drafter.shape["joins"]) == (HEAD, True)
    assert manifest.pairs() == [("onnxruntime", "fp32"), ("onnxruntime", "int8"), ("llama.cpp", "q8_0")]
    assert {path for table in manifest.drafter.files.values() for path in table.values()} == {
        "drafter/head-int8"
    }
    checks = read_json(built / "bundle" / "verify.json")["files"]
    head = next(check for check in checks if check["role"] == "drafter")
    assert head["broken"] == []
    assert 0.0 < head["engine_relative"] < 5e-2
    evaluation = read_json(built / "bundle" / "evaluation.json")
    assert {setting["drafter"] for setting in evaluation["settings"]} == {"distilled"}


def opened(build: Path, **options: Any) -> closing[Pair]:
    """The pair of a build's bundle, with one thread."""
    return closing(open_pair(build / "bundle", LoadOptions(threads=1, **options)))


def check_reads_anew(pair: Pair, fresh: Pair, text: list[int]) -> None:
    """Behind `text` a head's logits are those of one that reads it all for the first time."""
    assert pair.draft is not None
    assert fresh.draft is not None
    held = len(pair.draft.tokens)
    logits = pair.draft.read(text[held:]).copy()
    pair.draft.rewind(held)
    fresh.target.prefill(text[:-1])
    fresh.draft.rewind(0)
    np.testing.assert_allclose(fresh.draft.read(text), logits, atol=2e-2, rtol=0)


def decoded(pair: Pair, options: DecodingOptions) -> tuple[list[int], RawCounts]:
    reply, counts = list[int](), RawCounts()
    for block in decode(pair.target, pair.draft, PROMPT, options, (), counts):
        reply += block.tokens
    return reply, counts


@pytest.fixture(
    scope="module",
    params=[("onnxruntime", "fp32", ""), ("onnxruntime", "int8", FAST), ("llama.cpp", "q8_0", "")],
    ids=lambda way: " ".join(way).strip(),
)
def pair(request: pytest.FixtureRequest, built: Path) -> Iterator[Pair]:
    engine, precision, mode = request.param
    with opened(built, engine=engine, precision=precision, mode=mode) as loaded:
        yield loaded


@pytest.mark.parametrize("drafter", [MODEL, HYBRID])
def test_fifty_greedy_replies_of_128_tokens_are_the_targets(pair: Pair, drafter: str) -> None:
    generator, counts = np.random.default_rng(0), RawCounts()
    for _ in range(50):
        prompt = generator.integers(4, 512, generator.integers(3, 20)).tolist()
        how = DecodingOptions(max_new_tokens=128, draft_length=2, drafter=drafter)
        alone, together = (
            [t for block in decode(pair.target, pair.draft, prompt, each, (), counts) for t in block.tokens]
            for each in (plain(how), how)
        )
        assert together == alone
        assert len(alone) == 128
    assert 0.02 < counts.acceptance_rate < 0.98  # the drafter disagrees, and is heard


def test_samples_follow_the_target_alone(pair: Pair) -> None:
    expected = law_of_pairs(pair.target, PROMPT, 12, COLD)
    seen, counts = Counter[tuple[int, int]](), RawCounts()
    for seed in range(5000):
        how = DecodingOptions(
            temperature=COLD, draft_length=2, max_new_tokens=3, seed=seed, drafter=MODEL, rule="lossless"
        )
        blocks = decode(pair.target, pair.draft, PROMPT, how, (), counts)
        first, second, *_ = (token for block in blocks for token in block.tokens)
        seen[first, second] += 1
    assert 150 < sum(counts.accepted) < counts.drafted - 150  # both ways of the rule
    assert fit(seen, expected) > ERROR_RATE


def test_a_head_reads_true_features_behind_a_shift(built: Path) -> None:
    """Where the context shifts, the target reads the shortened text before the head does."""
    how = {"engine": "onnxruntime", "precision": "fp32", "context": CONTEXT}
    options = DecodingOptions(max_new_tokens=2 * CONTEXT, draft_length=2, when_full="shift", keep=4)
    shifts, before = 0, 0
    with opened(built, **how) as pair, opened(built, **how) as fresh:
        for block in decode(pair.target, pair.draft, PROMPT, options, (), RawCounts()):
            text = [*pair.target.tokens, block.tokens[-1]]
            shifts, before = shifts + (len(text) < before), len(text)
            check_reads_anew(pair, fresh, text)
    assert shifts > 1


@pytest.mark.parametrize("beside", [True, False], ids=["with its models", "alone"])
def test_its_bundle_can_be_verified(built: Path, tmp_path: Path, beside: bool) -> None:
    bundle = built / "bundle"
    if not beside:
        bundle = tmp_path / "bundle"
        shutil.copytree(built / "bundle", bundle)
    options = Options(
        bundle=str(bundle), verify_prompts=2, answer_replies=0, acceptance_prompts=2, max_new_tokens=8
    )
    found = verify_bundle(options)
    assert found["broken"] == found["skipped"] == []
    roles = [check["role"] for check in found["files"]]
    assert roles.count("drafter") == beside  # the graph is held against the model where it is there
    assert roles.count("target") == 3
    assert {run["engine"] for run in found["acceptance"]} == {"onnxruntime", "llama.cpp"}
    assert (found.get("not_checked") is None) == beside


def test_a_checkpoint_that_is_no_start_is_refused_at_once(built: Path) -> None:
    head = built / "distill" / "model"
    target = ModelShape.from_config(read_json(built.parent / "source" / "config.json"))
    check_start(head, target, LAST)
    with pytest.raises(InputError, match=r"give --drafter\.features last"):
        check_start(head, target, THREE)
    with pytest.raises(InputError, match="has hidden 64 and the target 128"):
        check_start(head, replace(target, hidden=128), LAST)
    with pytest.raises(InputError, match=r"has no head\.json"):
        check_start(built / "generate", target, LAST)


@pytest.mark.parametrize("threads", [1, 2])
def test_doctor_leaves_a_heads_threads_out(
    built: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head has one thread; the target is timed with each number of them, in the pair's mode."""
    modes, load = [], doctor.load_model

    def loading(*given: Any) -> Any:
        modes.append(given[4].mode)
        return load(*given)

    monkeypatch.setattr(doctor, "default_threads", lambda: threads)
    monkeypatch.setattr(doctor, "load_model", loading)
    how = doctor.Options(bundle=str(built / "bundle"), engine="onnxruntime", precision="int8", seconds=1.0)
    found = doctor.examine(how)
    assert [row.draft for row in found.thread_counts] == [None] * (threads if threads > 1 else 0)
    if threads > 1:
        assert thread_table(found.thread_counts)[0][-1] == "4 tokens ms"
        assert set(modes) == {FAST if "fast" in found.chosen.name else EXACT}


def test_a_target_with_joined_matrices_is_refused_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_model_folder(tmp_path / "source", "phi3", head_dim=16, tied=False)
    write_data(tmp_path)
    given = head_command(tmp_path).replace(str(tmp_path / "tiny.gguf"), str(target))
    assert main([*given.split(), "--inference.source", "torch", "--out", str(tmp_path / "out")]) == 2
    assert "those of phi3 have queries, keys and values in one matrix" in capsys.readouterr().err
    assert not (tmp_path / "out" / "generate").exists()


def test_a_head_has_no_static_files_and_no_life_alone(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = replace(Recipe(target="x").export, npu=("qdq8",))
    with pytest.raises(InputError, match=r"is a head and export\.npu is qdq8"):
        check_pair(built.parent / "source", built / "distill" / "model", options)
    assert main(["tradeoff", str(built / "bundle"), "--rules", "lossless"]) == 2
    assert "is a head, which cannot write alone" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "precision"), [("onnxruntime", "fp32"), ("llama.cpp", "q8_0")])
def test_a_draft_begins_with_true_features(built: Path, engine: str, precision: str) -> None:
    """After every block the head holds no slot that guessed, and its next logits are those of a head that read the text anew."""
    how, text = DecodingOptions(max_new_tokens=12, draft_length=3), list(PROMPT)
    with (
        opened(built, engine=engine, precision=precision) as pair,
        opened(built, engine=engine, precision=precision) as fresh,
    ):
        assert pair.draft is not None
        head = pair.draft.engine
        assert isinstance(head, FeatureEngine)
        for block in decode(pair.target, pair.draft, PROMPT, how, (), RawCounts()):
            text += block.tokens
            assert head.n_past == head.true_slots <= len(text) - 1
            if not block.finish:
                check_reads_anew(pair, fresh, text)


def test_a_ready_pair_is_made_once(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = built.parent / "tiny.gguf"
    drafter = tmp_path / "ready" / "tiny"
    keep_in_bytes(built / "distill" / "model", drafter)
    copy_file(built / "evaluate" / "evaluation.json", drafter / "evaluation.json")
    learnt = training_of(built, Recipe(target="tiny"))
    write_json(drafter / TRAINING, learnt)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ready, "ready_folders", lambda: {"tiny": drafter})
    monkeypatch.setattr(ready, "gguf_of", lambda name: file)
    monkeypatch.setattr(ready, "gguf_target", lambda name: gguf_target(str(file)))
    words = ["generate", "tiny", "Say a thing", "--max-new-tokens", "8", "--threads", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.verbs.export.free_disk", lambda _: 0)
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "make room, or set EDGESPEC_HOME to a folder on another disk" in error
        assert "--precisions" not in error
    older, another = (tmp_path / "cache" / "ready" / f"{pair}-0123456789ab" for pair in ("tiny", "tiny-2"))
    (older / "bundle").mkdir(parents=True)
    another.mkdir()
    assert main(words) == 0
    assert (older.exists(), another.exists()) == (False, True)
    first = capsys.readouterr()
    assert "making the ready pair tiny" in first.err
    bundle = Path(ready.bundle_of("tiny"))
    assert not {"export", "verify"} & {folder.name for folder in bundle.parent.iterdir()}
    manifest = open_manifest(bundle)
    assert manifest.drafter.kind == HEAD
    assert manifest.metrics["settings"]
    assert [phase["stage"] for phase in learnt["phases"]] == ["distill"]
    assert manifest.provenance["training"] == learnt
    assert main(words) == 0
    again = capsys.readouterr()
    assert "making" not in again.err
    assert again.out == first.out  # how it was made is a note, no answer
    assert ready.bundle_of("tinny") == "tinny"  # a folder's name: the verb says what is wrong


def test_a_targets_file_that_was_moved_is_given_to_export(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    file, moved = tmp_path / "old.gguf", tmp_path / "new.gguf"
    copy_file(built.parent / "tiny.gguf", file)
    found = gguf_target(str(file))
    assert found is not None
    own = own_file(found.folder)
    assert own is not None
    file.rename(moved)
    cure = "put it back, or: edgespec export --target FILE.gguf --drafter BUILD/distill/model"
    with pytest.raises(InputError, match=f"old.gguf is gone, .* is wanted; {cure}$"):
        own.copy(tmp_path / "copy.gguf")
    source = find_source(ExportOptions(target=str(moved), drafter=str(built / "distill" / "model")))
    assert own_file(source.target.folder) == replace(own, path=moved)


def test_a_head_of_another_target_is_refused(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_model_folder(tmp_path / "other", seed=5)
    given = f"export --target {other} --drafter {built / 'distill' / 'model'} --precisions fp32 --out {tmp_path / 'out'}"
    assert main(given.split()) == 2
    assert "was trained for another target: its token embeddings have the checksum" in capsys.readouterr().err
    assert not (tmp_path / "out" / "export").exists()


def test_rules_that_mix_are_refused(built: Path) -> None:
    with opened(built) as pair:
        with pytest.raises(InputError, match="those of a head depend on where a block began"):
            decoded(pair, DecodingOptions(temperature=1.0, rule="opt:a=0.3"))
        chat = Chat(pair, ChatOptions(bundle=""), interactive=False)
        with pytest.raises(InputError, match="those of a head depend on where a block began"):
            chat.change(rule="bild")
        chat.change(draft="off", rule="bild")  # nobody drafts, so it is plain decoding
        assert chat.options.rule == "bild"
        offered = Service(pair, "tiny", None).models()["data"][0]["speculation"]["rules"]
    assert {"lossless", "block", "match-greedy"} <= set(offered)
    assert not {"opt", "bild", "token-cascade"} & set(offered)


def test_a_build_that_a_head_cannot_learn_from_is_refused(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*head_command(built.parent).split(), "--out", str(built.parent / "other")]
    for more, said in (
        (
            "--no-generate.features",
            "drafter.kind is 'head', which needs generate.features True (it is False)",
        ),
        ("--inference.source torch --distill.against int4", "distill.against '' (it is 'int4')"),
        ("--distill.text-fraction 0.1", "--distill.text-fraction 0 and no"),
        (
            "--inference.source torch --distill.text-fraction 0.1",
            "distill.text_fraction 0.0 (it is 0.1)",
        ),
    ):
        assert main([*words, *more.split()]) == 2
        assert said in capsys.readouterr().err


def test_a_target_without_hidden_states_is_refused_before_it_writes(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = built.parent / "from-onnx"
    words = [*head_command(built.parent).split(), "--out", str(out), "--generate.instructions", "self"]
    assert main([*words, "--inference.file", str(built / "bundle")]) == 2
    assert "an ONNX file or a server gives no hidden states" in capsys.readouterr().err
    assert not (out / "self-instructions").exists()
