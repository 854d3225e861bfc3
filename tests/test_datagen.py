"""The generate stage: requests in turn, shards that resume, corrupt shards made again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_recipes import datagen
from edgespec_recipes.datagen import generate, plan_requests, read_responses
from edgespec_recipes.loading import load_tokenizer
from edgespec_recipes.prompts import encode_prompt
from tiny_models import make_model_folder

from edgespec.errors import InputError
from edgespec.recipe import GenerateOptions

STOP = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("datagen") / "target")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GenerateOptions:
    file = tmp_path_factory.mktemp("seed") / "seed.jsonl"
    rows = [{"instruction": "word " * (3 + number)} for number in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GenerateOptions(instructions=str(file), prompts=22, max_new_tokens=12, batch_size=4, shard_size=8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target: Path, options: GenerateOptions) -> Path:
    out = tmp_path_factory.mktemp("generate")
    counts = generate(out, target, options, seed=5)
    assert counts["shards"] == 3
    assert counts["responses"] == 22
    assert counts["response_tokens"] == sum(len(row["response_ids"]) for row in read_responses(out))
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*.jsonl"))}


def test_rows(finished: Path, target: Path, options: GenerateOptions) -> None:
    tokenizer = load_tokenizer(target)
    rows = read_responses(finished)
    assert [row["id"] for row in rows] == list(range(22))
    for row in rows:
        assert row["prompt_ids"] == encode_prompt(tokenizer, row["messages"])
        response = row["response_ids"]
        assert 1 <= len(response) <= options.max_new_tokens
        assert STOP not in response[:-1]
        assert len(response) == options.max_new_tokens or response[-1] == STOP


def test_instructions_temperatures_and_system_prompts_are_used_in_turn(finished: Path) -> None:
    rows = read_responses(finished)
    assert [row["temperature"] for row in rows[:4]] == [0.0, 0.3, 0.7, 1.0]
    said = [row["messages"][-1]["content"] for row in rows]
    assert said[:8] == said[8:16]
    # the second time round, an instruction meets the next temperature
    assert all(
        one["temperature"] != other["temperature"] for one, other in zip(rows[:8], rows[8:16], strict=True)
    )
    system = [row["messages"][0]["content"] if row["messages"][0]["role"] == "system" else "" for row in rows]
    assert set(system) == set(GenerateOptions().system_prompts)


def test_greedy_rows_are_the_targets_greedy_answer(finished: Path, target: Path) -> None:
    from edgespec_recipes.loading import load_model
    from test_decoding import greedy

    model, rows = load_model(target), [row for row in read_responses(finished) if row["temperature"] == 0]
    agree = [greedy(model, row["prompt_ids"], 12, [STOP]) == row["response_ids"] for row in rows]
    assert sum(agree) >= len(agree) / 2  # bf16 autocast, where it is used, may flip a close call


def test_whole_shards_are_kept_and_remade_ones_are_identical(
    finished: Path,
    target: Path,
    options: GenerateOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = contents(finished)
    texts = {name: text.decode() for name, text in before.items()}
    (finished / "shard-00000.jsonl").write_text(texts["shard-00000.jsonl"][:-40])  # cut off
    (finished / "shard-00001.jsonl").write_text(
        "".join(texts["shard-00001.jsonl"].splitlines(True)[:-1])
    )  # a row short
    asked: list[int] = []
    plain = datagen.sample_responses

    def counted(model: Any, prompts: Any, *given: Any, **how: Any) -> Any:
        asked.append(len(prompts))
        return plain(model, prompts, *given, **how)

    monkeypatch.setattr(datagen, "sample_responses", counted)
    counts = generate(finished, target, options, seed=5)
    assert contents(finished) == before
    assert counts["remade_shards"] == ["shard-00000.jsonl", "shard-00001.jsonl"]
    assert sum(asked) == 16  # the third shard was not touched
    assert "shard-00000.jsonl" in caplog.text
    assert "has 7 rows; it must have 8" in caplog.text


def test_another_seed_gives_other_responses(
    finished: Path, target: Path, options: GenerateOptions, tmp_path: Path
) -> None:
    generate(tmp_path, target, replace(options, prompts=8), seed=6)
    assert contents(tmp_path)["shard-00000.jsonl"] != contents(finished)["shard-00000.jsonl"]


def test_every_shard_draws_its_own_numbers(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"instruction": "word"}))
    options = GenerateOptions(
        instructions=str(file),
        prompts=4,
        temperatures=(1.0,),
        system_prompts=("",),
        max_new_tokens=8,
        shard_size=2,
    )
    generate(tmp_path, target, options, seed=0)
    answers = [tuple(row["response_ids"]) for row in read_responses(tmp_path)]
    assert len(set(answers)) == 4


def test_instructions_too_long_for_the_context(target: Path, options: GenerateOptions) -> None:
    tokenizer = load_tokenizer(target)
    whole, _ = plan_requests(options, tokenizer, 256)
    longest = max(len(request.prompt_ids) for request in whole)
    requests, left_out = plan_requests(options, tokenizer, longest + options.max_new_tokens - 1)
    assert left_out >= 1
    assert len(requests) == options.prompts
    assert all(len(request.prompt_ids) < longest for request in requests)
    with pytest.raises(InputError, match=r"no instruction of .* fits: the context is 20 tokens"):
        plan_requests(options, tokenizer, 20)


def test_no_responses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run the generate stage first"):
        read_responses(tmp_path)
