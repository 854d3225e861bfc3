"""The generate stage: requests in turn, shards that resume, corrupt shards made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_recipes.data.prompts import encode_prompt
from edgespec_recipes.generating import response_shards, torch_writer
from edgespec_recipes.generating.datagen import generate, plan_requests
from edgespec_recipes.generating.response_shards import read_responses
from edgespec_recipes.models.loading import load_model, load_tokenizer
from edgespec_recipes.parallel.precision import Precision
from small_llama import greedy
from tiny_models import TEMPLATE, make_model_folder
from torchrun import one_thread, two_processes

from edgespec.core.errors import InputError
from edgespec.core.files import read_jsonl, write_jsonl
from edgespec.core.options import to_mapping
from edgespec.recipe.schema import GenerateOptions

STOP = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("datagen") / "target")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GenerateOptions:
    file = tmp_path_factory.mktemp("seed") / "seed.jsonl"
    write_jsonl(file, [{"instruction": "word " * (3 + number)} for number in range(8)])
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
    system = [row["messages"][0]["content"] if row["messages"][0]["role"] == "system" else "" for row in rows]
    assert set(system) == set(GenerateOptions().system_prompts)


@pytest.mark.parametrize("instructions", [1, 3, 4, 5, 6])
def test_an_instruction_that_comes_round_meets_every_temperature_with_every_system_prompt(
    instructions: int, target: Path, tmp_path: Path
) -> None:
    """Greedy answers of one prompt are all the same, so a pair that came twice would be lost."""
    write_jsonl(tmp_path / "seed.jsonl", [{"instruction": "word " * (3 + n)} for n in range(instructions)])
    options = GenerateOptions(instructions=str(tmp_path / "seed.jsonl"), prompts=12 * instructions)
    requests, _ = plan_requests(options, load_tokenizer(target), 256)
    assert len({(*request.prompt_ids, request.temperature) for request in requests}) == len(requests)
    for place in range(instructions):
        met = [request.temperature for request in requests[place::instructions]]
        assert all(set(met[turn : turn + 4]) == {0.0, 0.3, 0.7, 1.0} for turn in range(9))


def test_greedy_rows_are_the_targets_greedy_answer(
    target: Path, options: GenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whatever the device can do: bf16 would flip close calls."""
    precision = Precision("float32", "said by a test")
    monkeypatch.setattr(torch_writer, "choose_precision", lambda device: precision)
    generate(tmp_path, target, options, seed=5)
    model, rows = load_model(target), [row for row in read_responses(tmp_path) if row["temperature"] == 0]
    assert len(rows) >= 5
    for row in rows:
        assert greedy(model, row["prompt_ids"], 12, [STOP]) == row["response_ids"]


