"""What a served bundle answers: requests in OpenAI's words to replies of the decoding loop, and scores of given tokens.

Knows no sockets and no threads. How a request is read: request.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec_runtime.chat.replies import STOP, Piece, pieces
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import check_prompt, rules_for
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.serving.line import Watch
from edgespec_runtime.serving.metrics import Sums
from edgespec_runtime.serving.request import (
    AUTO,
    Fields,
    Refused,
    Request,
    read_chat,
    read_completion,
    read_messages,
    read_prompt,
)

MAX_SCORES = 2**20  # log-probabilities in one answer, 120 MB of memory each million
DEFAULT_TOKENS = 16  # OpenAI's, of a completion; a chat's reply may fill the context
REASONS = {"eos": "stop", STOP: "stop", "length": "length", "context": "length"}
Json = dict[str, Any]


@dataclass
class Asked:
    """A request that was checked, and the account of its reply.

    Attributes:
        head: the answer's id and kind, when it was made, the model, and the seed of its sampling: None where it is greedy.
        raw: whether it is a completion, whose reply goes on with the prompt's text, rather than a chat.
        computed: prompt tokens that the target computed; others were in its cache, and the last one is read with the first block.
        tokens: tokens of the reply so far. `counts` have more where a stop string ended it within a block.
    """

    request: Request
    prompt: list[int]
    how: DecodingOptions
    head: Json
    raw: bool
    computed: int = 0
    tokens: int = 0
    counts: RawCounts = field(default_factory=RawCounts)

    def usage(self, off: str | None) -> Json:
        """OpenAI's usage; `speculation` is ours: raw counts by position in the draft, seconds, and `off`.

        off: why no drafts are made now, None where some are.
        """
        counts, prompt = self.counts, len(self.prompt)
        seconds = {
            "prompt": counts.prefill_seconds,
            "draft": counts.draft_seconds,
            "verify": counts.verify_seconds,
            "rest": counts.loop_seconds,
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": max(0, prompt - 1 - self.computed)},
            "speculation": {
                "drafted": counts.drafted,
                "accepted": sum(counts.accepted),
                "blocks": counts.blocks,
                "tested_by_position": list(counts.tested),
                "accepted_by_position": list(counts.accepted),
                "seconds": {name: round(max(0.0, value), 6) for name, value in seconds.items()},
                "off": off,
            },
        }


class Service:
    """A loaded pair that answers requests, one at a time.

    Args:
        draft_length: that of a request without one; None: it is chosen, `max_draft_length` at most.

    Attributes:
        sums: what all replies came to.
    """

    def __init__(
        self,
        pair: Pair,
        name: str,
        draft_length: int | None,
        max_draft_length: int = DecodingOptions.max_draft_length,
    ) -> None:
        self.pair, self.name = pair, name
        self.draft_length, self.max_draft_length = draft_length, max_draft_length
        self.schedules = Schedules(pair, lambda text: None)
        self.sums = Sums()
        self.started = int(time.time())

    @property
    def context_length(self) -> int:
        return self.pair.target.engine.context_length

    def models(self) -> Json:
        speculation = {
            "drafter": self.pair.draft is not None,
            "draft_length": self.draft_length or AUTO,
            "rules": {name: kind.help for name, kind in rules_for(self.pair.draft).items()},
            "engine": f"{self.pair.backend} {self.pair.precision}",
        }
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "edgespec"}
        card |= {"max_model_len": self.context_length, "speculation": speculation}
        return {"object": "list", "data": [card]}

    def tokenize(self, body: Json) -> Json:
        fields = Fields(body)
        text = fields.text("prompt")
        self._check_size("prompt", text)
        ids = self.pair.tokenizer.encode(text, bos=fields.flag("add_special_tokens", usual=True))
        return {"tokens": ids, "count": len(ids), "max_model_len": self.context_length}

    def complete(self, body: Json) -> Asked:
        """Raises InputError or Refused for a request that cannot be answered."""
        request = read_completion(body, self.name)
        prompt = read_prompt(body, self.pair.target.engine.vocab_size)
        if isinstance(prompt, str):
            self._check_size("prompt", prompt)
            prompt = self.pair.tokenizer.encode(prompt, bos=request.bos)
        asked = self._asked(request, prompt, raw=True)
        scored = (len(prompt) * request.echo + asked.how.max_new_tokens) * (request.score or 0)
        if scored > MAX_SCORES:
            words = f"logprobs is {request.score}, which makes {scored} of them; at most {MAX_SCORES} are given: ask for fewer"
            raise Refused(400, words, "logprobs")
        return asked

    def chat(self, body: Json) -> Asked:
        """Raises InputError or Refused for a request that cannot be answered."""
        request = read_chat(body, self.name)
        messages = read_messages(body)
        self._check_size("messages", *(message["content"] for message in messages))
        return self._asked(request, self.pair.tokenizer.encode_chat(messages), raw=False)

    def answers(self, asked: Asked, watch: Watch) -> Iterator[Json]:
        """The pieces of the answer, or the one answer, in the line's thread. What `watch` raises ends it before the next pass."""
        return self._parts(asked, watch) if asked.request.stream else self._whole(asked, watch)

    def _check_size(self, field: str, *texts: str) -> None:
        """Refuse a text far beyond the context by its beginning: nothing else of this process runs while it is encoded."""
        context = self.context_length
        if tokens := self.pair.tokenizer.far_beyond(context, texts):
            words = f"{field} has more than {tokens} tokens and the context holds {context}; shorten it"
            raise Refused(400, words, field, "context_length_exceeded")

    def _asked(self, request: Request, prompt: list[int], *, raw: bool) -> Asked:
        """`raw`: a completion, not a chat. Raises InputError or Refused for a prompt that cannot be answered."""
        prefix, field, kind = ("chatcmpl", "messages", "chat.completion")
        if raw:
            prefix, field, kind = ("cmpl", "prompt", "text_completion")
        elif request.stream:
            kind += ".chunk"
        usual = DEFAULT_TOKENS if raw else self.context_length
        if request.speculative and self.pair.draft is None:
            words = "speculative is true; this server runs without a drafter: leave it out or give false"
            raise Refused(400, words, "speculative")
        how = request.options(self.context_length - len(prompt), usual, self.draft_length)
        how = replace(how, max_draft_length=self.max_draft_length)
        how = how if self.pair.draft is not None else plain(how)
        try:
            check_prompt(self.pair.target, self.pair.draft, prompt, how)
        except InputError as error:
            if len(prompt) < self.context_length:
                raise
            raise Refused(400, str(error), field, "context_length_exceeded") from error
        head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.name,
        }
        head |= {"object": kind, "seed": how.seed}
        return Asked(request, prompt, how, head, raw)

    @contextmanager
    def _turn(self, asked: Asked, watch: Watch) -> Iterator[Generator[Piece, None, None]]:
        """Both models for one request, and the pieces of its reply."""
        target = self.pair.target
        try:
            # Before the client is watched: costs are measured once, and one client that leaves must not undo it for the next.
            schedule = self.schedules.of(asked.how)
            for model in self.pair.models:
                model.before_pass = watch
            start = perf_counter()
            asked.computed = target.prefill(asked.prompt[:-1])
            asked.counts.prefill_seconds = perf_counter() - start
            said = pieces(
                self.pair,
                asked.prompt,
                asked.how,
                asked.counts,
                schedule,
                raw=asked.raw,
                stops=asked.request.stops,
            )
            with closing(said):
                yield said
        finally:
            for model in self.pair.models:
                model.before_pass = None
            self.sums.replied(asked.counts, asked.computed)

    def _answer(self, asked: Asked, *choices: Json, usage: bool) -> Json:
        """The answer or a piece of it."""
        made = {**asked.head, "choices": list(choices)}
        if usage:
            made["usage"] = asked.usage(self.schedules.why_no_drafts(asked.how))
        return made

    def _whole(self, asked: Asked, watch: Watch) -> Iterator[Json]:
        request, reply, text, finish, scores = asked.request, list[int](), "", "", None
        with self._turn(asked, watch) as said:
            for piece in said:
                reply += piece.tokens
                asked.tokens = len(reply)
                text += piece.text
                finish = piece.finish
            if request.score is not None:
                first = 0 if request.echo else len(asked.prompt)
                scores = self._scores([*asked.prompt, *reply], first, request.score, as_ids=request.as_ids)
        if request.echo and finish == STOP:  # the tokens say more than the text
            text = self.pair.tokenizer.decode(asked.prompt) + text
        elif request.echo:
            text = self.pair.tokenizer.decode([*asked.prompt, *reply])
        words: Json = {"text": text} if asked.raw else {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **words, "finish_reason": REASONS[finish]}
        if asked.raw:
            choice["logprobs"] = scores
        if request.ids:
            choice |= {"token_ids": reply, "prompt_token_ids": asked.prompt}
        yield self._answer(asked, choice, usage=True)

    def _parts(self, asked: Asked, watch: Watch) -> Iterator[Json]:
        """The pieces of a streamed reply. A chat's first one says who speaks, and comes with the first block.

        `speculation` of a piece is ours: whether its text is the drafter's, and of how many tokens it is.
        """
        request, tokens, opened = asked.request, 0, asked.raw

        def part(inside: Json, finish: str | None = None) -> Json:
            choice = {"index": 0, **inside, "finish_reason": finish}
            return self._answer(asked, choice, usage=request.running_usage)

        with self._turn(asked, watch) as said:
            for piece in said:
                if not opened:
                    yield part({"delta": {"role": "assistant", "content": ""}})
                    opened = True
                tokens += len(piece.tokens)
                asked.tokens += len(piece.tokens)
                if piece.text or piece.finish:
                    words: Json = {"text": piece.text} if asked.raw else {"delta": {"content": piece.text}}
                    words["speculation"] = {"accepted": piece.accepted, "tokens": tokens}
                    yield part(words, REASONS[piece.finish] if piece.finish else None)
                    tokens = 0
        if request.usage:
            yield self._answer(asked, usage=True)

    def _scores(self, ids: Sequence[int], first: int, count: int, *, as_ids: bool) -> Json:
        """The target's log-probability of each token from `first` on, at temperature 1, and its `count` most probable ones there.

        Of tokens with one text, the most probable counts. The first token of all has no distribution: nothing came before it.
        """
        engine = self.pair.target
        count = min(count, engine.engine.vocab_size)
        engine.rewind(0)
        own: list[float | None] = [None] * (not first)
        top: list[dict[str, float] | None] = [None] * (not first)
        for at in range(0, len(ids) - 1, engine.engine.block_length):
            piece = ids[at : min(len(ids) - 1, at + engine.engine.block_length)]
            logits = engine.forward(piece)
            before = max(0, first - 1 - at)  # rows of tokens that nobody asked for
            for given, following in zip(logits[before:], ids[at + before + 1 :], strict=False):
                # one at a time: of a large vocabulary a block of them is large
                row = given.astype(np.float64)
                row -= row.max()
                row -= np.log(np.exp(row).sum())
                best: list[int] = np.argpartition(-row, count - 1)[:count].tolist() if count else []
                own.append(float(row[following]))
                named: dict[str, float] = {}
                for token in sorted(best, key=lambda token: -row[token]):
                    named.setdefault(self._named(token, as_ids), float(row[token]))
                top.append(named)
        return {
            "tokens": [self._named(token, as_ids) for token in ids[first:]],
            "token_logprobs": own,
            "top_logprobs": top,
        }

    def _named(self, token: int, as_id: bool) -> str:
        return f"token_id:{token}" if as_id else self.pair.tokenizer.decode([token])


POSTS: dict[str, Callable[[Service, Json], Asked | Json]] = {
    "/v1/completions": Service.complete,
    "/v1/chat/completions": Service.chat,
    "/tokenize": Service.tokenize,
}
