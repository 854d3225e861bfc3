"""A chat as messages and as the very token ids the cache holds. Knows the chat template, no terminal; runs no engine.

Decoding a reply and encoding it again may give other ids than the model wrote, and the cache would be thrown away. So a new
turn keeps the ids of the turns before it and encodes only what the template writes after the last reply. A chat that is longer
than the context is kept whole; the prompt leaves its oldest turns out.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

from edgespec.core.errors import InputError
from edgespec_runtime.decoding.options import SHIFT, AnyOptions
from edgespec_runtime.engines.cached_engine import CachedEngine, common_length, most_kept
from edgespec_runtime.text.tokenizer import LIKELY, ChatTokenizer, Message

KEPT = 0.75  # of a full context's room: were it all of it, every later turn would move the text and be computed whole
_PLACE = "\ue000reply\ue001"  # private-use characters: stands for the last reply in a rendering, to find what follows it


class Conversation:
    """Messages of a chat, oldest first, and the ids of prompt and reply as they were computed.

    Attributes:
        system: the system prompt, '' for none.
        messages: finished turns, user and assistant alternating.
        ids: ids of those turns up to the end of the last reply; empty where the next prompt must be encoded as a whole.
    """

    def __init__(self, tokenizer: ChatTokenizer, system: str = "") -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self._before: list[int] = []  # `ids` before the last turn
        self._first = 0  # number of the first message that the prompt has

    @property
    def system(self) -> str:
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        self._system = text
        self._start_anew()  # every id after the system prompt moves

    def reset(self, messages: Sequence[Message] = ()) -> None:
        """Forget the turns, or have these instead; the system prompt stays."""
        self.messages = list(messages)
        self._start_anew()

    def undo(self) -> str:
        """Take the last turn back and return what the user said in it, '' where there is no turn."""
        if not self.messages:
            return ""
        text = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        self.ids, self._before = self._before, []
        if not self.ids:
            self._start_anew()
        return text

    def copy(self) -> Conversation:
        """The same conversation, to go on with in another way."""
        other = Conversation(self._tokenizer, self._system)
        other.messages, other.ids, other._before = [*self.messages], [*self.ids], [*self._before]
        other._first = self._first
        return other

    def prompt(self, text: str) -> list[int]:
        """Ids of the chat, without turns that `fit` left out, and of `text` as the next user message, up to the reply."""
        continued = self._continue(text) if self.ids else None
        return self._encoded(self.messages[self._first :], text) if continued is None else continued

    def add(self, text: str, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Record a finished turn: the user's text, the prompt ids it was answered from, the reply's ids as decoded."""
        stream = self._tokenizer.stream()
        answer = (
            stream.feed(reply) + stream.finish()
        )  # as it was shown: decoding all at once is worse where it is cut off
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.ids, self._before = [*prompt, *reply], self.ids

    def fit(self, text: str, room: int) -> tuple[list[int], int]:
        """(prompt of at most `room` tokens, how many more turns it leaves out): the oldest go first, the system prompt stays.

        Raises InputError, and leaves nothing out, where the message alone, or the system prompt, does not fit.
        """
        check_size(self._tokenizer, "the system prompt", [self._system], room)
        check_size(self._tokenizer, "the message", [text], room)
        first = self._first
        sizes = [LIKELY + len(message["content"]) for message in self.messages]  # one is a token at least
        length = sum(sizes[first:])
        # rendering and reading thousands of turns at each try would take an hour
        while length > LIKELY * room:
            length -= sum(sizes[first : first + 2])
            first += 2
        shown = self.messages[first:]
        prompt = self.prompt(text) if first == self._first else self._encoded(shown, text)
        if len(prompt) > room:
            tries = range(1, len(shown) // 2 + 1)
            left = bisect_left(
                tries, True, key=lambda turns: len(self._encoded(shown[2 * turns :], text)) <= KEPT * room
            )
            shown = shown[2 * (left + 1) :]
            prompt = self._encoded(shown, text)
        if len(prompt) > room:
            alone = len(self._encoded([], "")) if self._system else 0
            what, tokens = ("system prompt", alone) if alone > room else ("message", len(prompt))
            raise InputError(
                f"the {what} takes {tokens} tokens and the context has room for {room}; "
                "shorten it, or leave the reply less room with a smaller max_new_tokens"
            )
        left_out = len(self.messages) - len(shown) - self._first
        if left_out:
            self._start_anew(self._first + left_out)
        return prompt, left_out // 2

    def _start_anew(self, first: int = 0) -> None:
        """The next prompt is encoded as a whole, from the message of that number on."""
        self.ids, self._before, self._first = [], [], first

    def _with(self, messages: Sequence[Message], text: str) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *messages, {"role": "user", "content": text}]

    def _encoded(self, messages: Sequence[Message], text: str) -> list[int]:
        return self._tokenizer.encode_chat(self._with(messages, text))

    def _continue(self, text: str) -> list[int] | None:
        """The ids kept, then what the template writes after the last reply; None for a template that rewrites earlier turns."""
        safe, hidden = self._tokenizer.lookalikes.hide(self._with(self.messages[self._first :], text))
        *before, asked, answered, said = safe
        start = self._tokenizer.render([*before, asked])
        place = {"role": "assistant", "content": _PLACE}
        head, _, tail = self._tokenizer.render([*before, asked, place, said]).partition(_PLACE)
        real = self._tokenizer.render(safe)
        kept = head.startswith(start) and not head[len(start) :].strip()
        kept = kept and real.startswith(head) and real.endswith(tail)
        if not kept or real[len(head) : len(real) - len(tail)].strip() != answered["content"].strip():
            return None
        after = self._tokenizer.lookalikes.encode(tail, hidden)
        if self.ids[-1] not in self._tokenizer.stop_ids:  # the reply was cut off: the template closes it
            return self.ids + after
        if self.ids[-1] in after[:2]:  # the model closed the turn itself, perhaps behind a space
            return self.ids + after[after.index(self.ids[-1]) + 1 :]
        return self.ids[:-1] + after


def check_size(tokenizer: ChatTokenizer, what: str, texts: Sequence[str], room: int) -> None:
    """Raise InputError for texts far beyond the room, by their beginning: a chat template's own bound says less."""
    if tokens := tokenizer.far_beyond(room, texts):
        raise InputError(
            f"{what} takes more than {tokens} tokens and the context has room for {room}; shorten it"
        )


def keeping_system(
    options: AnyOptions, tokenizer: ChatTokenizer, system: str, target: CachedEngine
) -> AnyOptions:
    """Options under which a shift of the target's context keeps the system prompt, unless they say themselves what it keeps.

    Raises InputError for a system prompt far beyond the context.
    """
    if options.when_full != SHIFT or options.keep is not None or not system:
        return options
    check_size(tokenizer, "the system prompt", [system], target.engine.context_length)
    first = {"role": "system", "content": system}
    one, other = (tokenizer.encode_chat([first, {"role": "user", "content": text}]) for text in "ab")
    common = common_length(one, other)  # of a stranger's tokenizer or template it may be all
    return dataclasses.replace(options, keep=min(common, most_kept(target.engine.context_length)))
