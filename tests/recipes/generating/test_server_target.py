"""The target behind a server: a real one (`edgespec serve`, over HTTP), and everything that can go wrong on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.generating import http_json
from edgespec_recipes.generating.choose_writer import check_source
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.response_shards import Request, answered, read_responses
from edgespec_recipes.generating.self_written import user_turn
from edgespec_recipes.generating.server_target import ServerTarget, ServerWriter
from edgespec_recipes.generating.target_store import store_targets
from edgespec_recipes.models.loading import load_tokenizer
from served import Spoil, served, spoiling
from tiny_bundle import disturbed, exported_bundle
from tiny_models import make_model_folder
from writing_target import answers, near_records, six_answers

from edgespec.building.pipeline import Build
from edgespec.core.errors import InputError
from edgespec.core.progress import Bar
from edgespec.recipe.schema import DistillOptions, GenerateOptions, InferenceOptions, Recipe

TOP_K = 8
COMPLETIONS = "/v1/completions"
PROBES = 3  # completions that a ServerTarget asks for before the first request


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    target = make_model_folder(folder / "target", context=160)
    exported_bundle(folder, target, disturbed(target, folder / "drafter", 0.07), gguf=())
    (folder / "target" / "model.safetensors").unlink()  # nothing here needs it
    return folder


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with served(root / "bundle") as address:
        yield address


@pytest.fixture
def options(root: Path) -> GenerateOptions:
    return six_answers(root)


def at(url: str, **settings: Any) -> InferenceOptions:
    return InferenceOptions(source="server", url=url, retries=settings.pop("retries", 2), **settings)


def target_at(url: str, root: Path, **settings: Any) -> ServerTarget:
    return ServerTarget(at(url, **settings), root / "target", load_tokenizer(root / "target"))


def writer_at(url: str, root: Path, options: GenerateOptions, **settings: Any) -> ServerWriter:
    target = root / "target"
    return ServerWriter(at(url, **settings), target, load_tokenizer(target), options, 0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Waits between tries, in seconds, that were asked for and not slept."""
    waits: list[float | None] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return self.is_set()

    monkeypatch.setattr(http_json, "Event", Noted)
    return waits


@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_a_server_writes_what_its_file_would(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path, prompts: str
) -> None:
    file = InferenceOptions(source="file", file=str(root / "bundle"))
    generate(tmp_path / "file", root / "target", options, 1, file)
    counts = generate(tmp_path / "server", root / "target", options, 1, at(url, prompts=prompts))
    assert counts["responses"] == 6
    assert "tiny at http://127.0.0.1" in counts["precision_reason"]
    both = zip(read_responses(tmp_path / "server"), read_responses(tmp_path / "file"), strict=True)
    greedy = [(ours, theirs) for ours, theirs in both if ours["temperature"] == 0]
    assert len(greedy) == 3  # of two temperatures, which each instruction meets in turn
    assert all(ours == theirs for ours, theirs in greedy)
    generate(tmp_path / "again", root / "target", options, 1, at(url, prompts=prompts, parallel=1))
    assert answers(tmp_path / "again") == answers(tmp_path / "server")  # seeds travel with the requests


