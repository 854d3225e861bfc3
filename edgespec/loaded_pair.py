"""A loaded pair from Python: its replies, one at a time, and its chats. What `edgespec.load` returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping
from edgespec.core.texts import check_text

if TYPE_CHECKING:
    from edgespec_runtime.chat.replies import Piece
    from edgespec_runtime.decoding.options import DecodingOptions
    from edgespec_runtime.pair.bundle import Pair as OpenPair
    from edgespec_runtime.text.tokenizer import Message


class Pair:
    """A loaded target and its drafter. Use it in a `with` block, or call `close`. One reply at a time.

    A pair that nobody has any more, as after `pair = edgespec.load(...)` in a notebook's cell that runs again, is closed.
    """

    def __init__(self, pair: OpenPair) -> None:
        from edgespec_runtime.chooser.pair_schedule import Schedules

        self._pair = pair
        self._schedules = Schedules(pair, lambda text: print(text, file=sys.stderr))
        self._counts = RawCounts()
        self._end: Callable[[], None] | None = None  # ends the reply under way
        self._closed = False
        self._lock = Lock()
        # once: by `close`, or where nobody has the pair any more, since llama.cpp's memory is none of Python's
        self._free = finalize(self, pair.close)
        self._free.atexit = False  # the system frees it then

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free both models. A reply that is under way ends, and no other begins.

        Raises InputError while another thread waits for the next piece of a reply.
        """
        with self._alone():
            if not self._closed:
                self._end_reply()
                self._closed = True
                self._free()

    @property
    def stats(self) -> dict[str, Any]:
        """All replies so far: tokens_per_second, block_efficiency (τ), acceptance_rate (α), mbsu_*, raw counts."""
        from edgespec_runtime.decoding.speed import dump, metrics_of

        return {**metrics_of(self._counts, None, self._pair.cost_ratios), "counts": dump(self._counts)}

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        draft: bool = True,
        stop: str | Sequence[str] = (),
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """The reply to a user's message, or to a chat of {"role", "content"} messages, as pieces of text.

        Args:
            draft: speculate; without it the target decodes alone.
            stop: a text that ends the reply, or up to 4 of them; what comes out ends before it.
            options: temperature, top_p, max_new_tokens, seed, rule, draft_length ... of `edgespec generate`.

        Raises InputError for an unknown option, a stop or messages of another form, a prompt that leaves no room in the context,
        and where another reply of this pair has begun, or another thread waits for a piece of one.
        """
        from edgespec_runtime.chat.conversation import check_size
        from edgespec_runtime.text.prompts import messages_of
        from edgespec_runtime.text.stops import stops_of

        try:
            stops = stops_of(stop)
        except InputError as error:
            raise InputError(f"stop is {stop!r:.80}; {error}") from error
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        check_text(given, "the prompt")
        chat = messages_of({"messages": given}, "the prompt")
        system = chat[0]["content"] if chat[0]["role"] == "system" else ""
        how = self._how(draft, options, system)
        tokenizer, context = self._pair.tokenizer, self._pair.target.engine.context_length
        check_size(tokenizer, "the prompt", [message["content"] for message in chat], context)
        ids = tokenizer.encode_chat(chat)
        yield from self._reply(lambda: ids, how, stops=stops)

    def chat(self, system: str = "") -> Chat:
        """A conversation whose turns stay in both models' caches. Raises InputError for a system prompt with half a character."""
        check_text(system, "the system prompt")
        return Chat(self, system)

    def _reply(
        self,
        prompt: Callable[[], list[int]],
        how: DecodingOptions,
        remember: Callable[[list[int], list[int]], None] = lambda ids, reply: None,
        stops: Sequence[str] = (),
    ) -> Generator[Piece, None, None]:
        """The pieces of a reply. `prompt` gives its ids once an earlier reply has ended; `remember` gets them and the reply's."""
        from edgespec_runtime.chat.replies import pieces

        counts, reply = RawCounts(), list[int]()
        with self._alone():
            self._check_open()
            self._end_reply()  # one that was left: the caches hold what it showed from now on
            ids = prompt()
            said = pieces(self._pair, ids, how, counts, self._schedules.of(how), stops=stops)

            def end() -> None:
                said.close()
                self._counts.add(counts)
                remember(ids, reply)

            self._end = end
        try:
            while True:
                with self._alone():
                    self._check_open()
                    if self._end is not end:
                        raise InputError(
                            "another reply of this pair has begun; a pair gives one reply at a time"
                        )
                    piece = next(said, None)
                    if piece is None:
                        return
                    reply += piece.tokens
                yield piece
        finally:
            with suppress(InputError), self._alone():  # else the next reply, or `close`, ends this one
                if self._end is end:
                    self._end_reply()

    def _end_reply(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread uses the models meanwhile. Raises InputError at once where one does."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                "this pair is giving another reply in another thread; wait for its end, or load the bundle a second time"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this pair is closed; load it again")

    def _how(self, draft: bool, options: Mapping[str, Any], system: str) -> DecodingOptions:
        """The options of a reply, with the γ of the bundle's device behind them.

        A shift keeps the system prompt, unless they say what it keeps.
        """
        from edgespec_runtime.chat.conversation import keeping_system
        from edgespec_runtime.decoding.options import DecodingOptions, plain
        from edgespec_runtime.pair.device_defaults import with_device_defaults

        self._check_open()
        from_mapping(DecodingOptions, options)  # refuses what is wrong, before the device's own is added
        given = with_device_defaults(options, self._pair.manifest)
        given.pop("context", None)  # the pair has it
        how = from_mapping(DecodingOptions, given)
        return keeping_system(how if draft else plain(how), self._pair.tokenizer, system, self._pair.target)


class Chat:
    """A conversation with a pair. `messages`: a copy of the finished turns, user and assistant alternating."""

    def __init__(self, pair: Pair, system: str) -> None:
        from edgespec_runtime.chat.conversation import Conversation

        self._pair = pair
        self._conversation = Conversation(pair._pair.tokenizer, system)

    @property
    def messages(self) -> list[Message]:
        return [{**message} for message in self._conversation.messages]  # the cache's ids belong to its own

    def send(self, text: str, *, draft: bool = True, **options: Any) -> Generator[Piece, None, None]:
        """The reply to `text`, as `Pair.generate` gives it. Where the context is full, the model no longer reads the oldest
        turns; `messages` keeps them.

        A reply that is left early is remembered as far as it came.
        """
        check_text(text, "the message")
        conversation = self._conversation
        how = self._pair._how(draft, options, conversation.system)
        context = self._pair._pair.target.engine.context_length
        room = context - min(how.max_new_tokens, context // 4)

        def remember(ids: list[int], reply: list[int]) -> None:
            if reply:
                conversation.add(text, ids, reply)

        yield from self._pair._reply(lambda: conversation.fit(text, room)[0], how, remember)
