"""Prompts: which conversations the target is asked to continue, and their token ids. Knows nothing of models.

A source is a file of prompts as the runtime reads them, or `python-stdlib`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec_runtime.prompts import read_chats

from edgespec.errors import InputError
from edgespec.recipe import PYTHON_STDLIB

Messages = list[dict[str, str]]

STDLIB_FILES = {"seed": "seed_instructions.jsonl", "heldout": "heldout.jsonl"}


def read_prompts(source: str, split: str) -> list[Messages]:
    """Every conversation of a source. `split` ('seed' or 'heldout') chooses the file where the source is python-stdlib.

    Raises InputError naming file and row: no such file, a row of another shape, a conversation that does not end with the user.
    """
    if source == PYTHON_STDLIB:
        from edgespec_recipes.corpus import stdlib_corpus

        path = stdlib_corpus() / STDLIB_FILES[split]
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise InputError(f"prompts file {source!r} does not exist; give a .jsonl file or {PYTHON_STDLIB}")
    return read_chats(path)


def with_system(messages: Messages, system: str) -> Messages:
    """Put a system prompt first, unless it is empty or the conversation has its own."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of the chat template with the opening of the assistant's turn.

    A template that refuses the system role gets the system text at the head of the first user message.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError:
        if messages[0]["role"] != "system" or len(messages) < 2:
            raise
        first = {
            "role": messages[1]["role"],
            "content": f"{messages[0]['content']}\n\n{messages[1]['content']}",
        }
        text = tokenizer.apply_chat_template(
            [first, *messages[2:]], tokenize=False, add_generation_prompt=True
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
