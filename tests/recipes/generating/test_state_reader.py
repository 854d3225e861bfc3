"""The target that reads given replies keeps what it keeps while it writes them, and a head learns from both together."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.mixing import TARGET as OWN
from edgespec_recipes.data.mixing import held_out
from edgespec_recipes.data.token_rows import documents_of
from edgespec_recipes.generating import torch_writer
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.response_shards import Request, answered, read_responses
from edgespec_recipes.generating.state_reader import StateReader, read_again, read_conversations
from edgespec_recipes.models.loading import load_model, load_tokenizer, stop_ids_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.written_states import JoinedRows, WrittenRows
from edgespec_recipes.training import distill_head as teaching
from edgespec_recipes.training.distill_head import _warn_of_harm, distill_head
from stored_rows import read_states
from tiny_models import TEMPLATE, make_model_folder
from writing_target import (
    FILE,
    SEED_FILE,
    TARGET,
    make_writing_target,
    near,
    near_records,
    one_pass,
    shards,
)

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_jsonl
from edgespec.core.progress import Bar
from edgespec.model_folder.head import early_layers
from edgespec.recipe.schema import DistillOptions, DrafterOptions, GenerateOptions, InferenceOptions

TOP_K, CONTEXT, PLENTY = 8, 128, 10**6
HOW = InferenceOptions()
WORDS = "the sea is wide and a list has items "
HEAD = DrafterOptions(kind="head", vocabulary=128)
LEARNING = DistillOptions(
    text_fraction=0.0, target_side="stored", steps=24, batch_size=4, context=CONTEXT, warmup_steps=2, learning_rate=3e-3
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_writing_target(tmp_path_factory.mktemp("state-reader"), context=256)
    rows = [{"instruction": f"Say {n}", "response": WORDS * (n % 4 + 1)} for n in range(30)]
    write_jsonl(root / "answered.jsonl", rows)
    return root


@pytest.fixture(autouse=True)
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device multiplies in float32, whatever it can; one token in ten ends a text."""
    monkeypatch.setattr(
        torch_writer, "choose_precision", lambda device: Precision("float32", "said by a test")
    )
    monkeypatch.setattr(torch_writer, "stop_ids_of", lambda folder, tokenizer: list(range(0, 512, 10)))


@pytest.fixture
def written(folder: Path, tmp_path: Path) -> Path:
    options = GenerateOptions(
        instructions=(str(folder / SEED_FILE),), prompts=40, max_new_tokens=20, shard_size=40, features=True
    )
    generate(tmp_path / "written", folder / TARGET, options, 3, top_k=TOP_K)
    return tmp_path / "written"


def read(folder: Path, out: Path, tokens: int = PLENTY, **how: Any) -> dict[str, Any]:
    source = str(folder / "answered.jsonl")
    return read_conversations(out, folder / TARGET, source, tokens, 256, replace(HOW, **how), TOP_K, PLENTY)


def test_reading_keeps_what_writing_kept(folder: Path, written: Path) -> None:
    stops = stop_ids_of(folder / TARGET, load_tokenizer(folder / TARGET))
    kept = list(read_states(next(written.glob("shard-*.jsonl"))))
    reader = StateReader(folder / TARGET, [row["response_ids"] for row, _, _ in kept], stops, HOW, TOP_K)
    requests = [Request(number, [], row["prompt_ids"], 1.0) for number, (row, _, _) in enumerate(kept)]
    answers, states = answered(reader, 0, requests, Bar("read", len(requests), "texts", 0))
    assert answers == [row["response_ids"] for row, _, _ in kept]
    records, features = (np.concatenate([each[part] for each in kept]) for part in (1, 2))
    near(states["features"], features)
    near_records(states["top_k"], records)
    assert len({len(reply) for reply in reader.replies}) > 3  # rows of a pass are padded


def test_three_layers_states_are_what_these_layers_read(folder: Path, written: Path, tmp_path: Path) -> None:
    counts = read_again(tmp_path / "again", folder / TARGET, written, 7, HOW, TOP_K)
    assert counts["responses"] == 40
    assert counts["shards"] == 6
    model = load_model(folder / TARGET)
    layers = [(layer, model.model.layers[layer].input_layernorm) for layer in early_layers(2)]
    again = [
        text for shard in sorted((tmp_path / "again").glob("shard-*.jsonl")) for text in read_states(shard)
    ]
    for (row, records, _), (own, same, features) in zip(
        read_states(next(written.glob("shard-*.jsonl"))), again, strict=True
    ):
        assert own == row
        near(same["log_p"], records["log_p"])
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]][:-1]])
        with torch.inference_mode():
            given = model.model(ids, output_hidden_states=True)
            states = [norm(given.hidden_states[layer][0]) for layer, norm in layers]
        near(features, torch.cat([*states, given.last_hidden_state[0]], -1))


