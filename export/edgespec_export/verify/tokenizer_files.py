"""The tokenizers of an export as their readers see them: the tokenizers library, transformers, llama.cpp."""

from __future__ import annotations

import ctypes
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.llamacpp import load_library
from edgespec_runtime.text.lookalikes import decoded, encoded
from edgespec_runtime.text.tokenizer import read_tokenizer
from edgespec_runtime.untrusted.gguf_file import read_header

from edgespec.core.errors import BundleError, InputError
from edgespec.model_folder.chat_template import read_chat_template


class JsonTokenizer:
    """A tokenizer.json in the tokenizers library; `text`: its content, else the file's. Raises BundleError for what is none."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.special, self.plain = (read_tokenizer(path, text=text) for _ in range(2))
        self.plain.encode_special_tokens = True

    def encode(self, text: str, *, special: bool) -> list[int]:
        tokenizer = self.special if special else self.plain
        return list(encoded(tokenizer, text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(self.special, ids, special=True)

    def beyond_llama_cpp(self) -> dict[str, Callable[[str, bool], bool]]:
        """What this tokenizer does and llama.cpp never does.

        In words, each with a function (text, special): whether it shows where that text is split that way.
        """
        found: dict[str, Callable[[str, bool], bool]] = {}
        if self.special.normalizer is not None and self.special.normalizer.normalize_str("e\u0301") == "\xe9":
            found["text is composed (NFC) first"] = lambda text, _: not unicodedata.is_normalized("NFC", text)
        # as SentencePiece, llama.cpp puts a space before the text and behind every special token, whatever stands there
        if "Metaspace" in str(self.special.pre_tokenizer) and "Prepend" not in str(self.special.normalizer):
            scheme = str(self.special.pre_tokenizer.prepend_scheme)
            found[f"a space is put before text in another way (Metaspace, {scheme})"] = partial(
                self._spaced_otherwise, scheme
            )
        return found

    def _spaced_otherwise(self, scheme: str, text: str, special: bool) -> bool:
        first, *others = (
            re.split("|".join(map(re.escape, self.specials())), text)
            if special and self.specials()
            else [text]
        )
        if scheme == "first" and any(others):
            return True
        return any(section.startswith((" ", "▁")) for section in (first, *others))

    def specials(self) -> dict[str, int]:
        added = self.special.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special and token.content}


class FolderTokenizer(JsonTokenizer):
    """The tokenizer that transformers makes of a model folder: what the model was trained with.

    Attributes:
        whole: the transformers tokenizer.

    Raises InputError where transformers cannot load it, and for a tokenizer.json that would never end.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        has_file = (file := folder / "tokenizer.json").is_file()
        if has_file:
            # one that would never end is refused before transformers reads it
            read_tokenizer(file, InputError)
        kind = PreTrainedTokenizerFast if has_file else AutoTokenizer
        try:
            self.whole: Any = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise InputError(f"the tokenizer in {folder} cannot be loaded: {str(error)[:300]}") from error
        self.whole.chat_template = read_chat_template(folder)
        super().__init__(folder, self.whole.backend_tokenizer.to_str())

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return super().encode(text, special=False)
        ids: list[int] = self.whole(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.whole.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class GgufTokenizer:
    """The tokenizer in a GGUF file, run by llama.cpp without the weights."""

    def __init__(self, library: Any, vocabulary: Any) -> None:
        self._lib, self._vocab = library, vocabulary
        first = self.encode("a", special=False)
        self._prefix = " " if first and self._piece(first[0]).startswith(b" ") else ""  # which nobody wrote

    @classmethod
    @contextmanager
    def opened(cls, file: Path) -> Iterator[GgufTokenizer]:
        """Raises BundleError for a file that llama.cpp cannot load, MissingExtra without llama.cpp."""
        library: Any = load_library()
        read_header(file)
        params = library.llama_model_default_params()
        params.vocab_only = True
        model = library.llama_model_load_from_file(os.fsencode(file), params)
        if not model:
            raise BundleError(f"llama.cpp cannot read the tokenizer of {file}; export it again")
        try:
            yield cls(library, library.llama_model_get_vocab(model))
        finally:
            library.llama_model_free(model)

    def encode(self, text: str, *, special: bool) -> list[int]:
        data = text.encode("utf-8")
        buffer = (self._lib.llama_token * (len(data) + 16))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, special)
        return list(buffer[: max(count, 0)])

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode("utf-8", "replace").removeprefix(self._prefix)

    def _piece(self, token: int) -> bytes:
        """The bytes a token is shown as, also to those who stream it."""
        count = -256
        while count < 0:  # less the bytes that it needs
            buffer = ctypes.create_string_buffer(-count)
            count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return bytes(buffer.raw[:count])