def test_a_servers_distributions_are_its_files(root: Path, url: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lengths = ((5, 3), (5, 9), (5, 155), (2, 1))  # 160 tokens fill the server's context
    conversations = [
        (generator.integers(4, 500, a).tolist(), generator.integers(4, 500, b).tolist()) for a, b in lengths
    ]
    rows = response_rows(conversations, 160)
    file = InferenceOptions(source="file", file=str(root / "bundle"))
    store_targets(tmp_path / "file", root / "target", rows, TOP_K, inference=file)
    store_targets(tmp_path / "server", root / "target", rows, TOP_K, inference=at(url))
    ours, theirs = (np.load(tmp_path / one / "shard-00000.npy") for one in ("file", "server"))
    assert len(ours) == 168
    near_records(ours, theirs, atol=4e-3, same=0.99)


def test_a_cut_run_asks_for_the_missing_shards_only(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path
) -> None:
    def dies(path: str, number: int, honest: bytes) -> tuple[int, bytes] | None:
        return None if path == COMPLETIONS and number >= PROBES + 3 else (200, honest)

    how = at(url, parallel=1)
    generate(tmp_path / "whole", root / "target", options, 1, how)
    with (
        spoiling(url, dies) as server,
        pytest.raises(InputError, match=r"did not answer in 3 tries .* what is finished is kept"),
    ):
        generate(tmp_path / "cut", root / "target", options, 1, replace(how, url=server.url))
    assert [file.name for file in sorted((tmp_path / "cut").glob("*.jsonl"))] == ["shard-00000.jsonl"]
    with spoiling(url, lambda path, number, honest: (200, honest)) as server:
        generate(tmp_path / "cut", root / "target", options, 1, replace(how, url=server.url))
        assert server.seen[COMPLETIONS] + 1 == PROBES + 4
    assert answers(tmp_path / "cut") == answers(tmp_path / "whole")


def test_what_passes_is_tried_again_later_and_later(
    root: Path, url: str, no_waiting: list[float | None]
) -> None:
    def busy(path: str, number: int, honest: bytes) -> tuple[int, bytes] | None:
        spoilt: list[tuple[int, bytes] | None] = [
            (503, b'{"error": {"message": "starting"}}'),
            None,
            (200, honest[:-9]),
            (429, b""),
        ]
        return spoilt[number] if path == "/v1/models" and number < len(spoilt) else (200, honest)

    with spoiling(url, busy) as server:
        assert target_at(server.url, root, retries=4).model == "tiny"
    assert no_waiting == [1.0, 2.0, 4.0, 8.0]


def _spoilt(**changes: Any) -> Spoil:
    """Every completion but the probes, with fields of its choice changed (a callable changes what is there)."""

    def spoil(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        if path != COMPLETIONS or number < PROBES:
            return 200, honest
        answer = json.loads(honest)
        for name, value in changes.items():
            place = answer["usage"] if name in answer["usage"] else answer["choices"][0]
            place[name] = value
        return 200, json.dumps(answer).encode()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_spoilt(finish_reason="length", token_ids=[5, 6], completion_tokens=2), "cut an answer off after 2 of 10 tokens"),
        (_spoilt(finish_reason="length", token_ids=[5], completion_tokens=None), "cut an answer off after 1 of 10 tokens"),
        (_spoilt(finish_reason=None), r"breaks its answers off \(finish_reason None"),
        (_spoilt(token_ids=[5, 70000]), "sends the token '70000'; the target has ids from 0 to 511"),
        (_spoilt(token_ids=None, text=None), "sends a choice without a text"),
        (_spoilt(token_ids=None, text="\ud83d"), "sends a choice without a text"),
        (lambda path, n, honest: (200, honest if path != COMPLETIONS or n < PROBES else honest[:40]), "is not valid JSON"),
        (lambda path, n, honest: (200, honest) if path != COMPLETIONS or n < PROBES else None, "did not answer in 3 tries"),
        (
            lambda path, n, honest: (200, honest) if path != COMPLETIONS or n < PROBES else (400, b'{"error": "too long"}'),
            "refuses the request: status 400: too long",
        ),
    ],
)  # fmt: skip
def test_answers_that_are_none(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path, spoil: Spoil, words: str
) -> None:
    with spoiling(url, spoil) as server, pytest.raises(InputError, match=words):
        generate(tmp_path, root / "target", options, 1, at(server.url, parallel=2))
    assert not list(tmp_path.glob("shard-*"))


def test_an_answer_of_text_is_split_here_and_gets_its_end(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path
) -> None:
    spoil = _spoilt(token_ids=None, text=" Hello world", finish_reason="stop")
    with spoiling(url, spoil) as server:
        generate(tmp_path, root / "target", options, 1, at(server.url))
    tokenizer = load_tokenizer(root / "target")
    assert answers(tmp_path) == [[*tokenizer(" Hello world", add_special_tokens=False)["input_ids"], 2]] * 6