def test_replies_stand_as_the_template_writes_them(folder: Path, tmp_path: Path) -> None:
    counts = read(folder, tmp_path)
    rows, tokenizer = read_responses(tmp_path), load_tokenizer(folder / TARGET)
    assert counts["responses"] == len(rows) == 30
    assert counts["ended"] == 30  # the token that ends the turn is learnt too
    assert [tokenizer.decode(row["response_ids"][:-1]).strip() for row in rows[:2]] == [
        (WORDS * times).strip() for times in (1, 2)
    ]
    model = load_model(folder / TARGET)
    for row, _, features in read_states(next(tmp_path.glob("shard-*.jsonl"))):
        near(features, one_pass(model, row["prompt_ids"], row["response_ids"], TOP_K)[0])


def test_no_more_is_read_than_is_wanted_and_whole_shards_stay(folder: Path, tmp_path: Path) -> None:
    counts = read(folder, tmp_path, tokens=300)
    rows = read_responses(tmp_path)
    sizes = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    assert sum(sizes[:-1]) < 300 <= sum(sizes)
    before = shards(tmp_path)
    assert read(folder, tmp_path, tokens=300)["remade_shards"] == []
    damaged = tmp_path / "shard-00000.features.npy"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert read(folder, tmp_path, tokens=300)["remade_shards"] == ["shard-00000.jsonl"]
    assert shards(tmp_path) == before
    assert counts["responses"] == len(rows) < 30


def test_prompts_with_another_date_keep_what_was_read(tmp_path: Path) -> None:
    """A template that writes microseconds stands for one that writes the date. Replies that are others are read again."""
    dated, out = make_model_folder(tmp_path / "dated" / TARGET), tmp_path / "out"
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%f') }}" + TEMPLATE)
    source = tmp_path / "dated" / "answered.jsonl"
    write_jsonl(source, [{"instruction": f"Say {n}", "response": WORDS} for n in range(3)])
    read(dated.parent, out)
    before = shards(out)
    assert read(dated.parent, out)["remade_shards"] == []
    assert shards(out) == before
    write_jsonl(source, [{"instruction": f"Say {n}", "response": WORDS[:-3]} for n in range(3)])
    assert read(dated.parent, out)["remade_shards"] == ["shard-00000.jsonl"]


def test_what_does_not_fit_is_cut_or_left_out(folder: Path, tmp_path: Path) -> None:
    def given(out: Path, rows: list[dict[str, str]], context: int) -> list[dict[str, Any]]:
        source = str(tmp_path / "long.jsonl")
        write_jsonl(Path(source), rows)
        read_conversations(out, folder / TARGET, source, PLENTY, 256, HOW, TOP_K, context)
        return read_responses(out)

    long = [{"instruction": "Say", "response": WORDS * 99}, {"instruction": WORDS * 99, "response": "Yes"}]
    (row,) = given(tmp_path / "out", long, PLENTY)
    assert len(row["prompt_ids"]) + len(row["response_ids"]) == 256
    (row,) = given(tmp_path / "short", long, CONTEXT)  # no more than the training can use
    assert len(row["prompt_ids"]) + len(row["response_ids"]) == CONTEXT < 256
    with pytest.raises(InputError, match=r"no conversation of .* fits 256 tokens"):
        given(tmp_path / "none", [long[1], long[1]], PLENTY)


def test_a_file_of_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"f32.gguf' has other weights than .*model, which reads"):
        read(
            folder, tmp_path, source="file", file=str(folder / FILE)
        )  # nothing says that the folder is of it


