"""What a rehearsal trains on and talks with: a tokenizer of the target's size, some text, a few instructions.

The tokenizer is the real one where a folder is given, else one trained on this Python's own sources and filled up
with tokens that stand for nothing. What is learnt does not matter, what it costs does.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, whole_file, write_json, write_jsonl, write_text
from edgespec_recipes.models.loading import TOKENIZER_FILES, load_tokenizer
from edgespec_recipes.target_names.tiny_chat import trained_bpe, write_settings

LETTERS_OF_A_TOKEN = 8  # more than any tokenizer here puts into one on average
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + ' ' + eos_token + bos_token }}"
    "{% else %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% endif %}"
    "{% endfor %}"
)
INSTRUCTIONS = (
    "What is a list?",
    "Name three rivers.",
    "Write one line about the sea.",
    "How do I open a file in Python?",
)
HELD_OUT = ("What is a loop?", "Name two colours.")


def write_tokenizer(folder: Path, vocab_size: int, source: Path | None) -> str:
    """Put the tokenizer of `source`, or a made one, into a model folder; returns which, in words.

    Raises InputError where the given one has more tokens than the model's table.
    """
    if source is None:
        _make(folder, vocab_size)
        return f"made here, {vocab_size} tokens"
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        if not (folder / "tokenizer_config.json").is_file():  # a bare one of the Llama 2 kind
            settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True, **NAMES}
            write_json(folder / "tokenizer_config.json", settings)
        with whole_file(folder / "tokenizer.json") as temporary:  # where it is, it is not made again
            load_tokenizer(folder).backend_tokenizer.save(str(temporary))
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer in {source} has {tokenizer.vocab_size} tokens and the model {vocab_size}; give the model's own"
        )
    if not tokenizer.chat_template:
        write_settings(folder, read_json(folder / "tokenizer_config.json"), TEMPLATE)
    return f"{source.name}, {len(tokenizer)} tokens"


def _make(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE with exactly `vocab_size` tokens."""
    from tokenizers import AddedToken

    tokenizer = trained_bpe(_sources(200 * vocab_size), vocab_size, [*NAMES.values()])
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<unused{number}>") for number in range(missing)])
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    write_settings(folder, {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}, TEMPLATE)


def _sources(characters: int) -> Iterator[str]:
    """Source files of the standard library, at most so many characters in all."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")[:characters]
        characters -= len(text)
        if text:
            yield text


def write_data(folder: Path, tokens: int) -> dict[str, Any]:
    """`folder`/text.jsonl with enough text for so many tokens, instructions.jsonl, held_out.jsonl; returns sizes."""
    documents = [{"text": text} for text in _sources(LETTERS_OF_A_TOKEN * tokens)]
    write_jsonl(folder / "text.jsonl", documents)
    for name, texts in (("instructions", INSTRUCTIONS), ("held_out", HELD_OUT)):
        write_jsonl(folder / f"{name}.jsonl", [{"instruction": text} for text in texts])
    return {"documents": len(documents), "instructions": len(INSTRUCTIONS)}
