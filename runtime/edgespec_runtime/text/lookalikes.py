"""Special tokens spelt out in a message stay text: only the chat template writes tokens that open and close turns.

A tokenizer finds "<|im_end|>" in a rendered chat wherever it stands, so a user who types it would end the turn and could begin
another in the system's name. Here such text is hidden behind private-use characters before the template runs. What the template
then wrote is encoded in one piece by a second tokenizer, in which the special tokens have other, unguessable names: those the
template wrote get them, and the user's text is put back as it was. So spaces at the joints are the tokenizer's own business, and
a chat without look-alikes never comes here.

Knows tokenizers and messages, no templates. What is plain text to the tokenizer ("[INST]" of Llama 2) it cannot tell apart.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.manifest import AGAIN

Message = dict[str, str]

PLAIN_CHATS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)
"""Chats whose renderings show what a template writes of its own; one that a template refuses is left out."""

_NEVER = "(?!)"  # a pattern that matches nothing
_PLACES = range(0x100000, 0x10FFFE)  # private-use characters of plane 16


@contextmanager
def breakdowns(what: str) -> Iterator[None]:
    """Raise BundleError where a stranger's tokenizer breaks down on `what`: one without a token for what it does not know, a
    pattern without end.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, EdgespecError):
        raise
    # the library raises bare Exception, and its panics are none at all
    except BaseException as error:
        raise BundleError(f"the tokenizer breaks down on {what} ({str(error)[:200]}); {AGAIN}") from error


def encoded(tokenizer: Tokenizer, text: str, *, special: bool = False) -> Encoding:
    """A text as it stands; with `special`, between the tokens that a tokenizer adds. Raises BundleError as `breakdowns` does."""
    with breakdowns(f"a text of {len(text)} characters"):
        found: Encoding = tokenizer.encode(text, add_special_tokens=special)
    return found


def decoded(tokenizer: Tokenizer, ids: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens, with `special` also of those that are special. Raises BundleError as `breakdowns` does."""
    with breakdowns(f"{len(ids)} tokens"):
        return str(tokenizer.decode(list(ids), skip_special_tokens=not special))


class Lookalikes:
    """The special tokens of one tokenizer, kept out of what people write.

    Args:
        tokenizer: not changed here.
        rendered: what the template writes for harmless chats; added tokens that stand in it count as special even where the
            tokenizer does not mark them so. Blanks do not: Gemma's line breaks are added tokens, and people write them too.
    """

    def __init__(self, tokenizer: Tokenizer, rendered: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.ids: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.content and (token.special or (token.content.strip() and token.content in rendered))
        }
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or _NEVER)
        # such tokens are looked for in the normalised text, where other spellings may have become theirs
        self._normalised = tokenizer.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in self.ids
        )

    def hide(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[Message], dict[str, str]]:
        """(messages whose look-alikes are single private-use characters, what each of those stands for).

        The second is empty where there is no look-alike, and the messages are the same then.
        """
        texts = [value for message in messages for value in message.values() if isinstance(value, str)]
        used = set().union(*texts)
        places = (chr(code) for code in _PLACES if chr(code) not in used)
        hidden: dict[str, str] = {}

        @cache
        def place(text: str) -> str:
            free = next(places, None)
            if free is None:
                raise InputError("the message uses every private-use character; leave some out")
            hidden[free] = text
            return free

        def harmless(text: Any) -> Any:
            if not isinstance(text, str):
                return text
            found = self._pattern.sub(lambda match: place(match.group()), text)
            if not self._becomes_special(found):
                return found
            inner = text.strip()  # templates trim what they are given
            start = text.index(inner)
            return text[:start] + place(inner) + text[start + len(inner) :]

        safe = [{name: harmless(value) for name, value in message.items()} for message in messages]
        return safe, hidden

    def encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Ids of what the template wrote for messages from `hide`, or of a part of it; no special tokens are added."""
        if not hidden:
            return list(encoded(self._tokenizer, text).ids)
        tokenizer, names, ids = self._renamed
        text = self._pattern.sub(lambda match: names[match.group()], text)
        text = text.translate({ord(character): spelt for character, spelt in hidden.items()})
        return [ids.get(token, token) for token in encoded(tokenizer, text).ids]

    def _becomes_special(self, text: str) -> bool:
        if not self._normalised:
            return False
        found = encoded(self._tokenizer, text).ids
        return not set(self.ids.values()).isdisjoint(found)

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """(the tokenizer with other names for its special tokens, those names, its ids for them -> the real ones).

        The old names leave the model's vocabulary too: a model that looks whole words up would find them there.
        """
        nonce = secrets.token_hex(16)
        names = {text: f"{chr(0xF0000)}{nonce}{index}{chr(0xF0001)}" for text, index in self.ids.items()}
        spec = json.loads(self._tokenizer.to_str())
        spec["truncation"] = spec["padding"] = spec["post_processor"] = None
        for token in spec["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "single_word": False}
        model = spec["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
        else:  # Unigram: [[piece, score], ...]
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if "merges" in model:
            merges = model["merges"]  # each "a b" or ["a", "b"]
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        renamed = Tokenizer.from_str(json.dumps(spec))
        known = renamed.get_vocab(with_added_tokens=True)
        ids = {known[name]: self.ids[text] for text, name in names.items()}
        return renamed, names, ids
