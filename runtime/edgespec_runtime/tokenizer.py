"""Text to token ids and back, and the chat template. Works on the tokenizer files of a bundle; no transformers.

A chat template is a stranger's program, so it runs in Jinja's immutable sandbox, on a template of bounded size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from edgespec.errors import BundleError, InputError
from edgespec.files import read_json

MAX_TEMPLATE_CHARACTERS = 64 * 1024
Message = dict[str, str]


class ChatTokenizer:
    """The tokenizer folder of a bundle: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json.

    Attributes:
        stop_ids: ids that end a reply (every eos id of the generation config, else the tokenizer's eos token).
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise BundleError(f"{path} is not a readable tokenizer: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = (
            template_file.read_text(encoding="utf-8")
            if template_file.is_file()
            else config.get("chat_template")
        )
        if not isinstance(template, str) or not template:
            raise InputError(
                f"{folder} has no chat template; a chat target needs chat_template.jinja beside tokenizer.json"
            )
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise InputError(
                f"the chat template has {len(template)} characters; at most {MAX_TEMPLATE_CHARACTERS} are run"
            )
        self._special = {
            name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise InputError(f"the chat template in {folder} is not valid Jinja: {error}") from error
        self.stop_ids = self._stop_ids(folder)

    def _stop_ids(self, folder: Path) -> frozenset[int]:
        generation = folder / "generation_config.json"
        ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
        if ids is None:
            ids = (
                self._tokenizer.token_to_id(self._special["eos_token"])
                if self._special["eos_token"]
                else None
            )
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens added; special tokens spelt out in the text become theirs."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the target reads it, up to where the reply begins. Raises InputError with the template's words."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **self._special
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a chat; the template writes the special tokens, so none are added twice."""
        return self.encode(self.render(messages))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)


class TextStream:
    """Text from ids as they come; holds back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        self._ids.extend(ids)
        text = "".join(
            piece for token in ids if (piece := self._stream.step(self._tokenizer, token)) is not None
        )
        self._length += len(text)
        return text

    def finish(self) -> str:
        """What was held back: an incomplete character comes out as U+FFFD."""
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))[self._length :]


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else (token or "")


def _refuse(message: str) -> None:
    raise TemplateError(message)
