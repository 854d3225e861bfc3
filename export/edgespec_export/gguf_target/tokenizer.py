"""The tokenizer in a GGUF file as the files of a Hugging Face folder. The inverse of gguf/vocabulary.py, with its table of
pre-tokenizers. What comes out splits text as llama.cpp does with the file; a kind of tokenizer that is not known is refused.

What a GGUF file does not hold, nobody adds: no normalizer (llama.cpp has none), no white space that special tokens swallow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted.gguf_config import AGAIN
from edgespec_runtime.untrusted.gguf_file import Header, read_array
from gguf.constants import TokenType

from edgespec.core.errors import InputError
from edgespec.core.files import told_as, write_json, write_text
from edgespec.model_folder.chat_template import TEMPLATE_FILE
from edgespec_export.gguf.vocabulary import PRE_TOKENIZERS, ROLES
from edgespec_export.verify.tokenizer_files import JsonTokenizer
from edgespec_export.verify.tokenizers import closing_id

_SPACE = "▁"  # SentencePiece's mark of a space
_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",  # SmolLM3's files, and some of Llama 3
    "deepseek-r1-qwen": "qwen2",
}
# llama.cpp takes a word that is a token whole, and begins a text with bos, for these unless the file says otherwise
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
LONGEST = 1024  # characters of a token; the longest in use are runs of a hundred or two
MOST_MERGED = 2**26  # characters of all merges; Gemma's 256,000 tokens have some millions
_FOUND_IN_TEXT = frozenset({TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN})


def write_tokenizer(folder: Path, file: Path, header: Header) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and the chat template, where the file has one.

    A reply ends at the eos and end-of-turn tokens that the file names, and at the token with which its template closes a turn.
    Raises InputError for a tokenizer that is not known, and for tables that cannot be true; BundleError for one that the
    tokenizers library does not read.
    """
    tables = Tables(file, header)
    spec = _byte_level(tables) if tables.model == "gpt2" else _sentencepiece(tables)
    tokenizer = JsonTokenizer(file, json.dumps(spec))  # whether the library takes what was made
    write_json(folder / "tokenizer.json", spec)
    template = header.values.get("tokenizer.chat_template")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.values.get(f"{header.values['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tables.tokens[index] for role, index in tables.roles.items()},
    }
    if isinstance(template, str) and template:
        settings["chat_template"] = template
        write_text(folder / TEMPLATE_FILE, template)
    write_json(folder / "tokenizer_config.json", settings)
    stops = [tables.number(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    if "chat_template" in settings:
        with told_as(folder, file):
            stops.append(closing_id(ChatTokenizer(folder), tokenizer))
    found = [index for index in dict.fromkeys(stops) if index is not None]
    if found:
        write_json(folder / "generation_config.json", {"eos_token_id": found})


class Tables:
    """What a file says about its tokenizer. Raises InputError for tables of other types, and texts that are there twice."""

    def __init__(self, file: Path, header: Header) -> None:
        self.file, self.header = file, header
        self.model = self.value("model", str, "none")
        self.tokens = self.array("tokens", str)
        twice = next((text for text, count in Counter(self.tokens).items() if count > 1), None)
        if twice is not None:
            raise InputError(f"{file} has the token {twice[:60]!r} twice; {AGAIN}")
        longest = max(self.tokens, key=len)
        if len(longest) > LONGEST:
            raise InputError(
                f"{file} has a token of {len(longest):,} characters; {LONGEST:,} at most are read: {AGAIN}"
            )
        if not all(self.tokens):
            raise InputError(f"{file} has an empty token ({self.tokens.index('')}); {AGAIN}")
        self.types = self.array("token_type", int | float) or [int(TokenType.NORMAL)] * len(self.tokens)
        ids = {role: self.number(f"{name}_token_id") for role, name in ROLES.items()}
        self.roles = {role: index for role, index in ids.items() if index is not None}

    def value(self, name: str, kind: type[Any], usual: Any) -> Any:
        """What the file says at a key; `usual` where that is of another type, or nothing."""
        seen = self.header.values.get(f"tokenizer.ggml.{name}")
        return seen if type(seen) is kind else usual

    def number(self, name: str) -> int | None:
        """A token's id, None where the file names none of its tokens."""
        seen = self.value(name, int, -1)
        return seen if 0 <= seen < len(self.tokens) else None

    def array(self, name: str, kind: Any) -> list[Any]:
        array = self.header.arrays.get(f"tokenizer.ggml.{name}")
        found = [] if array is None else read_array(self.file, array)
        if found and not isinstance(found[0], kind):
            raise InputError(f"{self.file} has tokenizer.ggml.{name} of another type; {AGAIN}")
        return found

    def used(self) -> dict[str, int]:
        """{text: id} of all tokens but those that fill up the table."""
        both = enumerate(zip(self.tokens, self.types, strict=True))
        return {text: index for index, (text, kind) in both if kind != TokenType.UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are looked for in the text before it is split; control tokens are special."""
        off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": text, **off, "special": kind != TokenType.USER_DEFINED}
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in _FOUND_IN_TEXT
        ]

    def ends(self, *, bos: bool) -> dict[str, Any] | None:
        """The post-processor that puts bos before a text and eos behind it, where the file wants these; `bos`: unless it says."""
        wanted = {
            "bos": self.value("add_bos_token", bool, bos),
            "eos": self.value("add_eos_token", bool, False),
        }
        used = {role: index for role, index in self.roles.items() if wanted.get(role)}
        if not used:
            return None
        first, last = (
            [{"SpecialToken": {"id": self.tokens[used[role]], "type_id": 0}}] if role in used else []
            for role in wanted
        )
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {self.tokens[index]: index for index in used.values()}
        return {
            "type": "TemplateProcessing",
            "single": [*first, text, *last],
            "pair": [*first, text, *last, *first, {"Sequence": {"id": "B", "type_id": 1}}, *last],
            "special_tokens": {
                token: {"id": token, "ids": [index], "tokens": [token]} for token, index in ids.items()
            },
        }


def _spec(tables: Tables, model: Mapping[str, Any], *, bos: bool, **parts: Any) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tables.added(),
        "normalizer": None,
        "pre_tokenizer": None,
        **parts,
        "post_processor": tables.ends(bos=bos),
        "model": {"type": "BPE", **absent, **off, **model},
    }


def _byte_level(tables: Tables) -> dict[str, Any]:
    pre = tables.value("pre", str, "none")
    steps = PRE_TOKENIZERS.get(_ALIASES.get(pre, pre))
    if steps is None:
        raise InputError(
            f"{tables.file} splits text with the pre-tokenizer {pre[:40]!r}; {', '.join(PRE_TOKENIZERS)} are known: "
            "give the model's folder or hub id instead"
        )
    vocabulary = tables.used()
    pairs = [merge.split(" ", 1) for merge in tables.array("merges", str)]
    for pair in pairs:
        if len(pair) < 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise InputError(
                f"{tables.file} has the merge {' '.join(pair)[:60]!r}, whose parts or result are no tokens; {AGAIN}"
            )
    return _spec(
        tables,
        {"ignore_merges": pre in _WHOLE_WORDS, "vocab": vocabulary, "merges": pairs},
        bos=pre in _WHOLE_WORDS,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def _sentencepiece(tables: Tables) -> dict[str, Any]:
    """llama.cpp joins the neighbours whose text has the best score: in that order a merge for every way to cut every token."""
    scores = tables.array("scores", int | float)
    if tables.model != "llama" or not scores:
        raise InputError(
            f"{tables.file} has the tokenizer {tables.model[:40]!r}; byte-level BPE ('gpt2') and SentencePiece ('llama', with "
            "scores) are read: give the model's folder or hub id instead"
        )
    vocabulary = tables.used()
    prefix = tables.value("add_space_prefix", bool, True)
    marks: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = tables.number("unknown_token_id")
    mark_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return _spec(
        tables,
        {
            "unk_token": None if unknown is None else tables.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in tables.types,
            "vocab": vocabulary,
            "merges": merges_of(vocabulary, scores, tables.types),
        },
        bos=True,
        normalizer={"type": "Sequence", "normalizers": [*marks, mark_spaces]},
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    )


def merges_of(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[list[str]]:
    """Every cut of every token into two tokens, tokens of the best score first. Raises InputError where that is too much."""
    ordered = sorted(vocabulary.items(), key=lambda entry: -scores[entry[1]])
    found, characters = [], 0
    for text, index in ordered:
        if types[index] == TokenType.BYTE:
            continue
        cuts = [cut for cut in range(1, len(text)) if text[:cut] in vocabulary and text[cut:] in vocabulary]
        characters += len(cuts) * len(text)
        if characters > MOST_MERGED:
            raise InputError(
                f"the tokenizer's merges have more than {MOST_MERGED} characters: is this a tokenizer's file?"
            )
        found += [[text[:cut], text[cut:]] for cut in cuts]
    return found