def test_whole_shards_are_kept_and_remade_ones_are_identical(
    finished: Path,
    target: Path,
    options: GenerateOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = contents(finished)
    (finished / "shard-00000.jsonl").write_bytes(before["shard-00000.jsonl"][:-40])  # cut off
    rows = read_jsonl(finished / "shard-00001.jsonl")
    response_shards.write_shard(finished / "shard-00001.jsonl", rows[:-1])  # whole, and a row short
    with pytest.raises(InputError, match=r"shard-00000.jsonl has the sha256 .*stage.json and run the same"):
        read_responses(finished)
    asked: list[int] = []
    plain = torch_writer.responses

    def counted(model: Any, prompts: Any, *given: Any, **how: Any) -> Any:
        asked.append(len(prompts))
        return plain(model, prompts, *given, **how)

    monkeypatch.setattr(torch_writer, "responses", counted)
    counts = generate(finished, target, options, seed=5)
    assert contents(finished) == before
    assert counts["remade_shards"] == ["shard-00000.jsonl", "shard-00001.jsonl"]
    assert sum(asked) == 16  # the third shard was not touched
    assert "shard-00000.jsonl has the sha256" in caplog.text
    assert "shard-00001.jsonl has 7 rows; it must have 8" in caplog.text


def _flip(shard: Path) -> None:
    """Another temperature in the middle of a row: still JSON, still an answer to the request."""
    text = shard.read_text()
    shard.write_text(text.replace('"temperature": 0.7', '"temperature": 0.3', 1))
    assert shard.read_text() != text


def _of_others(shard: Path) -> None:
    others = [{"role": "user", "content": "Another?"}]
    response_shards.write_shard(
        shard, [{**row, "messages": others, "prompt_ids": [1, 2]} for row in read_jsonl(shard)]
    )


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_flip, "shard-00001.jsonl has the sha256"),
        (_of_others, "shard-00001.jsonl has the row 8 where the answer to request 8 belongs"),
        (Path.unlink, "shard-00001.jsonl is missing"),
        (
            lambda shard: response_shards.about_file(shard).write_text("[]"),
            "shard-00001.jsonl has the sha256",
        ),
        (
            lambda shard: response_shards.about_file(shard).write_text("{"),
            "shard-00001.json is not valid JSON",
        ),
        # killed before it was whole: nothing is wrong
        (lambda shard: response_shards.about_file(shard).unlink(), ""),
    ],
)
def test_any_damage_is_named_and_only_that_shard_made_again(
    finished: Path,
    target: Path,
    options: GenerateOptions,
    tmp_path: Path,
    harm: Callable[[Path], None],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    times = {file.name: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
    harm(out / "shard-00001.jsonl")
    counts = generate(out, target, options, seed=5)
    assert contents(out) == contents(finished)
    assert words in caplog.text
    assert counts["remade_shards"] == (["shard-00001.jsonl"] if words else [])
    after = {file.name: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
    assert [name for name in sorted(times) if times[name] != after[name]] == ["shard-00001.jsonl"]


def test_prompts_with_another_date_keep_what_was_written(
    target: Path, options: GenerateOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A template that writes microseconds stands for one that writes the date, and a stage that goes on on another day."""
    folder = shutil.copytree(target, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%f') }}" + TEMPLATE)
    generate(tmp_path / "out", folder, options, seed=5)
    before = contents(tmp_path / "out")
    response_shards.about_file(tmp_path / "out" / "shard-00001.jsonl").unlink()
    assert generate(tmp_path / "out", folder, options, seed=5)["remade_shards"] == []
    after = contents(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["shard-00001.jsonl"]
    assert "made again" not in caplog.text


PROGRAM = """
import json, sys
from pathlib import Path
from edgespec.recipe.schema import GenerateOptions
from edgespec_recipes.generating import datagen, response_shards, torch_writer
from edgespec_recipes.parallel import processes
written = []
plain = response_shards.write_shard
datagen.write_shard = lambda path, rows, *kept: (written.append(path.name), plain(path, rows, *kept))
target, options, seed, out = sys.argv[1:]
counts = datagen.generate(Path(out), Path(target), GenerateOptions(**json.loads(options)), int(seed))
Path(out, f"counts-{processes.rank()}").write_text(json.dumps([processes.world(), written, counts]))
"""


@pytest.mark.training
def test_two_processes_share_the_shards(target: Path, options: GenerateOptions, tmp_path: Path) -> None:
    options = replace(options, prompts=20, shard_size=4)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    two_processes(program, str(target), json.dumps(to_mapping(options)), "5", str(tmp_path / "two"))
    (world, first, counts), (_, second, same) = (
        json.loads((tmp_path / "two" / f"counts-{rank}").read_text()) for rank in (0, 1)
    )
    assert world == 2
    assert first == [f"shard-{number:05d}.jsonl" for number in (0, 2, 4)]
    assert second == [f"shard-{number:05d}.jsonl" for number in (1, 3)]
    with one_thread():
        alone = generate(tmp_path / "one", target, options, seed=5)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(contents(tmp_path / "one")) == 5
    assert counts == same
    assert {**counts, "tokens_per_second": 0} == {**alone, "tokens_per_second": 0}


def test_more_processes_than_shards_are_refused(
    target: Path, options: GenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        InputError, match=r"4 processes share 3 shards .*; start at most 3, or lower generate.shard_size"
    ):
        generate(tmp_path, target, options, seed=5)


def test_another_seed_gives_other_responses(
    finished: Path, target: Path, options: GenerateOptions, tmp_path: Path
) -> None:
    generate(tmp_path, target, replace(options, prompts=8), seed=6)
    assert contents(tmp_path)["shard-00000.jsonl"] != contents(finished)["shard-00000.jsonl"]


def test_every_shard_draws_its_own_numbers(target: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "one.jsonl", [{"instruction": "word"}])
    options = GenerateOptions(
        instructions=str(tmp_path / "one.jsonl"), prompts=4, temperatures=(1.0,), system_prompts=("",),
        max_new_tokens=8, shard_size=2,
    )  # fmt: skip
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
