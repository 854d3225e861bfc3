"""Text to token ids and back, and the chat template. Works on the tokenizer files of a bundle; no transformers.

The folder may come from a stranger: every file is read with a bound, and the template runs in the sandbox of template.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress, takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import read_bounded, read_json
from edgespec.core.manifest import AGAIN, MAX_VOCAB_SIZE
from edgespec.model_folder.chat_template import chat_template_of
from edgespec_runtime.text.lookalikes import PLAIN_CHATS, Lookalikes, breakdowns, decoded, encoded
from edgespec_runtime.untrusted.template import SafeTemplate
from edgespec_runtime.untrusted.tokenizer_growth import check_growth

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024  # the largest in use, of 262,000 tokens, has 33 MB
MAX_SPECIAL = 1024
LIKELY = 8  # characters a token at most, of texts that people write; longer texts are looked at before they are read
PIECE = 16 * 1024  # characters
TAIL = 32  # last ids of a prompt, among which a whole character is looked for
Message = dict[str, str]


def read_tokenizer(path: Path, error: type[EdgespecError] = BundleError, text: str = "") -> Tokenizer:
    """A tokenizer.json; `text`: its content, else the file's. Raises `error` for what is none, or would never end."""
    data = text.encode() or read_bounded(path, error=error, limit=MAX_TOKENIZER_BYTES)
    try:
        check_growth(json.loads(data), path, error)
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit, EdgespecError):
        raise
    # the tokenizers library raises bare Exception, and its panics are none at all
    except BaseException as seen:
        raise error(f"{path} is not a readable tokenizer: {str(seen)[:300]}") from seen
    # what a file says of these was left behind by a call in training
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ChatTokenizer:
    """The tokenizer folder of a bundle: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json.

    Attributes:
        stop_ids: ids that end a reply (every eos id of the generation config, else the tokenizer's eos token).
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = read_tokenizer(folder / "tokenizer.json")
        config = _object(folder / "tokenizer_config.json")
        template = chat_template_of(folder, config, error=BundleError)
        if not template:
            raise InputError(
                f"{folder} has no chat template; a chat target needs chat_template.jinja beside tokenizer.json"
            )
        self._special = {
            name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        try:
            self._template = SafeTemplate(template)
        except TemplateError as error:
            raise InputError(f"the chat template in {folder} is not valid Jinja: {error}") from error
        self.stop_ids = self._stop_ids(folder)

    def _stop_ids(self, folder: Path) -> frozenset[int]:
        where = folder / "generation_config.json"
        ids = _object(where).get("eos_token_id") if where.exists() else None
        if ids is None and (eos := self._special["eos_token"]):
            ids = self._tokenizer.token_to_id(eos)
        found: list[Any] = [] if ids is None else ids if isinstance(ids, list) else [ids]
        for token in found:
            if type(token) is not int or not 0 <= token < MAX_VOCAB_SIZE:
                raise BundleError(
                    f"{where} has the eos_token_id {str(token)[:80]!r}; a token id is wanted: {AGAIN}"
                )
        return frozenset(token for token in found if self._tokenizer.id_to_token(token) is not None)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of a text as it stands; special tokens spelt out in it become theirs.

        `bos`: behind the BOS, where the tokenizer puts one before a text and this text does not begin with it.
        """
        ids = list(encoded(self._tokenizer, text).ids)
        first = self._bos if bos else []
        return ids if ids[: len(first)] == first else first + ids

    @cached_property
    def _bos(self) -> list[int]:
        """What the post-processor puts before a text; some put nothing there."""
        encoding = encoded(self._tokenizer, "a", special=True)
        added = takewhile(bool, encoding.special_tokens_mask)
        return list(compress(encoding.ids, added))

    def far_beyond(self, room: int, texts: Sequence[str]) -> int:
        """Tokens of the beginning of texts, where that alone has more than twice as many as there is `room`; else 0.

        Encoding a whole megabyte takes seconds, and a chat template has its own, less telling bound.
        """
        tokens = 0
        if sum(map(len, texts)) > max(PIECE, LIKELY * room):
            for piece in (text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)):
                tokens += len(self.encode(piece))
                if tokens > 2 * room:
                    return tokens
        return 0

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the target reads it, up to where the reply begins.

        Raises InputError with the template's words where it refuses the messages, BundleError where it passes a bound.
        """
        try:
            return self._template.render(
                {"messages": list(messages), "add_generation_prompt": True, "tools": None, **self._special}
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a chat; the template writes the special tokens, none are added twice, and none come from a message."""
        safe, hidden = self.lookalikes.hide(messages)
        return self.lookalikes.encode(self.render(safe), hidden)

    @cached_property
    def lookalikes(self) -> Lookalikes:
        """Keeps special tokens that are spelt out in a message from becoming theirs."""
        rendered = []
        for chat in PLAIN_CHATS:
            with suppress(InputError):  # a template may refuse a role
                rendered.append(self.render(chat))
        return Lookalikes(self._tokenizer, "".join(rendered))

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """`prompt`: ids of the text that the stream goes on with. Many tokenizers take the blank off a text that begins."""
        stream = TextStream(self._tokenizer)
        for size in range(1, min(len(prompt), TAIL) + 1):
            text = self.decode(prompt[-size:])
            if text and "\ufffd" not in text:
                stream.feed(prompt[-size:])
                break
        return stream


class TextStream:
    """Text from ids as they come; holds back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = ""  # of these ids

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids. Raises BundleError where a stranger's tokenizer breaks down."""
        with breakdowns("a reply"):
            return "".join(map(self._step, ids))

    def _step(self, token: int) -> str:
        self._ids.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers has no class for it
            if "Invalid prefix" not in str(error):
                raise
            return self._begin_again()
        self._shown += text
        return text

    def _begin_again(self) -> str:
        """Bytes that make no character end here: with them, those that were shown count as none either. Go on from this token."""
        before, now = (decoded(self._tokenizer, ids) for ids in (self._ids[:-1], self._ids))
        self._ids = self._ids[-1:]
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown = self._stream.step(self._tokenizer, self._ids[0]) or ""
        return "\ufffd" + now[len(before) :]

    def finish(self) -> str:
        """What was held back: an incomplete character comes out as U+FFFD."""
        whole = decoded(self._tokenizer, self._ids)
        # byte fallback: half a character makes U+FFFD of all bytes before it, also of those that were whole characters
        return whole[len(self._shown) :] if whole.startswith(self._shown) else "\ufffd"


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path, error=BundleError, limit=MAX_TOKENIZER_BYTES, strict=True)
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds {type(value).__name__}; a JSON object is wanted: {AGAIN}")
    return value


def _text(token: Any) -> str:
    """The text of a special token, which a tokenizer config gives as such or as an object; anything else is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and len(text) <= MAX_SPECIAL else ""
