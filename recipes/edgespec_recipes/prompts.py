"""Prompts: which conversations the target is asked to continue, and their token ids. Knows nothing of models.

A source is a .jsonl file whose rows hold `messages` (ending with the user) or `instruction` (a string), or `python-stdlib`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.errors import InputError
from edgespec.files import read_jsonl
from edgespec.recipe import PYTHON_STDLIB

Messages = list[dict[str, str]]

STDLIB_FILES = {"seed": "seed_instructions.jsonl", "heldout": "heldout.jsonl"}
ROLES = ("system", "user", "assistant")


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
    conversations = [
        _messages(row, f"{path}: row {number}") for number, row in enumerate(read_jsonl(path), 1)
    ]
    if not conversations:
        raise InputError(f"{path} holds no prompts; give rows with 'messages' or 'instruction'")
    return conversations


def _messages(row: dict[str, Any], where: str) -> Messages:
    if isinstance(row.get("instruction"), str):
        return [{"role": "user", "content": row["instruction"]}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"{where} has keys {sorted(row)}; it needs 'messages' (a list) or 'instruction' (a string)"
        )
    for message in messages:
        if not (
            isinstance(message, dict)
            and message.get("role") in ROLES
            and isinstance(message.get("content"), str)
        ):
            raise InputError(
                f"{where} has the message {message!r}; it needs a role ({', '.join(ROLES)}) and a content (a string)"
            )
    if messages[-1]["role"] != "user":
        raise InputError(
            f"{where} ends with the role {messages[-1]['role']!r}; a prompt must end with the user's message"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


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