def test_a_head_reads_the_state_before_each_token(folder: Path, written: Path) -> None:
    """Every text of every packed row against one pass over it: states, distributions, and what the first guess is fitted to."""
    rows, model = WrittenRows(written, CONTEXT), load_model(folder / TARGET)
    records, wanted = [], []
    for number, (tokens, before, at) in enumerate(rows.steps_seen(PLENTY)):
        row, passes, inside = rows[number], [], list[int]()
        for slots in documents_of(row):
            ids, prompt = row["input_ids"][slots].tolist(), int(row["compared"][slots].argmax()) + 1
            hidden, kept = one_pass(model, ids[:prompt], ids[prompt:], TOP_K)
            assert not row["features"][slots[0]].any()
            near(row["features"][slots[1:]], hidden)
            passes.append(hidden)
            wanted.append(kept)
            inside += ids[1:-1]
        assert tokens.tolist() == inside
        near(before, np.concatenate([states[:-1] for states in passes]))
        near(at, np.concatenate([states[1:] for states in passes]))
        records.append(rows.records(number))
    assert len(records) == len(rows) < len(wanted)
    parts = {part: np.concatenate([np.asarray(kept[part]) for kept in wanted]) for part in wanted[0]}
    near_records(np.concatenate(records), parts)


def test_watched_rows_are_not_learnt(folder: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_steps = set[int]()

    def looked_at(model: Any, dataset: Any, *given: Any, **named: Any) -> Any:
        read_by_steps.update(int(row["row_id"]) for row in dataset if row["kind"] == OWN)
        raise KeyboardInterrupt

    monkeypatch.setattr(teaching, "train", looked_at)
    options = replace(LEARNING, watch_steps=8, watch_rows=2)
    with pytest.raises(KeyboardInterrupt):
        distill_head(written.with_name("head"), folder / TARGET, written, HEAD, options, 0)
    learnt, watched = held_out(len(WrittenRows(written, CONTEXT)), 2)
    assert len(watched) > 0
    assert read_by_steps == set(learnt.tolist())


def test_joined_rows_are_those_of_their_folders(folder: Path, written: Path, tmp_path: Path) -> None:
    read(folder, tmp_path / "read")
    parts = [WrittenRows(written, CONTEXT), WrittenRows(tmp_path / "read", CONTEXT)]
    joined = JoinedRows(*parts)
    numbered = [(part, row) for part in parts for row in range(len(part))]
    for number, (part, row) in enumerate(numbered):
        some = slice(0, 3)
        wanted = part.rows([row], torch.device("cpu"))(some)
        assert torch.equal(joined.rows([number], torch.device("cpu"))(some), wanted)
    assert len(numbered) > len(parts)
    other = make_model_folder(tmp_path / "other" / TARGET, context=256, seed=5)
    source = str(folder / "answered.jsonl")
    read_conversations(tmp_path / "of-other", other, source, PLENTY, 256, HOW, TOP_K, PLENTY)
    with pytest.raises(
        InputError, match=r"from the target .* and the read rows from .*remove the folder of the older one"
    ):
        JoinedRows(parts[0], WrittenRows(tmp_path / "of-other", CONTEXT))


def test_a_head_learns_from_both(folder: Path, written: Path, tmp_path: Path) -> None:
    """With the target's own texts and with conversations that it read."""
    read(folder, tmp_path / "read")
    options = replace(
        LEARNING, fixed=str(folder / "answered.jsonl"), fixed_fraction=0.75, unrolled_steps=2, watch_steps=0
    )
    counts = distill_head(
        tmp_path / "head", folder / TARGET, written, HEAD, options, 0, read=tmp_path / "read"
    )
    assert counts["read_rows"] == len(WrittenRows(tmp_path / "read", CONTEXT))
    assert counts["loss_last"] < 0.9 * counts["loss_first"]
    assert read_json(tmp_path / "head" / "model" / "head.json")["unrolled_steps"] == 2


def test_rows_travel_to_processes_that_begin_anew(written: Path) -> None:
    """Where a process is not a copy of this one, it gets the rows pickled."""
    rows = WrittenRows(written, CONTEXT)
    first = rows[0]["features"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rows))[0]["features"], first)


@pytest.mark.parametrize(("rate", "harms"), [(3e-3, False), (1.0, True)])
def test_a_training_that_harms_says_so(
    rate: float, harms: bool, folder: Path, written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(LEARNING, learning_rate=rate, watch_steps=24, watch_rows=3)
    counts = distill_head(tmp_path / "head", folder / TARGET, written, HEAD, options, 0)
    assert (counts["alpha_last"] < counts["alpha_before"]) is harms
    assert ("before this training" in caplog.text) is harms


def test_a_harm_is_told_with_how_often_its_own_text_was_read(caplog: pytest.LogCaptureFixture) -> None:
    """100 steps of 10 rows, of which one is the target's own, out of 50."""
    options = replace(LEARNING, steps=100, batch_size=10, fixed_fraction=0.9)
    _warn_of_harm({"alpha": 0.5}, {"alpha_last": 0.4}, options, 50)
    assert "It read the text 2.0 times" in caplog.text
