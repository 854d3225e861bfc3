"""What a served bundle answers: requests in OpenAI's words to replies of the decoding loop, and scores of given tokens.

Knows no sockets. Fields beyond OpenAI's are those of vLLM: `prompt` as token ids, `return_token_ids`,
`return_tokens_as_token_ids`, /tokenize.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import InputError
from edgespec.metrics import RawCounts
from edgespec_runtime.bundle import Pair
from edgespec_runtime.decoding import DecodingOptions, plain
from edgespec_runtime.loop import check_prompt, decode
from edgespec_runtime.pair_schedule import Schedules

MAX_LOGPROBS = 256
MAX_MESSAGES = 4096
DEFAULT_TOKENS = 16  # OpenAI's, of a completion; a chat's reply may fill the context
REASONS = {"eos": "stop", "length": "length", "context": "length"}
Events = Generator[dict[str, Any], None, None]
UNSUPPORTED = ("stop", "suffix", "best_of", "logit_bias", "tools", "functions", "response_format")


class Refused(Exception):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Asked:
    """One request: how to decode, which scores to send, in which form."""

    prompt: list[int]
    how: DecodingOptions
    score: int | None
    echo: bool
    ids: bool
    as_ids: bool


class Service:
    """A loaded pair that answers one request at a time."""

    def __init__(self, pair: Pair, name: str, draft_length: int | None) -> None:
        self.pair, self.name, self.draft_length = pair, name, draft_length
        self.schedules = Schedules(pair, lambda text: None)
        self.lock = threading.Lock()
        self.started = int(time.time())

    @property
    def context_length(self) -> int:
        return self.pair.target.engine.context_length

    def models(self, _: dict[str, Any]) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "edgespec"}
        return {"object": "list", "data": [{**card, "max_model_len": self.context_length}]}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.pair.tokenizer.encode(_text(body, "prompt"))
        return {"tokens": ids, "count": len(ids), "max_model_len": self.context_length}

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        self._check(body)
        prompt = body.get("prompt")
        ids = self.pair.tokenizer.encode(prompt) if isinstance(prompt, str) else self._given_ids(prompt)
        asked = self._asked(body, ids, DEFAULT_TOKENS)
        if body.get("stream"):
            return self._events(asked, "text_completion", lambda text: {"text": text})
        text, reply, finish, scores = self._answer(asked)
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": scores}
        if asked.ids:
            choice |= {"token_ids": reply, "prompt_token_ids": ids}
        return self._envelope("text_completion", [choice], len(ids), len(reply))

    def chat(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        self._check(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
            raise Refused(400, f"messages must be a list of 1 to {MAX_MESSAGES}")
        chat = [{"role": _text(one, "role"), "content": _text(one, "content")} for one in messages]
        ids = self.pair.tokenizer.encode_chat(chat)
        asked = self._asked(body, ids, self.context_length)
        if body.get("stream"):
            return self._events(asked, "chat.completion.chunk", lambda text: {"delta": {"content": text}})
        text, reply, finish, _ = self._answer(asked)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return self._envelope("chat.completion", [choice], len(ids), len(reply))

    def _check(self, body: dict[str, Any]) -> None:
        if (model := body.get("model", self.name)) != self.name:
            raise Refused(404, f"there is no model {str(model)[:200]!r}; this is {self.name!r}")
        for name in UNSUPPORTED:
            if body.get(name):
                raise Refused(400, f"{name!r} is not supported; leave it out")
        if body.get("n", 1) != 1:
            raise Refused(400, "n must be 1")

    def _given_ids(self, prompt: Any) -> list[int]:
        size = self.pair.target.engine.vocab_size
        if not isinstance(prompt, list) or not all(
            type(token) is int and 0 <= token < size for token in prompt
        ):
            raise Refused(400, f"prompt must be a text or a list of token ids below {size}")
        return prompt

    def _asked(self, body: dict[str, Any], prompt: list[int], usual: int) -> _Asked:
        room = max(1, self.context_length - len(prompt))
        how = DecodingOptions(
            temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
            top_p=_number(body, "top_p", 1.0, 1e-6, 1.0),
            max_new_tokens=min(room, int(_number(body, "max_tokens", min(room, usual), 1, 2**31))),
            seed=int(_number(body, "seed", 0, 0, 2**63)),
            draft_length=self.draft_length,
        )
        how = how if self.pair.draft is not None else plain(how)
        score = body.get("logprobs")
        if score is not None and not (type(score) is int and 0 <= score <= MAX_LOGPROBS):
            raise Refused(400, f"logprobs must be a number from 0 to {MAX_LOGPROBS}")
        check_prompt(self.pair.target, self.pair.draft, prompt, how)
        flags = ("echo", "return_token_ids", "return_tokens_as_token_ids")
        return _Asked(prompt, how, score, *(bool(body.get(name)) for name in flags))

    def _pieces(self, asked: _Asked) -> Iterator[tuple[tuple[int, ...], str]]:
        """(tokens, why it ended or '') block by block."""
        schedule = self.schedules.of(asked.how)
        stop, counts = self.pair.tokenizer.stop_ids, RawCounts()
        target, draft = self.pair.target, self.pair.draft
        for block in decode(target, draft, asked.prompt, asked.how, stop, counts, schedule):
            yield block.tokens, block.finish

    def _answer(self, asked: _Asked) -> tuple[str, list[int], str, dict[str, Any] | None]:
        with self.lock:
            reply: list[int] = []
            finish = ""
            for tokens, ending in self._pieces(asked):
                reply += tokens
                finish = ending
            scores = None
            if asked.score is not None:
                first = 0 if asked.echo else len(asked.prompt)
                scores = self._scores([*asked.prompt, *reply], first, asked.score, as_ids=asked.as_ids)
        text = self.pair.tokenizer.decode([*asked.prompt, *reply] if asked.echo else reply)
        return text, reply, REASONS[finish], scores

    def _events(self, asked: _Asked, kind: str, part: Callable[[str], dict[str, Any]]) -> Events:
        stream, finish, count = self.pair.tokenizer.stream(), "", 0
        with self.lock:
            for tokens, ending in self._pieces(asked):
                count, finish = count + len(tokens), ending
                if text := stream.feed(tokens):
                    yield self._envelope(kind, [{"index": 0, **part(text), "finish_reason": None}])
        last = {"index": 0, **part(stream.finish()), "finish_reason": REASONS[finish]}
        yield self._envelope(kind, [last], len(asked.prompt), count)

    def _scores(self, ids: Sequence[int], first: int, count: int, *, as_ids: bool) -> dict[str, Any]:
        """The target's log-probability of each token from `first` on, at temperature 1, and its `count` most probable ones there.

        The first token of all has no distribution: nothing came before it.
        """
        engine = self.pair.target
        engine.rewind(0)
        own: list[float | None] = [None]
        top: list[dict[str, float] | None] = [None]
        for at in range(0, len(ids) - 1, engine.engine.block_length):
            piece = ids[at : min(len(ids) - 1, at + engine.engine.block_length)]
            logits = engine.forward(piece).astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            for row, following in zip(logits, ids[at + 1 :], strict=False):
                best: list[int] = np.argpartition(-row, count - 1)[:count].tolist() if count else []
                own.append(float(row[following]))
                named = sorted(best, key=lambda token: -row[token])
                top.append({self._named(token, as_ids): float(row[token]) for token in named})
        return {
            "tokens": [self._named(token, as_ids) for token in ids[first:]],
            "token_logprobs": own[first:],
            "top_logprobs": top[first:],
        }

    def _named(self, token: int, as_id: bool) -> str:
        return f"token_id:{token}" if as_id else self.pair.tokenizer.decode([token])

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], prompt: int = 0, reply: int | None = None
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "id": "edgespec",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }
        made["choices"] = choices
        if reply is not None:
            made["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": reply,
                "total_tokens": prompt + reply,
            }
        return made


def _text(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise Refused(400, f"{key!r} must be a text")
    return found


def _number(body: dict[str, Any], key: str, usual: float, least: float, most: float) -> float:
    found = body.get(key)
    if found is None:
        return usual
    if type(found) not in (int, float) or not least <= found <= most:
        raise InputError(f"{key} is {str(found)[:80]}; a number from {least:g} to {most:g} is wanted")
    return found  # type: ignore[no-any-return]


Action = Callable[[Service, dict[str, Any]], dict[str, Any] | Events]
ROUTES: dict[tuple[str, str], Action] = {
    ("GET", "/health"): lambda service, _: {"status": "ok"},
    ("GET", "/v1/models"): Service.models,
    ("POST", "/v1/completions"): Service.complete,
    ("POST", "/v1/chat/completions"): Service.chat,
    ("POST", "/tokenize"): Service.tokenize,
}
