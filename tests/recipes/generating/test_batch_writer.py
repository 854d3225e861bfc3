"""A GGUF file that writes many responses at once: what one sequence would write, the same again, and nothing lost when cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_recipes.generating import target_store
from edgespec_recipes.generating.batch_writer import BatchWriter, Text, write_texts
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.file_target import FileWriter
from edgespec_recipes.generating.response_shards import (
    Request,
    Written,
    answered,
    damaged_shards,
    read_responses,
)
from edgespec_recipes.generating.target_store import store_targets
from edgespec_recipes.models.loading import load_model, load_tokenizer
from edgespec_recipes.stored import written_states
from edgespec_recipes.training.distill import responses_of
from edgespec_runtime.batched.sequences import PASS_TOKENS, LlamaCppSequences, Piece
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from edgespec_runtime.rules.sampling import Warp
from repository import PYTHONPATH
from stored_rows import read_states
from tiny_models import make_model_folder
from writing_target import TARGET, make_writing_target, near, near_records, one_pass, shards

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.options import to_mapping
from edgespec.core.progress import Bar
from edgespec.planning import costs
from edgespec.recipe.schema import GenerateOptions, InferenceOptions

TOP_K = 8
STOP = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_writing_target(tmp_path_factory.mktemp("batch"), context=1024)


@pytest.fixture(scope="module")
def options(folder: Path) -> GenerateOptions:
    return GenerateOptions(
        instructions=(str(folder / "seed.jsonl"),), prompts=30, max_new_tokens=20, shard_size=12, batch_size=4
    )


@pytest.fixture(scope="module")
def how(folder: Path) -> InferenceOptions:
    return InferenceOptions(source="file", file=str(folder / "f32.gguf"))


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, options: GenerateOptions, how: InferenceOptions
) -> Path:
    out = tmp_path_factory.mktemp("finished")
    counts = generate(out, folder / TARGET, replace(options, features=True), 3, how, TOP_K)
    assert counts["state_bytes"] == sum(
        len(data) for name, data in shards(out).items() if name.endswith("npy")
    )
    return out


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LlamaCppSequences]:
    found = LlamaCppSequences(folder / "f32.gguf")
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LlamaCppEngine]:
    found = LlamaCppEngine(folder / "f32.gguf")
    yield found
    found.close()


def written(
    engine: LlamaCppSequences, texts: list[Text], at_once: int, *, features: bool = False, **how: Any
) -> list[Written]:
    engine.open(at_once, max(text.end for text in texts), features=features)
    return list(write_texts(engine, texts, Warp(top_p=0.95), how.pop("stops", [STOP]), **how))


def some_requests(sizes: list[int], temperature: float = 0.0) -> list[Request]:
    generator = np.random.default_rng(1)
    return [
        Request(number, [], generator.integers(4, 500, size).tolist(), temperature)
        for number, size in enumerate(sizes)
    ]


def texts_of(requests: list[Request]) -> list[Text]:
    return [Text(request, request.id, len(request.prompt_ids) + 12) for request in requests]


def greedy(alone: LlamaCppEngine, text: Text, stops: list[int]) -> list[int]:
    prompt = text.request.prompt_ids
    alone.rewind(0)
    for start in range(0, len(prompt), 256):
        logits = alone.forward(prompt[start : start + 256])
    found = [int(logits[-1].argmax())]
    while found[-1] not in stops and len(prompt) + len(found) < text.end:
        found.append(int(alone.forward(found[-1:])[-1].argmax()))
    return found


def test_greedy_texts_are_those_of_one_sequence(engine: LlamaCppSequences, alone: LlamaCppEngine) -> None:
    """Prompts longer than a pass, some that begin alike, more of them than places, texts of unlike lengths."""
    requests = some_requests([3, 40, 1, PASS_TOKENS + 88, 17, 5, 300, 8, 9])
    twins = [
        replace(requests[1], id=20),
        replace(requests[6], id=21, prompt_ids=[*requests[6].prompt_ids[:250], 5, 6]),
    ]
    texts = [*texts_of([*requests, *twins]), Text(replace(requests[0], id=22), 22, 4)]  # the last: one token
    stops = [STOP, greedy(alone, texts[4], [])[5]]
    found = written(engine, texts, 3, stops=stops)
    assert sorted(text.id for text in found) == [*range(9), 20, 21, 22]
    wanted = {text.request.id: greedy(alone, text, stops) for text in texts}
    assert {text.id: text.tokens for text in found} == wanted
    assert len({len(tokens) for tokens in wanted.values()}) > 2
    assert len(wanted[22]) == 1


@pytest.fixture
def passes(engine: LlamaCppSequences, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the pieces of every pass."""
    plain, found = engine.forward, []

    def noted(pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
        found.append([len(piece.tokens) for piece in pieces])
        return plain(pieces)

    monkeypatch.setattr(engine, "forward", noted)
    return found


def test_what_prompts_begin_with_is_read_once(
    engine: LlamaCppSequences, alone: LlamaCppEngine, passes: list[list[int]]
) -> None:
    """Two system prompts, questions of unlike lengths."""
    systems, questions = (
        [request.prompt_ids for request in some_requests(sizes)]
        for sizes in ([20, 90], [5, 40, 7, 9, 6, 8, 33, 11])
    )
    prompts = [[*system, 480 + at, *question] for system in systems for at, question in enumerate(questions)]
    texts = texts_of([Request(number, [], prompt, 0.0) for number, prompt in enumerate(prompts)])
    found = written(engine, texts, 4)
    assert {text.id: text.tokens for text in found} == {
        text.request.id: greedy(alone, text, [STOP]) for text in texts
    }
    own = 2 * sum(1 + len(question) for question in questions)
    assert sum(map(sum, passes)) == 20 + 90 + own + sum(len(text.tokens) - 1 for text in found)


def test_a_place_is_taken_for_the_text_that_was_moved_there(
    engine: LlamaCppSequences, alone: LlamaCppEngine
) -> None:
    """The third text goes to the second's place while the fifth waits for the fourth; the last begins like the second."""
    first, second, third, fourth = some_requests([5, 30, 40, 20])
    fifth = replace(fourth, id=4)
    last = replace(second, id=5, prompt_ids=[*second.prompt_ids, 7])
    texts = texts_of([first, second, third, fourth, fifth, last])
    for text in texts[:2]:
        text.end = len(text.tokens) + 1
    wanted = {text.request.id: greedy(alone, text, [STOP]) for text in texts}
    assert {text.id: text.tokens for text in written(engine, texts, 3)} == wanted


def test_records_and_features_are_those_of_one_pass(folder: Path, engine: LlamaCppSequences) -> None:
    shared = some_requests([30, 4, 11, 7, 600], temperature=1.0)
    requests = [*shared, replace(shared[0], id=9, prompt_ids=[*shared[0].prompt_ids[:25], 77])]
    prompts = {request.id: request.prompt_ids for request in requests}
    model = load_model(folder / TARGET)
    for text in written(engine, texts_of(requests), 2, top_k=TOP_K, features=True):
        hidden, kept = one_pass(model, prompts[text.id], text.tokens, TOP_K)
        assert text.kept["features"].shape == hidden.shape
        near(text.kept["features"], hidden)
        near_records(text.kept["top_k"], kept, same=0.95)


def test_nothing_that_is_asked_for_is_float32_too(engine: LlamaCppSequences) -> None:
    engine.open(1, 20)
    logits, hidden = engine.forward([Piece(0, [5, 6], wanted=False)])
    assert (logits.shape, hidden.shape) == ((0, engine.vocab_size), (0, engine.width))
    assert logits.dtype == hidden.dtype == np.float32


def test_rows_are_those_of_one_sequence_at_any_temperature(
    folder: Path, options: GenerateOptions, how: InferenceOptions
) -> None:
    """The same seeds through the runtime's own loop."""
    tokenizer = load_tokenizer(folder / TARGET)
    requests = [
        replace(request, temperature=(0.0, 0.3, 0.7, 1.0)[request.id % 4])
        for request in some_requests([5, 9, 30, 2, 14, 21])
    ]
    many, one = (
        answered(writer, 0, requests, Bar("", None, "", 0))[0]
        for writer in (
            BatchWriter(how, folder / TARGET, tokenizer, options, 7),
            FileWriter(how, folder / TARGET, tokenizer, options, 7),
        )
    )
    # a number that falls on the border of two tokens may give the other one: the cache is F16
    assert sum(ours == theirs for ours, theirs in zip(many, one, strict=True)) >= 4


def test_rows_and_states_belong_together(finished: Path, options: GenerateOptions) -> None:
    rows = read_responses(finished)
    assert [row["id"] for row in rows] == list(range(30))
    for shard in sorted(finished.glob("shard-*.jsonl")):
        for row, records, features in read_states(shard):
            prompt, response = row["prompt_ids"], row["response_ids"]
            assert records is not None
            assert features is not None
            assert len(records) == len(response)
            assert features.shape == (len(prompt) + len(response) - 1, 64)
            assert features.dtype == np.float16
            if row["temperature"] == 0:
                assert records["ids"][:, 0].tolist() == response


@pytest.mark.parametrize("kind", ["jsonl", "top_k.npy", "features.npy"])
def test_only_a_damaged_shard_is_made_again(
    finished: Path, folder: Path, options: GenerateOptions, how: InferenceOptions, kind: str
) -> None:
    before = shards(finished)
    harmed = finished / f"shard-00001.{kind}"
    harmed.write_bytes(before[harmed.name][:-3] + b"xyz")
    assert damaged_shards(finished) == ["shard-00001.jsonl"]
    counts = generate(finished, folder / TARGET, replace(options, features=True), 3, how, TOP_K)
    assert counts["remade_shards"] == ["shard-00001.jsonl"]
    assert shards(finished) == before


def test_shards_without_what_is_wanted_are_made_again(
    folder: Path,
    options: GenerateOptions,
    how: InferenceOptions,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generate(tmp_path, folder / TARGET, options, 3, how)
    rows = read_responses(tmp_path)
    assert not list(tmp_path.glob("*.npy"))
    counts = generate(tmp_path, folder / TARGET, options, 3, how, TOP_K)
    assert len(counts["remade_shards"]) == 3
    assert "has no top_k as they are wanted (target None, top_k None, vocab_size None)" in caplog.text
    assert read_responses(tmp_path) == rows


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from edgespec.core.options import from_mapping
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec_recipes.generating import batch_writer, datagen

out, target, file, options, after = sys.argv[1:]
plain, asked = batch_writer.write_texts, []
def killed(*given, **more):
    asked.append(1)
    for text in plain(*given, **more):
        yield text
        if len(asked) == int(after):
            os.kill(os.getpid(), signal.SIGKILL)
batch_writer.write_texts = killed
options = from_mapping(GenerateOptions, json.loads(options))
datagen.generate(Path(out), Path(target), options, 3, InferenceOptions(source="file", file=file), 8)
"""


def test_a_killed_run_goes_on_and_gives_the_same_shards(
    finished: Path, folder: Path, options: GenerateOptions, how: InferenceOptions, tmp_path: Path
) -> None:
    wanted = replace(options, features=True)
    given = [tmp_path, folder / TARGET, how.file, json.dumps(to_mapping(wanted)), "2"]
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["shard-00000.json"]
    first = (tmp_path / "shard-00000.jsonl").stat().st_mtime_ns
    assert not generate(tmp_path, folder / TARGET, wanted, 3, how, TOP_K)["remade_shards"]
    assert (tmp_path / "shard-00000.jsonl").stat().st_mtime_ns == first
    assert shards(tmp_path) == shards(finished)
    assert len(shards(finished)) == 3 * 4


@pytest.mark.parametrize("context", [400, 48])
def test_the_store_is_filled_without_another_pass(
    finished: Path,
    folder: Path,
    how: InferenceOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: int,
) -> None:
    """The rows of the present path and its distributions; texts that a short row cuts off too."""
    rows = responses_of(finished, context)
    ours = store_targets(tmp_path / "pass", folder / TARGET, rows, TOP_K, inference=how)
    monkeypatch.setattr(target_store, "_open_target", lambda *_: pytest.fail("the target ran"))
    counts = store_targets(tmp_path / "kept", folder / TARGET, rows, TOP_K, inference=how, written=finished)
    assert counts["stored_positions"] == ours["stored_positions"]
    assert counts["precision"] == "as written"
    for name in sorted(path.name for path in (tmp_path / "pass").glob("*.npy")):
        found, wanted = (np.load(tmp_path / one / name) for one in ("kept", "pass"))
        near_records(found, wanted, same=0.97)


def test_what_another_target_kept_is_not_taken(
    finished: Path, folder: Path, how: InferenceOptions, tmp_path: Path
) -> None:
    other = make_model_folder(tmp_path / "other", context=1024, seed=5)
    export_gguf(other, tmp_path / "other.gguf", "f32")
    rows = responses_of(finished, 400)
    theirs = InferenceOptions(source="file", file=str(tmp_path / "other.gguf"))
    counts = store_targets(tmp_path / "a", folder / TARGET, rows, TOP_K, inference=theirs, written=finished)
    assert counts["precision"] == "other.gguf"
    counts = store_targets(tmp_path / "b", folder / TARGET, rows, 4, inference=how, written=finished)
    assert counts["precision"] == "f32.gguf"  # so many tokens were not kept
    strange = {**rows.arrays, "input_ids": rows.arrays["input_ids"][:, ::-1]}
    changed = type(rows)(strange)
    counts = store_targets(tmp_path / "c", folder / TARGET, changed, TOP_K, inference=how, written=finished)
    assert counts["precision"] == "f32.gguf"


def test_how_many_are_written_at_once(
    folder: Path, options: GenerateOptions, how: InferenceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BatchWriter(how, folder / TARGET, load_tokenizer(folder / TARGET), options, 0)
    assert writer.at_once(300) == 4
    shape = read_json(folder / TARGET / "config.json")
    token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    monkeypatch.setattr(costs, "CACHE_BYTES", 3 * token * 512)
    assert (writer.at_once(300), writer.at_once(200), writer.at_once(1024)) == (3, 4, 1)


def test_a_context_that_is_too_short_is_told_before_anything_is_written(
    folder: Path, options: GenerateOptions, how: InferenceOptions, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"the context is 24 tokens and generate.max_new_tokens is 20"):
        generate(tmp_path, folder / TARGET, options, 3, replace(how, context=24))
    assert not list(tmp_path.iterdir())


def test_arrays_of_other_rows_are_refused(finished: Path, tmp_path: Path) -> None:
    for name, data in shards(finished).items():
        (tmp_path / name).write_bytes(data)
    np.save(written_states.state_path(tmp_path / "shard-00000.jsonl", "top_k"), np.zeros(3))
    with pytest.raises(InputError, match=r"top_k.npy has 3 rows; those of shard-00000.jsonl need \d+"):
        list(read_states(tmp_path / "shard-00000.jsonl"))
