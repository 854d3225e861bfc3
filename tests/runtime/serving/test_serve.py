"""edgespec serve over real sockets: OpenAI's words, and speculation that changes nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from altered_bundle import change_manifest, with_tokenizer
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.serving import serve
from edgespec_runtime.serving.listening import Server
from served import CHAT, ask, listening, served, stream
from tiny_sentencepiece import words_of_llama_2

from edgespec.core.metrics import RawCounts


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    with served(bundle) as address:
        yield address


def plain_reply(bundle: Path, text: str | None, count: int) -> tuple[list[int], str]:
    """The target's own greedy reply to the chat above, or to a bare text, and its words."""
    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        tokenizer = pair.tokenizer
        prompt = (
            tokenizer.encode(text) if text else tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        )
        how = plain(DecodingOptions(max_new_tokens=count))
        blocks = decode(pair.target, None, prompt, how, tokenizer.stop_ids, RawCounts())
        ids = [token for block in blocks for token in block.tokens]
        return ids, tokenizer.decode(ids)
    finally:
        pair.close()


def test_a_served_reply_is_the_targets(bundle: Path, url: str) -> None:
    _, words = plain_reply(bundle, None, 12)
    status, answer = ask(url, "/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": words}
    ids, words = plain_reply(bundle, "What is", 7)
    body = {"prompt": "What is", "max_tokens": 7, "temperature": 0, "return_token_ids": True}
    status, answer = ask(url, "/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (words, ids)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert choice["finish_reason"] == ("stop" if ids[-1] == 2 else "length")
    given = {**body, "prompt": choice["prompt_token_ids"]}
    assert ask(url, "/v1/completions", given)[1]["choices"][0]["token_ids"] == ids


def test_a_stream_is_the_reply_in_pieces(url: str) -> None:
    whole = ask(url, "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    events = stream(url, "/v1/chat/completions", CHAT)
    pieces = [event["choices"][0] for event in events]
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in piece["delta"] for piece in pieces[1:])
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert not any("usage" in event for event in events)
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] in ("stop", "length")
    body = {"prompt": "What is", "max_tokens": 7, "temperature": 0}
    text = ask(url, "/v1/completions", body)[1]["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in stream(url, "/v1/completions", body)) == text


def test_a_stream_counts_its_tokens_when_asked(url: str) -> None:
    whole = ask(url, "/v1/chat/completions", CHAT)[1]
    *events, last = stream(url, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    for usage in (last["usage"], whole["usage"]):
        assert min(usage["speculation"].pop("seconds").values()) >= 0
        assert usage.pop("prompt_tokens_details")["cached_tokens"] in (0, usage["prompt_tokens"] - 1)
    assert last["usage"] == whole["usage"]
    assert last["usage"]["speculation"]["drafted"] > 0
    assert all(len(event["choices"]) == 1 for event in events)


def test_a_seed_is_said_and_gives_its_reply_again(url: str) -> None:
    body = {**CHAT, "temperature": 1.0, "max_tokens": 20}
    answers = [ask(url, "/v1/chat/completions", body)[1] for _ in range(4)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) > 1
    seeds = [answer["seed"] for answer in answers]
    assert len(set(seeds)) == 4
    assert all(type(seed) is int for seed in seeds)
    for path in ("/v1/chat/completions", "/v1/completions"):
        given = {**body, "prompt": "a", "seed": 11}
        again = [ask(url, path, given)[1] for _ in range(3)]
        assert len({json.dumps(answer["choices"]) for answer in again}) == 1
        assert {answer["seed"] for answer in again} == {11}
        assert {event["seed"] for event in stream(url, path, given)} == {11}
        drawn = {event["seed"] for event in stream(url, path, {**given, "seed": None})}
        assert len(drawn) == 1
        assert drawn != {11}
    assert ask(url, "/v1/chat/completions", CHAT)[1]["seed"] is None  # greedy: there is nothing to draw


def test_a_seed_gives_its_reply_whatever_the_draft_length(bundle: Path) -> None:
    """Chosen draft lengths depend on the machine's timing; the text for a given seed does not."""
    body = {**CHAT, "temperature": 1.2, "max_tokens": 40, "seed": 5}
    texts = set()
    for draft_length in (1, 2, 7, None):
        with listening(bundle, draft_length=draft_length) as server:
            for _ in range(3):
                answer = ask(server.url, "/v1/chat/completions", body)[1]
                texts.add(answer["choices"][0]["message"]["content"])
                # what is learnt goes on changing
                ask(server.url, "/v1/chat/completions", {**body, "seed": None})
    assert len(texts) == 1


def test_sampling_is_cut_as_asked(bundle: Path, url: str) -> None:
    """At a temperature of 100 tokens are nearly equally probable; a cut that keeps one of them makes it greedy all the same."""
    _, words = plain_reply(bundle, None, 12)
    hot = {**CHAT, "temperature": 100}
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        answer = ask(url, "/v1/chat/completions", {**hot, **cut})[1]
        assert answer["choices"][0]["message"]["content"] == words, cut
    assert ask(url, "/v1/chat/completions", hot)[1]["choices"][0]["message"]["content"] != words


def test_what_clients_send_beside_the_text(url: str) -> None:
    """Nulls, neutral values, unknown fields, text parts: the same answer as without them."""
    words = ask(url, "/v1/chat/completions", CHAT)[1]["choices"]
    nulls = dict.fromkeys(("n", "model", "logprobs", "stop", "tools", "seed", "stream", "stream_options"))
    more = {"logprobs": False, "response_format": {"type": "text"}, "n": 1, "user": "me", "whatever": [1]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for extra in (nulls, more, {"messages": parts}, {"max_tokens": None, "max_completion_tokens": 12}):
        status, answer = ask(url, "/v1/chat/completions", {**CHAT, **extra})
        assert (status, answer["choices"]) == (200, words)
    three = {**CHAT, "max_tokens": None, "max_completion_tokens": 3}
    assert ask(url, "/v1/chat/completions", three)[1]["usage"]["completion_tokens"] == 3
    chat = [CHAT["messages"][0], {"role": "assistant", "content": None}, CHAT["messages"][0]]  # type: ignore[index]
    assert ask(url, "/v1/chat/completions", {**CHAT, "messages": chat})[0] == 200


def test_log_probabilities_are_those_of_the_logits(bundle: Path, url: str) -> None:
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 3,
        "echo": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = ask(url, "/v1/completions", body)[1]["choices"][0]
    scores, ids = choice["logprobs"], [5, 6, 7, *choice["token_ids"]]
    assert scores["tokens"] == [f"token_id:{token}" for token in ids]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    alone = ask(url, "/v1/completions", {**body, "echo": False})[1]["choices"][0]["logprobs"]
    assert alone == {name: values[3:] for name, values in scores.items()}
    pair = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        logits = pair.target.forward(ids).astype(float)
    finally:
        pair.close()
    for place, token in enumerate(ids[1:]):
        normaliser = math.log(sum(math.exp(value) for value in logits[place]))
        assert scores["token_logprobs"][place + 1] == pytest.approx(
            logits[place][token] - normaliser, abs=1e-4
        )
        best = sorted(range(len(logits[place])), key=lambda one: -logits[place][one])[:3]
        assert list(scores["top_logprobs"][place + 1]) == [f"token_id:{one}" for one in best]


@pytest.fixture(scope="module")
def words(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bundle whose tokenizer is of Llama 2's kind."""
    folder = tmp_path_factory.mktemp("words") / "bundle"
    with listening(with_tokenizer(bundle, folder, words_of_llama_2())) as server:
        yield server.url


def test_a_completion_goes_on_with_the_prompts_text(words: str) -> None:
    """With the blank that it begins with, which the decoder takes off a text that stands alone; whole, echoed and streamed."""
    tokenizer, blanks = words_of_llama_2(), 0
    for number in range(8):
        prompt = f"w5 w{number}"
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        choice = ask(words, "/v1/completions", {**body, "return_token_ids": True})[1]["choices"][0]
        named = [str(tokenizer.id_to_token(token)) for token in choice["token_ids"] if token > 2]
        text = "".join(named).replace("▁", " ")
        blanks += text.startswith(" ")
        assert choice["text"] == text
        events = stream(words, "/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in events) == text
        echoed = ask(words, "/v1/completions", {**body, "echo": True})[1]["choices"][0]["text"]
        assert echoed == prompt + text
    assert blanks > 0
    chat = ask(words, "/v1/chat/completions", {**CHAT, "max_tokens": 4})[1]["choices"][0]["message"]
    assert not chat["content"].startswith(" ")


def test_a_text_gets_a_bos_and_token_ids_none(words: str) -> None:
    def seen(prompt: object, **more: bool) -> object:
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more}
        choice = ask(words, "/v1/completions", body)[1]["choices"][0]
        if isinstance(prompt, str):
            assert ask(words, "/tokenize", body)[1]["tokens"] == choice["prompt_token_ids"]
        return choice["prompt_token_ids"]

    assert seen("w5 w6") == seen("<s>w5 w6") == seen("w5 w6", add_special_tokens=True) == [1, 8, 9]
    for ids in (seen("w5 w6", add_special_tokens=False), seen([8, 9]), seen([8, 9], add_special_tokens=True)):
        assert ids == [8, 9]


def test_of_tokens_with_one_text_the_most_probable_counts(words: str) -> None:
    def likely(*, as_ids: bool) -> dict[str, float]:
        body = {"prompt": [8], "max_tokens": 1, "temperature": 0, "logprobs": 256}
        body["return_tokens_as_token_ids"] = as_ids
        found: dict[str, float] = ask(words, "/v1/completions", body)[1]["choices"][0]["logprobs"][
            "top_logprobs"
        ][0]
        return found

    by_text, by_id = likely(as_ids=False), likely(as_ids=True)
    tokenizer, best = words_of_llama_2(), dict[str, float]()
    for name, value in by_id.items():
        best.setdefault(tokenizer.decode([int(name.removeprefix("token_id:"))]), value)
    assert len(best) < len(by_id) == 256
    assert list(by_text.items()) == list(best.items())


def test_a_devices_settings_are_the_servers_defaults(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "device")
    device = {"name": "raspberry-pi", "draft_length": 2, "max_draft_length": 4, "context": 64}
    change_manifest(tmp_path / "device", lambda value: value.update(device=device))
    with served(tmp_path / "device") as address:  # with a draft length of its own
        card = ask(address, "/v1/models")[1]["data"][0]
    assert (card["max_model_len"], card["speculation"]["draft_length"]) == (64, 3)


def test_a_devices_longest_draft_bounds_what_the_server_chooses(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundle, tmp_path / "device")
    device = {"name": "raspberry-pi", "draft_length": None, "max_draft_length": 4, "context": 64}
    change_manifest(tmp_path / "device", lambda value: value.update(device=device))
    seen: list[int] = []

    def look(server: Server) -> None:
        seen.extend(server.service.chat({**CHAT, **how}).how.max_draft_length for how in ({}, {"seed": 1}))
        server.line.close()
        server.listener.socket.close()

    monkeypatch.setattr(Server, "serve_forever", look)
    for folder in (tmp_path / "device", bundle):
        assert serve.run({"bundle": str(folder), "port": 0}) == 0
    assert seen == [4, 4, 8, 8]


def test_what_is_served_is_said(url: str) -> None:
    assert ask(url, "/health") == (200, {"status": "ok"})
    status, models = ask(url, "/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "target", 256)
    assert ask(url, "/tokenize", {"prompt": "Hello"})[1]["count"] > 0
