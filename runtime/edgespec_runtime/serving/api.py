"""What a served bundle answers: requests in OpenAI's words to replies of the decoding loop, and scores of given tokens.

Knows no sockets. How a request is read: serve_request.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import check_prompt, decode
from edgespec_runtime.decoding.options import Block, DecodingOptions, plain
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.serving.request import (
    Fields,
    Refused,
    Request,
    read_chat,
    read_completion,
    read_messages,
    read_prompt,
)
from edgespec_runtime.serving.turns import Turns, Watch

DEFAULT_TOKENS = 16  # OpenAI's, of a completion; a chat's reply may fill the context
REASONS = {"eos": "stop", "length": "length", "context": "length"}
Events = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class _Asked:
    """One request about to be answered. `field`: what its prompt is called."""

    request: Request
    field: str
    prompt: list[int]
    how: DecodingOptions


class _Envelope:
    """What every piece of one answer begins with: its id, when it was made, the seed of its sampling (None: greedy)."""

    def __init__(self, prefix: str, model: str, asked: _Asked) -> None:
        drawn = asked.request.seed is not None or asked.how.temperature > 0
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._seed = {"seed": asked.how.seed if drawn else None}
        self._prompt = len(asked.prompt)

    def around(self, kind: str, *choices: dict[str, Any], reply: int | None = None) -> dict[str, Any]:
        """An answer or a piece of one. `reply`: tokens of the whole reply, for the usage."""
        made = {**self._head, "object": kind, **self._seed, "choices": list(choices)}
        if reply is not None:
            made["usage"] = {
                "prompt_tokens": self._prompt,
                "completion_tokens": reply,
                "total_tokens": self._prompt + reply,
            }
        return made


class Service:
    """A loaded pair that answers one request at a time, in the order they came.

    Whoever asks passes a `watch`: it is called while the request waits and before every pass of a model. What it raises ends the
    reply there, and the next request has its turn.
    """

    def __init__(self, pair: Pair, name: str, draft_length: int | None) -> None:
        self.pair, self.name, self.draft_length = pair, name, draft_length
        self.schedules = Schedules(pair, lambda text: None)
        self.turns = Turns()
        self.started = int(time.time())

    @property
    def context_length(self) -> int:
        return self.pair.target.engine.context_length

    def models(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "edgespec"}
        return {"object": "list", "data": [{**card, "max_model_len": self.context_length}]}

    def tokenize(self, body: dict[str, Any], _: Watch) -> dict[str, Any]:
        ids = self.pair.tokenizer.encode(Fields(body).text("prompt"))
        return {"tokens": ids, "count": len(ids), "max_model_len": self.context_length}

    def complete(self, body: dict[str, Any], watch: Watch) -> dict[str, Any] | Events:
        request = read_completion(body, self.name)
        prompt = read_prompt(body, self.pair.target.engine.vocab_size)
        ids = self.pair.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        asked = self._asked(request, "prompt", ids, DEFAULT_TOKENS)
        envelope = _Envelope("cmpl", self.name, asked)
        if request.stream:
            return self._events(asked, watch, envelope, "text_completion", lambda text: {"text": text})
        text, reply, finish, scores = self._answer(asked, watch)
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": scores}
        if request.ids:
            choice |= {"token_ids": reply, "prompt_token_ids": ids}
        return envelope.around("text_completion", choice, reply=len(reply))

    def chat(self, body: dict[str, Any], watch: Watch) -> dict[str, Any] | Events:
        request = read_chat(body, self.name)
        ids = self.pair.tokenizer.encode_chat(read_messages(body))
        asked = self._asked(request, "messages", ids, self.context_length)
        envelope = _Envelope("chatcmpl", self.name, asked)
        if request.stream:
            kind, first = "chat.completion.chunk", {"delta": {"role": "assistant", "content": ""}}
            return self._events(
                asked, watch, envelope, kind, lambda text: {"delta": {"content": text}}, first
            )
        text, reply, finish, _ = self._answer(asked, watch)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return envelope.around("chat.completion", choice, reply=len(reply))

    def _asked(self, request: Request, field: str, prompt: list[int], usual: int) -> _Asked:
        """Raises InputError or Refused for a prompt that cannot be answered."""
        how = request.options(self.context_length - len(prompt), usual, self.draft_length)
        how = how if self.pair.draft is not None else plain(how)
        try:
            check_prompt(self.pair.target, self.pair.draft, prompt, how)
        except InputError as error:
            if len(prompt) < self.context_length:
                raise
            raise Refused(400, str(error), field, "context_length_exceeded") from error
        return _Asked(request, field, prompt, how)

    @contextmanager
    def _turn(self, watch: Watch) -> Iterator[None]:
        """Both models for one request."""
        models = [model for model in (self.pair.target, self.pair.draft) if model is not None]
        with self.turns.one(watch):
            try:
                for model in models:
                    model.before_pass = watch
                yield
            finally:
                for model in models:
                    model.before_pass = None

    def _blocks(self, asked: _Asked) -> Generator[Block, None, None]:
        schedule = self.schedules.of(asked.how)
        stop, counts = self.pair.tokenizer.stop_ids, RawCounts()
        return decode(self.pair.target, self.pair.draft, asked.prompt, asked.how, stop, counts, schedule)

    def _answer(self, asked: _Asked, watch: Watch) -> tuple[str, list[int], str, dict[str, Any] | None]:
        request = asked.request
        with self._turn(watch):
            reply: list[int] = []
            finish = ""
            with closing(self._blocks(asked)) as blocks:
                for block in blocks:
                    reply += block.tokens
                    finish = block.finish
            scores = None
            if request.score is not None:
                first = 0 if request.echo else len(asked.prompt)
                scores = self._scores([*asked.prompt, *reply], first, request.score, as_ids=request.as_ids)
        text = self.pair.tokenizer.decode([*asked.prompt, *reply] if request.echo else reply)
        return text, reply, REASONS[finish], scores

    def _events(
        self,
        asked: _Asked,
        watch: Watch,
        envelope: _Envelope,
        kind: str,
        part: Callable[[str], dict[str, Any]],
        opening: dict[str, Any] | None = None,
    ) -> Events:
        """The pieces of a streamed reply; `opening`, if any, is the first one and comes with the first block."""

        def piece(words: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return envelope.around(kind, {"index": 0, **words, "finish_reason": finish})

        stream, finish, count = self.pair.tokenizer.stream(), "", 0
        with self._turn(watch), closing(self._blocks(asked)) as blocks:
            for block in blocks:
                if opening is not None and not count:
                    yield piece(opening)
                count, finish = count + len(block.tokens), block.finish
                if text := stream.feed(block.tokens):
                    yield piece(part(text))
        yield piece(part(stream.finish()), REASONS[finish])
        if asked.request.usage:
            yield envelope.around(kind, reply=count)

    def _scores(self, ids: Sequence[int], first: int, count: int, *, as_ids: bool) -> dict[str, Any]:
        """The target's log-probability of each token from `first` on, at temperature 1, and its `count` most probable ones there.

        The first token of all has no distribution: nothing came before it.
        """
        engine = self.pair.target
        count = min(count, engine.engine.vocab_size)
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


Ask = Callable[[Service, dict[str, Any], Watch], dict[str, Any] | Events]
GETS: dict[str, Callable[[Service], dict[str, Any]]] = {
    "/health": lambda service: {"status": "ok"},
    "/v1/models": Service.models,
}
POSTS: dict[str, Ask] = {
    "/v1/completions": Service.complete,
    "/v1/chat/completions": Service.chat,
    "/tokenize": Service.tokenize,
}