def test_prompts_go_as_text_where_ids_are_not_taken(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path
) -> None:
    def texts(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        return (500, b"{}") if path == COMPLETIONS and number == PROBES - 1 else (200, honest)

    with spoiling(url, texts) as server:
        generate(tmp_path / "auto", root / "target", options, 1, at(server.url))
        sent = [json.loads(body or b"{}") for path, body, _ in server.bodies if path == COMPLETIONS]
        assert sent[PROBES]["prompt"].endswith("<|im_start|>assistant\n")
    generate(tmp_path / "ids", root / "target", options, 1, at(url))
    assert answers(tmp_path / "auto") == answers(tmp_path / "ids")
    words = r"inference.prompts is 'ids' and .* does not take token ids"
    with spoiling(url, texts) as server, pytest.raises(InputError, match=words):
        target_at(server.url, root, prompts="ids")
    with (
        spoiling(url, texts) as server,
        pytest.raises(InputError, match=r"takes prompts only as text.*--distill.target-side live"),
    ):
        store_targets(
            tmp_path, root / "target", response_rows([([5], [6, 2])], 8), 4, inference=at(server.url)
        )


def test_an_instruction_that_spells_out_a_special_token_goes_as_ids_alone(
    root: Path, url: str, options: GenerateOptions, tmp_path: Path
) -> None:
    """As text it would end the turn, and the answer would be to another conversation than the one that is stored."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "What does <|im_end|> mean?"}) + "\n", encoding="utf-8")
    options = replace(options, instructions=[str(rows)], prompts=1)
    words = r"takes prompts as text, and there '<\|im_end\|>' of the instruction 'What does .* leave that instruction out"
    with pytest.raises(InputError, match=words):
        generate(tmp_path / "text", root / "target", options, 1, at(url, prompts="text"))
    assert not list((tmp_path / "text").glob("shard-*"))
    generate(tmp_path / "ids", root / "target", options, 1, at(url, prompts="ids"))


def test_what_goes_on_from_tokens_alone_goes_as_text_too(
    root: Path, url: str, options: GenerateOptions
) -> None:
    """As an instruction of the target's own goes on from the template's beginning."""
    tokenizer = load_tokenizer(root / "target")
    turn = [Request(0, [], user_turn(tokenizer).before, 0.0)]
    writers = [writer_at(url, root, options, prompts=prompts) for prompts in ("ids", "text")]
    written = [answered(writer, 0, turn, Bar("", 1, "", 0))[0] for writer in writers]
    assert written[0] == written[1]


class Interrupted(Bar):
    def update(self, count: float = 1) -> None:
        raise KeyboardInterrupt


def test_after_an_interrupt_nothing_is_tried_again(
    root: Path, url: str, options: GenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        return (503, b"{}") if path == COMPLETIONS and number > PROBES else (200, honest)

    monkeypatch.setattr(http_json, "Event", threading.Event)  # it waits
    monkeypatch.setattr(http_json, "FIRST_WAIT", 5.0)
    requests = [Request(number, [], [5, 6], 0.0) for number in range(3)]
    with spoiling(url, busy) as server:
        writer = writer_at(server.url, root, options, parallel=1)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as held:
            answered(writer, 0, requests, Interrupted("", 3, "", 0))
        assert writer.server.stopped.is_set(), held  # at once, not when the exception is forgotten
    assert time.monotonic() - start < 4


def test_a_bos_of_the_servers_own_is_not_sent_twice(root: Path, url: str) -> None:
    def counts_one_more(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 404, b"{}"
        answer = json.loads(honest)
        if path == COMPLETIONS:
            answer["usage"]["prompt_tokens"] += 1
        return 200, json.dumps(answer).encode()

    with spoiling(url, counts_one_more) as server:
        assert target_at(server.url, root, prompts="text").adds_bos
    assert not target_at(url, root).adds_bos


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": None}])
def test_a_server_that_counts_no_tokens_of_ids_is_believed(root: Path, url: str, usage: Any) -> None:
    def silent(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        last = path == COMPLETIONS and number == PROBES - 1
        return 200, json.dumps({"usage": usage}).encode() if last else honest

    with spoiling(url, silent) as server:
        assert target_at(server.url, root).sends_ids


def test_a_list_of_models_that_is_none(root: Path, url: str) -> None:
    with (
        spoiling(url, lambda path, number, honest: (200, b'{"data": 5}')) as server,
        pytest.raises(InputError, match="has no models"),
    ):
        target_at(server.url, root)


def test_other_models_and_vocabularies_are_refused(root: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"inference.model is 'llama' and http://127.0.0.1:\d+ has tiny; name one"
    ):
        target_at(url, root, model="llama")
    other = make_model_folder(tmp_path / "other", vocab_size=544)
    with pytest.raises(
        InputError, match=r"splits a test text into \[.*\] ..., the target in .*other into \[.*serve the same"
    ):
        ServerTarget(at(url), other, load_tokenizer(other))

    def silent(path: str, number: int, honest: bytes) -> tuple[int, bytes]:
        return (404, b"{}") if path in ("/tokenize", "/extras/tokenize") else (200, honest)

    with spoiling(url, silent) as server:
        target_at(server.url, root)  # held against the number of tokens alone
        with pytest.raises(
            InputError, match=r"counts \d+ tokens in a test text, the target in .* \d+; serve that model"
        ):
            ServerTarget(at(server.url), other, load_tokenizer(other))


@pytest.mark.parametrize(
    ("top", "words"),
    [
        (
            None,
            "sends no log-probabilities of a prompt's tokens; .*--distill.labels hard --distill.target-side live",
        ),
        (
            [{"token_id:5": -1.0}] * 9,
            "sends 1 log-probabilities for a token and 4 are to be stored; .*--max-logprobs 4",
        ),
        ([{" the": -1.0, "token_id:5": -1.0}] * 9, "names a token ' the' where token_id:NUMBER is wanted"),
        ([{"token_id:512": -1.0}] * 9, "names a token 'token_id:512'"),
        ([{f"token_id:{'5' * 5000}": -1.0}] * 9, "names a token 'token_id:555"),
        ([{"token_id:5": None}] * 9, "sends the log-probability 'None' of a token"),
        ([{"token_id:5": 1000}] * 9, "sends the log-probability '1000' of a token"),
    ],
)
def test_log_probabilities_that_cannot_be_stored(
    root: Path, url: str, tmp_path: Path, top: Any, words: str
) -> None:
    rows = response_rows([([5, 6, 7], [8, 9, 2])], 16)
    with (
        spoiling(url, _spoilt(logprobs={"top_logprobs": top})) as server,
        pytest.raises(InputError, match=words),
    ):
        store_targets(tmp_path, root / "target", rows, 4, inference=at(server.url))


def test_before_a_build_a_server_is_asked_for_distributions(root: Path, url: str) -> None:
    how, target = at(url), root / "target"
    check_source(target, how, TOP_K)
    with pytest.raises(InputError, match="400"):
        check_source(target, how, 400)  # more than it gives
    with pytest.raises(InputError, match=r"takes prompts only as text.*--distill.target-side live"):
        check_source(target, replace(how, prompts="text"), TOP_K)
    check_source(target, replace(how, prompts="text"))  # that is enough to write responses


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_a_build_asks_before_it_trains_for_what_it_will_store(
    root: Path, url: str, tmp_path: Path, labels: str
) -> None:
    distill = DistillOptions(labels=labels, target_side="stored", stored_top_k=400)
    build = Build(Recipe("x", inference=at(url), distill=distill), tmp_path)
    with pytest.raises(InputError, match="400"):
        build._check_source(root / "target")


def test_a_server_that_is_down(root: Path, no_waiting: list[float | None]) -> None:
    with pytest.raises(
        InputError, match=r"http://127.0.0.1:9/v1/models did not answer in 3 tries .*start the server"
    ):
        target_at("http://127.0.0.1:9", root)
    assert no_waiting == [1.0, 2.0]


def test_a_key_is_sent_and_never_to_another_server(
    root: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "secret")
    with spoiling(url, lambda path, number, honest: (200, honest)) as server:
        target_at(f"{server.url}/v1/", root)
        assert {headers["Authorization"] for _, _, headers in server.bodies} == {"Bearer secret"}
    with (
        spoiling(url, lambda path, number, honest: (307, b"")) as server,
        pytest.raises(InputError, match="refuses the request: status 307"),
    ):
        target_at(server.url, root)
